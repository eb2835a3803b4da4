"""The installation as docs/admin.md has it: its commands, in its order, with what the guide leaves to the site."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from tests.cluster import ClusterError
from tests.guide.guide import Command, Step, steps
from tests.guide.host import Host
from tests.guide.place import ACCOUNT, CHECKOUT, NUMBER, SHARED, Place

PASSWORD = "Kq3-not-to-be-seen"
SETTINGS = "/etc/slurm-ones/config.toml"
SPOOL = f"{SHARED}/slurm-ones/spool"
URL = f"postgresql://{ACCOUNT}@db.example.org/ones"
TABLES = "CREATE TABLESPACE small LOCATION '/tables'"
ONCE = ("sacctmgr", SPOOL, "createuser", "createdb")
"""Commands with these words are for the site, not for each host."""
LATER = ("systemctl enable", "systemctl status", "slurm-ones status")
"""What starts the service and looks at it."""
LAST = 6
"""The step that starts it."""
NIGHTS = "Every night"
Say = Callable[[str], None]


def administer_database(place: Place) -> None:
    """What the site's database administrator does (pg_hba.conf, where to listen), and a way in for who looks on."""
    db = place.db
    folder = db.sh("echo /etc/postgresql/*/main").strip()
    conf = db.root / folder.lstrip("/")
    with (conf / "postgresql.conf").open("a") as settings:
        settings.write("listen_addresses = '127.0.0.1'\nunix_socket_directories = '/var/run/postgresql,/sockets'\n")
    hba = conf / "pg_hba.conf"
    rules = f"local all postgres trust\nhost ones {ACCOUNT} 127.0.0.1/32 scram-sha-256\nhost all all all reject\n"
    hba.write_text(rules + hba.read_text())
    place.database("restart")


def install(place: Place, host: Host, *, first: bool, settings: str, drop_in: str, say: Say) -> None:
    """Follow the steps up to the start; `first` for the first host of the site. `settings` is what the site writes into
    its config.toml, `drop_in` what it adds to the guide's own."""
    for step in steps():
        if step.number > LAST:
            break
        for command in step.commands:
            if not first and any(word in command.line for word in ONCE):
                continue
            if any(word in command.line for word in LATER):
                continue
            _type(place, host, step, command, settings, drop_in, say)


def start(host: Host, say: Say) -> None:
    for step in steps():
        for command in step.commands if step.number <= LAST else ():
            if any(word in command.line for word in LATER):
                say(f"{host.name} # {command.line}")
                if "slurm-ones status" in command.line:
                    # It has to have ticked.
                    host.until(functools.partial(_succeeds, host, command.line), command.line)
                host.sh(command.line)


def nights(host: Host, say: Say) -> None:
    """The timer, and one night's work at once."""
    (step,) = (step for step in steps() if step.title == NIGHTS)
    for command in step.commands:
        say(f"{host.name} # {command.line}")
        host.sh(command.line, cwd=CHECKOUT)
    host.sh("systemctl start slurm-ones-maintain.service")
    say(host.sh("systemctl list-timers --no-pager slurm-ones-maintain.timer | sed -n 2p").strip())


def _succeeds(host: Host, line: str) -> bool:
    return host.ask(line).returncode == 0


def _type(place: Place, host: Host, step: Step, command: Command, settings: str, drop_in: str, say: Say) -> None:
    line = command.line
    say(f"{host.name if command.root else 'db'} {'#' if command.root else '$'} {command.line}")
    if not command.root:
        # It asks twice.
        place.db.sh(line, user="postgres", cwd="/", input=f"{PASSWORD}\n" * 2)
        if line.startswith("createdb") and place.has("/tables"):
            place.db.sh("chown postgres /tables && chmod 700 /tables")
            for sql in (TABLES, "ALTER DATABASE ones SET TABLESPACE small"):
                place.db.sh(f"psql -q -c {shlex.quote(sql)}", user="postgres", cwd="/")
        return
    if line.startswith("systemctl edit"):
        # An editor that writes what the guide shows; systemctl insists on a terminal.
        (text,) = step.files
        (host.root / "root/drop-in").write_text(text + drop_in)
        editor = host.root / "root/editor"
        editor.write_text('#!/bin/sh\nfor file; do :; done\ncp /root/drop-in "$file"\n')
        editor.chmod(0o755)
        host.sh(f"script -qec '{line}' /dev/null", env={"SYSTEMD_EDITOR": "/root/editor", "TERM": "dumb"})
        return
    typed = f"{PASSWORD}\n" if line.startswith("read ") else None
    done = host.ask(line, cwd=CHECKOUT, timeout=300, input=typed)
    if done.returncode != 0:
        raise ClusterError(f"{host.name}: {command.line}: exit status {done.returncode}: {done.stderr}{done.stdout}")
    if "sysusers.d.conf" in line:
        edit(host.root / "usr/lib/sysusers.d/slurm-ones.conf", rf"^u {ACCOUNT} -", f"u {ACCOUNT} {NUMBER}")
    if "pip install" in line:
        place.keep_environment(host)
    if line == f"cp slurm_ones/service/units/config.toml {Path(SETTINGS).parent}/":
        write(host, settings)


def edit(path: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, text, path.read_text(), flags=re.MULTILINE)
    if count == 0:
        raise LookupError(f"{path}: nothing is {pattern!r}")
    path.write_text(changed)


def write(host: Host, settings: str) -> None:
    """Fill in the settings file as an editor would: each of these `key = value` lines in place of the key's own, which
    may be a remark."""
    path = host.root / SETTINGS.lstrip("/")
    text = path.read_text()
    for line in settings.strip().splitlines():
        key = re.escape(line.partition(" ")[0])
        # A text for `sub`, in which a backslash would mean something.
        fresh = line.replace("\\", r"\\")
        text, count = re.subn(rf"^(#|# )?{key} = .*$", fresh, text, count=1, flags=re.MULTILINE)
        if count == 0:
            raise LookupError(f"config.toml has no {key}")
    path.write_text(text)

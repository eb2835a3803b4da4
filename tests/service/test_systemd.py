"""The service: what it tells systemd, its unit, and the settings that come with it."""

from __future__ import annotations

import configparser
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ones_db import Store
from slurm_ones.cli.run import JITTER, jitter
from slurm_ones.companion import Companion
from slurm_ones.config import Settings, parse
from slurm_ones.service.daemon import Daemon
from slurm_ones.service.health import Notifier
from tests.act.plain_job import Slurm
from tests.cluster import paths
from tests.commands import call
from tests.service.test_daemon import Passing

SYSTEMD = paths.REPOSITORY / "slurm_ones/service/units"
UNIT = SYSTEMD / "slurm-ones.service"
EXPOSURE = 1.6
"""What `systemd-analyze security` may give at most; it says OK up to 5.0, where 10 is no protection at all."""


class Manager:
    """A service manager's end of the socket."""

    def __init__(self, path: Path | str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        """All words since the last call."""
        words = []
        while True:
            try:
                words.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return words


@pytest.fixture
def manager(public: Path) -> Iterator[Manager]:
    """One in a folder of a short name: a socket's has 107 bytes at most, and those of pytest's may be longer."""
    manager = Manager(public / "notify")
    yield manager
    manager.socket.close()


def told(public: Path, **more: str) -> Notifier:
    return Notifier({"NOTIFY_SOCKET": str(public / "notify"), **more})


def test_the_words_are_those_of_the_protocol(manager: Manager, public: Path) -> None:
    """systemd ignores what it does not know: a wrong word would end in a service that is killed at its start."""
    notifier = told(public)
    notifier.ready("cluster here")
    notifier.reloading()
    notifier.status("a line\nand READY=1 more")
    notifier.stopping("leaves", 90.5)
    ready, reloading, status, stopping = manager.heard()
    assert ready == "READY=1\nSTATUS=cluster here"
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d{6,}", reloading)
    assert status == "STATUS=a line and READY=1 more"
    assert stopping == "STOPPING=1\nSTATUS=leaves\nEXTEND_TIMEOUT_USEC=90500000"


def test_the_watchdog_is_fed_in_time_and_not_at_every_turn(
    manager: Manager, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within half of what systemd allows, from the first turn on; and only by the process that is meant."""
    now = 1000.0
    monkeypatch.setattr("slurm_ones.service.health.time.monotonic", lambda: now)
    notifier = told(public, WATCHDOG_USEC="20000000", WATCHDOG_PID=str(os.getpid()))
    fed = []
    for _ in range(40):
        notifier.alive()
        fed += [now for _ in manager.heard()]
        now += 1.0
    assert fed[0] == 1000.0 and {b - a for a, b in itertools.pairwise(fed)} == {5.0}
    told(public, WATCHDOG_USEC="20000000", WATCHDOG_PID="1").alive()
    told(public).alive()
    assert manager.heard() == []


def test_it_does_not_reach_slurms_commands(public: Path) -> None:
    """They get the environment; what they say in our name would be believed."""
    environment = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    Notifier(environment)
    assert environment == {"PATH": "/bin"}


def test_a_manager_that_is_gone_or_deaf_costs_nothing(public: Path) -> None:
    """No error, and no wait once its buffer is full."""
    told(public).ready("no receiver")
    Notifier({}).ready("nobody is there")
    manager = Manager(public / "notify")
    notifier = told(public)
    for _ in range(5_000):
        notifier.status("x" * 200)
    assert 0 < len(manager.heard()) < 5_000
    manager.socket.close()


def test_an_abstract_socket(tmp_path: Path) -> None:
    """systemd writes it with an @ in place of the zero byte."""
    name = f"slurm-ones-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    Notifier({"NOTIFY_SOCKET": f"@{name}"}).status("here")
    assert manager.heard() == ["STATUS=here"]
    manager.socket.close()


@given(st.text(max_size=400))
def test_a_status_is_one_line(words: str) -> None:
    """Whatever is in it: a second line would be another word to systemd."""
    name = f"slurm-ones-line-{os.getpid()}"
    manager = Manager(f"\0{name}")
    try:
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).status(words)
        assert all(said.startswith("STATUS=") and "\n" not in said for said in manager.heard())
    finally:
        manager.socket.close()


def unit() -> dict[str, str]:
    """The [Service] section: the last value of each key."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def seconds(text: str) -> float:
    number, word = re.fullmatch(r"(\d+)(s|min)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "min": 60}[word]


def test_the_unit_waits_for_a_graceful_stop_and_leaves_no_orphan() -> None:
    """What is under way is finished within leave_s; then everything of ours is killed, Slurm's commands included."""
    section, settings = unit(), Settings()
    assert seconds(section["TimeoutStopSec"]) > settings.resize.leave_s + 2 * settings.timeout_s
    assert seconds(section["WatchdogSec"]) > 4 * settings.timeout_s
    assert section["KillMode"] == "mixed" and section["Type"] == "notify"
    assert section["Restart"] == "on-failure" and section["RestartPreventExitStatus"] == "78"
    assert section["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_page_is_started_again_until_there_is_a_database(tmp_path: Path) -> None:
    """At a site's first start, and after a night without its server."""
    done = call("web", "--database", f"sqlite:///{tmp_path / 'none.sqlite'}")
    assert "no such database" in done.stderr
    text = (SYSTEMD / "slurm-ones-web.service").read_text()
    never = re.search(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    assert done.exit_code and (never is None or str(done.exit_code) not in never[1].split())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", [UNIT.name, "slurm-ones-maintain.service", "slurm-ones-web.service"])
def test_systemd_finds_the_unit_sound_and_well_protected(tmp_path: Path, name: str) -> None:
    copy = tmp_path / name
    text, count = re.subn(r"^ExecStart=\S+", "ExecStart=/bin/true", (SYSTEMD / name).read_text(), flags=re.MULTILINE)
    assert count == 1
    copy.write_text(text)
    verified = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    complaints = [line for line in verified.stderr.splitlines() if name in line]
    assert verified.returncode == 0 and not complaints, verified.stderr
    analysed = ["systemd-analyze", "security", "--offline=true", f"--threshold={round(EXPOSURE * 10)}", copy]
    done = subprocess.run(analysed, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot look at a unit that is not loaded")
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_account_and_the_folders_are_those_of_the_unit() -> None:
    section = unit()
    account = next(x for x in (SYSTEMD / "sysusers.d.conf").read_text().splitlines() if x.startswith("u "))
    assert account.split()[1] == section["User"] == section["Group"]
    assert section["WorkingDirectory"] in account and section["WorkingDirectory"].endswith(section["StateDirectory"])
    folders = [x.split() for x in (SYSTEMD / "tmpfiles.d.conf").read_text().splitlines() if x[:1] in ("d", "z")]
    spool = next(x for x in folders if x[1] == section["ReadWritePaths"].lstrip("-"))
    assert spool[2:5] == ["0755", section["User"], section["Group"]]
    assert section["ExecStart"].endswith(f"--config {folders[1][1]}")


def sections() -> dict[str, set[str]]:
    """The keys of each section of the settings, those at the top under an empty name."""
    found = {"": set(Settings.model_fields)}
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = set(field.annotation.model_fields)
            found[""].discard(name)
    return found


def test_the_settings_that_come_with_it_are_accepted_and_whole() -> None:
    """People start from them: what is commented out is a default or an example that is accepted, and no key that we
    have is missing."""
    text = (SYSTEMD / "config.toml").read_text()
    settings = parse(text, "config.toml")
    assert (settings.mode, settings.scope, str(settings.spool)) == ("advise", "all", "/var/spool/slurm-ones")
    assert settings.database_url == "sqlite:////var/lib/slurm-ones/ones.sqlite"
    defaults = re.sub(r"^#(?=[a-z])", "", text, flags=re.MULTILINE)
    assert parse(defaults, "config.toml") == settings
    examples = re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE)
    # Of the three ways to name a database one holds at a time.
    for name in ('database = "sqlite', 'database = "postgresql', "database_url_file ="):
        lines = [x for x in examples.splitlines() if not x.startswith("database") or x.startswith(name)]
        assert parse("\n".join(lines), "config.toml") != settings
    there: dict[str, set[str]] = {}
    section = ""
    for line in text.splitlines():
        if found := re.match(r"\[(\w+)\]", line):
            section = found[1]
        elif found := re.match(r"(?:# ?)?([a-z_]+) = ", line):
            there.setdefault(section, set()).add(found[1])
    assert there == sections()


def test_companions_do_not_strike_together(empty_url: str) -> None:
    """Each wait differs a little from the interval; two that were started at once drift apart."""
    slurm = Slurm()
    with Store.open(empty_url, "here") as store:
        companion = Companion(Settings(tick_s=60), slurm, store, clock=slurm.clock)
        stop = Passing(slurm, 600.0)
        Daemon(lambda: companion, clock=slurm.clock, sleep=slurm.pass_time, jitter=jitter).run(stop)
    assert len(set(stop.waits)) > 5
    assert all(60 * (1 - JITTER) <= wait <= 60 * (1 + JITTER) for wait in stop.waits)


HANGS = """
import os, signal, threading
from types import SimpleNamespace
from slurm_ones.cli import run
from slurm_ones.config import Settings
from slurm_ones.service.daemon import SignalStop

run.SPARE_S = 0.3
service = run._Service.__new__(run._Service)
service.current = SimpleNamespace(settings=Settings(timeout_s=0.1, resize={"leave_s": 0.1}))
service.stop, service.notifier = SignalStop(), run.Notifier({})
signal.signal(signal.SIGTERM, service._stop)
lock = threading.Lock()
lock.acquire()
os.kill(os.getpid(), signal.SIGTERM)
lock.acquire()
"""


@pytest.mark.slow
def test_a_stopped_companion_ends_whatever_it_waits_for() -> None:
    """For example for a command that hangs in the kernel. No systemd kills a user's companion."""
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 1 and "line 16 in <module>" in done.stderr, done.stderr

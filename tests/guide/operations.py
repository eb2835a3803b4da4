"""docs/operations.md typed at the site, in its order: from a day with `advise` until nothing of it is left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from tests.cluster import root
from tests.guide import guide
from tests.guide.guide import OPERATIONS, Command
from tests.guide.host import Host
from tests.guide.operators import STOP_FILE, NotSeen
from tests.guide.place import ACCOUNT, SHARED
from tests.guide.service import ObservedService
from tests.guide.site import HOST

FIRST_DAY, UPGRADE = "A first day with `advise`", "What an upgrade changes, and how to see it"
ONCE = ("slurm-ones", "for", "scontrol", "squeue", "sacctmgr")
"""What is typed on one host of the site; all else is typed on each."""
NEWER = "UPDATE alembic_version SET version_num = '9999'"
QUIET_S = 120.0
LEFT = f"find / {SHARED} -xdev -path /root -prune -o -path /tmp -prune -o -iname '*slurm[-_]ones*' -print"
Section = Callable[[ObservedService], str]


def type_block(service: ObservedService, block: Iterable[Command]) -> str:
    """Type a block's lines where each belongs; what they printed."""
    printed = []
    for command in block:
        if not command.root:
            printed.append(service.place.db.sh(command.line, user="postgres", cwd="/"))
            continue
        for host in service.installed[:1] if command.line.startswith(ONCE) else service.installed:
            printed.append(host.sh(f"{guide.preamble()}\n{command.line}"))
    return "".join(printed)


def type_table(service: ObservedService, title: str) -> str:
    """Type the commands of a table's second column. They may find something, and none may fail."""
    host, count = service.installed[0], 0
    for row in guide.table(title, OPERATIONS):
        for code in re.findall(r"`([^`]+)`", row.cells[1]):
            line = code.replace(r"\|", "|").replace("NEW ", "slurm-ones ").replace("JOB", str(min(service.elastic())))
            done = host.ask(f"{guide.preamble()}\n{line}")
            if done.returncode > 1 or "Traceback" in done.stderr:
                raise NotSeen(f"{code}: {done.returncode}, {done.stdout}{done.stderr}")
            count += 1
    return f"{count} commands, and none failed"


def sql(service: ObservedService, text: str) -> str:
    return service.place.db.sh(f'psql -Atc "{text}" ones', user="postgres", cwd="/").strip()


def first_day(service: ObservedService) -> str:
    return type_table(service, FIRST_DAY)


def restored(service: ObservedService) -> str:
    """What happened after a backup is not known any more, and no job suffers by that."""
    back_up, restore, look = guide.blocks("Back up and restore")
    service.set_quiet(True)
    settle(service)
    began = time.time()
    type_block(service, back_up)
    service.leader.sh("systemctl reload slurm-ones")
    later = f"SELECT count(*) FROM actions WHERE time BETWEEN {began} AND "
    until = time.time() + 30.0
    while int(sql(service, later + str(time.time()))) == 0:
        if time.time() > until:
            raise NotSeen("a reload is not among the actions")
        time.sleep(0.5)
    between, service.repaired_at = later + str(time.time()), time.time()
    type_block(service, restore)
    if sql(service, between) != "0":
        raise NotSeen("what happened after the backup is still there")
    if held := type_block(service, look):
        raise NotSeen(f"held: {held}")
    return "what was recorded after the backup is gone"


def compared(service: ObservedService) -> str:
    """With the files of monitoring, as docs/admin.md has them."""
    service.installed[0].sh("mkdir -p /etc/prometheus")
    (alerts, _), *_ = guide.blocks("Figures for Prometheus", page=guide.ADMIN)
    type_block(service, [alerts])
    return type_table(service, UPGRADE)


def rolled_back(service: ObservedService) -> str:
    """A newer schema is refused; with program and dump of before it goes on."""
    before, back = guide.blocks("Roll an upgrade back")
    service.set_quiet(True)
    settle(service)
    type_block(service, before)
    for host in service.installed:
        host.sh("systemctl stop slurm-ones")
    sql(service, NEWER)
    host = service.installed[0]
    host.sh("systemctl start --no-block slurm-ones")
    line = service.see_journal(host, "9999 is newer")
    type_block(service, back)
    return line


def maintained(service: ObservedService) -> str:
    reserve, quiet, again = guide.blocks("Maintenance windows")
    type_block(service, reserve)
    type_block(service, quiet)
    settle(service)
    type_block(service, again)
    return "nothing was open, then it went on"


def settle(service: ObservedService) -> None:
    """Wait until no resize is open: nothing is begun meanwhile."""
    until = time.monotonic() + QUIET_S
    with service.store() as store:
        while store.open_resizes() or store.deferrals():
            if time.monotonic() > until:
                raise NotSeen("resizes go on in spite of the stop file")
            time.sleep(0.3)


SECTIONS: dict[str, Section] = {
    FIRST_DAY: first_day,
    "Back up and restore": restored,
    UPGRADE: compared,
    "Roll an upgrade back": rolled_back,
    "Maintenance windows": maintained,
}
"""Those after which the service is well; the last one, `uninstall`, leaves none."""


def uninstall(service: ObservedService) -> list[str]:
    """Type it; what is left of the service, or was done to people's jobs."""
    before = service.jobs()
    for block in guide.blocks("Uninstall", "console(?: files)?"):
        type_block(service, block)
        if any(STOP_FILE in command.line for command in block):
            settle(service)
    faults = [f"{host.name}: {line}" for host in service.installed for line in left(host)]
    if ACCOUNT in service.cluster.run(["sacctmgr", "-n", "show", "user"], user="root").stdout:
        faults.append("Slurm knows the account's rights")
    names = service.place.db.sh(
        "psql -Atc 'SELECT datname FROM pg_database' && psql -Atc '\\du'", user="postgres", cwd="/"
    )
    faults += [line for line in names.splitlines() if line.startswith(("ones", ACCOUNT))]
    for job_id, now in service.jobs().items():
        expected, then = service.expected.get(job_id), before.get(job_id)
        if expected is None or then is None or then.ended:
            continue
        if now.ended or (now.held and not then.held) or (then.running and now.restart != then.restart):
            faults.append(f"job {job_id} is {now.state.value}, held: {now.held}, restarted: {now.restart}")
        if expected.role == "elastic" and now.comment:
            faults.append(f"job {job_id} has its comment {now.comment!r}")
        if expected.role != "elastic" and now.comment != then.comment:
            faults.append(f"the comment of job {job_id} was changed")
    return faults


def left(host: Host) -> list[str]:
    """Files on a host that are the service's by their names and not the image's, and its account."""
    found = host.sh(LEFT, check=False).splitlines()
    fresh = [line for line in found if not (root.folder(HOST) / line.lstrip("/")).exists()]
    return fresh + host.sh(f"getent passwd {ACCOUNT}", check=False).splitlines()

"""The database, and disks that are full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.guide.breaks import row
from tests.guide.host import Host
from tests.guide.install import SPOOL
from tests.guide.operators import NotSeen
from tests.guide.place import SHARED
from tests.guide.service import ObservedService


@contextmanager
def filled(host: Host, place: str) -> Iterator[None]:
    """A small disk without a byte left."""
    ballast = f"{place}/ballast"
    for size in ("64k", "1k"):
        host.sh(f"dd if=/dev/zero of={ballast} bs={size} oflag=append conv=notrunc", check=False)
    try:
        yield
    finally:
        host.sh(f"rm -f {ballast}")


@row("database down", "stopped")
def _(service: ObservedService) -> None:
    resize, leader = service.cause_resize(), service.leader
    service.mark_broken(f"PostgreSQL stopped while job {resize.job_id} was {resize.state}")
    service.place.database("stop")
    service.see_journal(leader, "trying again in|trying to take the lead again")
    service.see_status(leader, "database: ")
    service.mark_repaired("PostgreSQL started")
    service.place.database("start")


@row("database down", "killed")
def _(service: ObservedService) -> None:
    resize, leader = service.cause_resize(), service.leader
    service.mark_broken(f"PostgreSQL killed while job {resize.job_id} was {resize.state}")
    service.place.database("kill --signal=KILL")
    service.place.database("stop")
    service.see_journal(leader, "trying again in|trying to take the lead again")
    service.mark_repaired("PostgreSQL started")
    service.place.database("start")


@row("database down", "when the service starts")
def _(service: ObservedService) -> None:
    leader = service.leader
    service.mark_broken("PostgreSQL stopped, then the service started")
    leader.sh("systemctl stop slurm-ones")
    service.place.database("stop")
    leader.sh("systemctl start slurm-ones")
    service.see_journal(leader, "starting again in")
    service.see(lambda: leader.sh("systemctl status slurm-ones", check=False), "waits: ")
    service.mark_repaired("PostgreSQL started")
    service.place.database("start")


@row("database host's or companion's disk full")
def _(service: ObservedService) -> None:
    resize, leader = service.cause_resize(), service.leader
    service.mark_broken(f"the database's disk filled while job {resize.job_id} was {resize.state}")
    with filled(service.place.db, "/tables"):
        service.see_journal(leader, "[Nn]o space|disk is full|disk full", 120)
    service.mark_repaired("room made")


@row("spool full, or not writable", "full")
def _(service: ObservedService) -> None:
    service.mark_broken("the spool's disk filled")
    with filled(service.leader, SHARED):
        _ordered_in_vain(service, "No space left")
    service.mark_repaired("room made")


@row("spool full, or not writable", "not writable")
def _(service: ObservedService) -> None:
    service.mark_broken("the spool given to root")
    service.leader.sh(f"chown root {SPOOL}")
    try:
        _ordered_in_vain(service, "no order could be given")
    finally:
        service.leader.sh(f"chown slurm-ones {SPOOL}")
    service.mark_repaired("the spool given back")


def _ordered_in_vain(service: ObservedService, words: str) -> None:
    resize = service.wait_failed_resize(words)
    service.see(lambda: service.why(resize.job_id), words)
    if not service.harness.job(resize.job_id).running:
        raise NotSeen(f"job {resize.job_id} does not train on")


@row("a user's directory full")
def _(service: ObservedService) -> None:
    job_id = service.on_small_disk()
    service.harness.wait(job_id, lambda job: job.running, "running", 120)
    service.mark_broken(f"the directory of job {job_id} filled")
    with filled(service.leader, "/full"):
        service.wait_failed_resize("no checkpoint in time", job_id)
        service.see(lambda: service.why(job_id), "no checkpoint in time")
    service.mark_repaired("room made")

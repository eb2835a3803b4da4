"""The database, and disks that are full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.guide.breaks.known import row
from tests.guide.host import Host
from tests.guide.install import SPOOL
from tests.guide.people import NotSeen
from tests.guide.place import SHARED
from tests.guide.scene import Scene


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
def _(scene: Scene) -> None:
    resize, leader = scene.stir(), scene.leader
    scene.broken(f"PostgreSQL stopped while job {resize.job_id} was {resize.state}")
    scene.place.database("stop")
    scene.see_journal(leader, "trying again in|asking who leads again")
    scene.see_status(leader, "database: ")
    scene.mended("PostgreSQL started")
    scene.place.database("start")


@row("database down", "killed")
def _(scene: Scene) -> None:
    resize, leader = scene.stir(), scene.leader
    scene.broken(f"PostgreSQL killed while job {resize.job_id} was {resize.state}")
    scene.place.database("kill --signal=KILL")
    scene.place.database("stop")
    scene.see_journal(leader, "trying again in|asking who leads again")
    scene.mended("PostgreSQL started")
    scene.place.database("start")


@row("database down", "when the service starts")
def _(scene: Scene) -> None:
    leader = scene.leader
    scene.broken("PostgreSQL stopped, then the service started")
    leader.sh("systemctl stop slurm-ones")
    scene.place.database("stop")
    leader.sh("systemctl start slurm-ones")
    scene.see_journal(leader, "starting again in")
    scene.see(lambda: leader.sh("systemctl status slurm-ones", check=False), "waits: ")
    scene.mended("PostgreSQL started")
    scene.place.database("start")


@row("database host's or companion's disk full")
def _(scene: Scene) -> None:
    resize, leader = scene.stir(), scene.leader
    scene.broken(f"the database's disk filled while job {resize.job_id} was {resize.state}")
    with filled(scene.place.db, "/tables"):
        scene.see_journal(leader, "[Nn]o space|disk is full|disk full", 120)
    scene.mended("room made")


@row("spool full, or not writable", "full")
def _(scene: Scene) -> None:
    scene.broken("the spool's disk filled")
    with filled(scene.leader, SHARED):
        _ordered_in_vain(scene, "No space left")
    scene.mended("room made")


@row("spool full, or not writable", "not writable")
def _(scene: Scene) -> None:
    scene.broken("the spool given to root")
    scene.leader.sh(f"chown root {SPOOL}")
    try:
        _ordered_in_vain(scene, "no order could be given")
    finally:
        scene.leader.sh(f"chown slurm-ones {SPOOL}")
    scene.mended("the spool given back")


def _ordered_in_vain(scene: Scene, words: str) -> None:
    resize = scene.in_vain(words)
    scene.see(lambda: scene.why(resize.job_id), words)
    if not scene.desk.job(resize.job_id).running:
        raise NotSeen(f"job {resize.job_id} does not train on")


@row("a user's directory full")
def _(scene: Scene) -> None:
    job_id = scene.on_small_disk()
    scene.desk.wait(job_id, lambda job: job.running, "running", 120)
    scene.broken(f"the directory of job {job_id} filled")
    with filled(scene.leader, "/full"):
        scene.in_vain("no checkpoint in time", job_id)
        scene.see(lambda: scene.why(job_id), "no checkpoint in time")
    scene.mended("room made")

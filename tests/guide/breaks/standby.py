"""What takes two companions."""

from __future__ import annotations

import time

from tests.guide.breaks.companion import KILL
from tests.guide.breaks.known import row
from tests.guide.scene import PROGRAM, Scene

FROZEN_S = 20.0


@row("companion killed (OOM, `kill -9`)", "the standby leads", standby=True)
def _(scene: Scene) -> None:
    host, other = scene.pair()
    resize = scene.stir()
    scene.broken(f"kill -9 of the leader while job {resize.job_id} was {resize.state}")
    host.sh(KILL)
    scene.see_journal(other, "leads, in term")


@row("companion stopped (`kill -STOP`, a frozen VM)", "with a standby", standby=True)
def _(scene: Scene) -> None:
    host, other = scene.pair()
    resize = scene.stir()
    scene.broken(f"the leader's host frozen while job {resize.job_id} was {resize.state}")
    host.freeze()
    try:
        scene.see_journal(other, "leads, in term")
        time.sleep(FROZEN_S)
    finally:
        host.thaw()
    scene.mended("the host thawed, in the other's term")
    scene.see_journal(host, "stands by: ")


@row("host lost", standby=True)
def _(scene: Scene) -> None:
    host, other = scene.pair()
    resize = scene.stir()
    scene.broken(f"the leader's host gone while job {resize.job_id} was {resize.state}")
    host.stop()
    scene.installed.remove(host)
    scene.lost.append(host)
    scene.see_journal(other, "leads, in term")
    scene.see_status(other, "leads since")


@row("two companions by mistake")
def _(scene: Scene) -> None:
    host = scene.leader
    scene.broken("a second `slurm-ones run --act` on the same host")
    second = f"timeout 20 {PROGRAM} run --act --config /etc/slurm-ones/config.toml"
    scene.see(lambda: host.ask(f"{second} 2>&1").stdout, "stands by: ")

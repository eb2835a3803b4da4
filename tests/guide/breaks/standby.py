"""What takes two companions."""

from __future__ import annotations

import time

from tests.guide.breaks import row
from tests.guide.breaks.companion import KILL
from tests.guide.service import PROGRAM, ObservedService

FROZEN_S = 20.0


@row("companion killed (OOM, `kill -9`)", "the standby leads", standby=True)
def _(service: ObservedService) -> None:
    host, other = service.pair()
    resize = service.cause_resize()
    service.mark_broken(f"kill -9 of the leader while job {resize.job_id} was {resize.state}")
    host.sh(KILL)
    service.see_journal(other, "leads, in term")


@row("companion stopped (`kill -STOP`, a frozen VM)", "with a standby", standby=True)
def _(service: ObservedService) -> None:
    host, other = service.pair()
    resize = service.cause_resize()
    service.mark_broken(f"the leader's host frozen while job {resize.job_id} was {resize.state}")
    host.freeze()
    try:
        service.see_journal(other, "leads, in term")
        time.sleep(FROZEN_S)
    finally:
        host.thaw()
    service.mark_repaired("the host thawed, in the other's term")
    service.see_journal(host, "stands by: ")


@row("host lost", standby=True)
def _(service: ObservedService) -> None:
    host, other = service.pair()
    resize = service.cause_resize()
    service.mark_broken(f"the leader's host gone while job {resize.job_id} was {resize.state}")
    host.stop()
    service.installed.remove(host)
    service.lost.append(host)
    service.see_journal(other, "leads, in term")
    service.see_status(other, "leads since")


@row("two companions by mistake")
def _(service: ObservedService) -> None:
    host = service.leader
    service.mark_broken("a second `slurm-ones run --act` on the same host")
    second = f"timeout 20 {PROGRAM} run --act --config /etc/slurm-ones/config.toml"
    service.see(lambda: host.ask(f"{second} 2>&1").stdout, "stands by: ")

"""The companion killed, hanging, gone for good."""

from __future__ import annotations

import time

from tests.guide import guide
from tests.guide.breaks import row
from tests.guide.operators import NotSeen
from tests.guide.service import ObservedService

MAIN_PID = "$(systemctl show -P MainPID slurm-ones)"
KILL = "systemctl kill --signal=KILL --kill-whom=main slurm-ones"
SLOWER = "/run/systemd/system/slurm-ones.service.d/slower.conf"
HELD = ("reshaping", "releasing")
GONE = "… and never started again"
HUNG_S = 120.0


@row("companion killed (OOM, `kill -9`)")
def _(service: ObservedService) -> None:
    host = service.leader
    resize = service.cause_resize()
    service.mark_broken(f"kill -9 while job {resize.job_id} was {resize.state}")
    # systemd waits until it was looked at: `status` tells of it for some seconds alone otherwise.
    host.sh(f"mkdir -p {SLOWER.rpartition('/')[0]} && printf '[Service]\\nRestartSec=25\\n' > {SLOWER}")
    host.sh("systemctl daemon-reload")
    try:
        host.sh(KILL)
        service.see_status(host, "its last heartbeat", 60)
    finally:
        host.sh(f"rm {SLOWER} && systemctl daemon-reload")
    service.see_journal(host, "Scheduled restart job")
    service.see_journal(host, "leads, in term")


@row(GONE)
def _(service: ObservedService) -> None:
    host = service.leader
    resize = service.cause_resize(HELD)
    service.mark_broken(f"kill -9 and no start, while job {resize.job_id} was {resize.state}")
    host.sh(f"{KILL}; systemctl stop slurm-ones")
    service.see_status(host, "no companion runs", 30)
    held = [job_id for job_id in service.elastic() if service.harness.job(job_id).held]
    if resize.job_id not in held:
        raise NotSeen(f"job {resize.job_id} is not held: {service.harness.job(resize.job_id)}")
    look = ["sh", "-c", guide.row("When something breaks", GONE).command("squeue")]
    service.see(lambda: service.cluster.run(look, user="root", check=False).stdout, f"{resize.job_id} alice")
    for job_id in held:
        # Its owner's right, and all that it takes.
        service.cluster.run(["scontrol", "release", str(job_id)], user="alice")
    for job_id in service.elastic():
        service.harness.wait(job_id, lambda job: job.running and not job.held, "running without a companion")
    service.record.seen.append(f"released by its owner, {', '.join(map(str, held))} ran")
    service.mark_repaired("systemctl start")
    host.sh("systemctl start slurm-ones")


@row("companion hangs")
def _(service: ObservedService) -> None:
    host = service.leader
    resize = service.cause_resize()
    service.mark_broken(f"SIGSTOP while job {resize.job_id} was {resize.state} (WatchdogSec=30s)")
    host.sh(f"kill -STOP {MAIN_PID}")
    service.see_journal(host, "Watchdog timeout", HUNG_S)
    service.see_journal(host, "Fatal Python error: Aborted")
    service.see_journal(host, "slurm_ones/service/daemon.py")
    service.see_journal(host, "leads, in term")


@row("companion stopped (`kill -STOP`, a frozen VM)")
def _(service: ObservedService) -> None:
    host = service.leader
    resize = service.cause_resize()
    service.mark_broken(f"the host frozen for 10 s while job {resize.job_id} was {resize.state}")
    host.freeze()
    time.sleep(10)
    host.thaw()
    service.mark_repaired("the host thawed")

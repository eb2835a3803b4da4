"""Slurm itself: its controller, its limits, its nodes."""

from __future__ import annotations

import time

from tests.guide.breaks import row
from tests.guide.service import ObservedService

LIMIT = "SlurmctldParameters=rl_enable,rl_bucket_size=2,rl_refill_rate=1,rl_refill_period=6\n"
NODE_S = 90.0
FORGOTTEN_S = 5.0


@row("slurmctld down, or it times out", "killed")
def _(service: ObservedService) -> None:
    resize = service.cause_resize()
    service.mark_broken(f"slurmctld killed while job {resize.job_id} was {resize.state}")
    service.cluster.kill_slurmctld()
    service.see_journal(service.leader, "trying again in")
    service.see_status(service.leader, "Slurm: ")
    service.mark_repaired("slurmctld started")
    service.cluster.start_slurmctld()
    _forgotten(service)


def _forgotten(service: ObservedService) -> None:
    """A controller that crashed has forgotten its last seconds: a job that it started then is there twice. Slurm holds
    that job and drains its node, and people let them go, as without a companion."""
    time.sleep(FORGOTTEN_S)
    for job_id in service.elastic():
        job = service.harness.job(job_id)
        if job.held and job.reason.startswith("launch_failed"):
            service.expected[job_id].others += 1
            service.mark_repaired(f"job {job_id} ({job.reason}) released, nodes resumed")
            service.scontrol("scontrol", "release", str(job_id))
            service.scontrol("scontrol", "update", "NodeName=n[1-4]", "State=RESUME", user="root")


@row("slurmctld down, or it times out", "stopped")
def _(service: ObservedService) -> None:
    resize = service.cause_resize()
    service.mark_broken(f"slurmctld stopped while job {resize.job_id} was {resize.state}")
    service.cluster.signal_slurmctld("STOP")
    try:
        service.see_journal(service.leader, "no answer within|trying again in")
        service.see_journal(service.leader, "trying again in")
    finally:
        service.cluster.signal_slurmctld("CONT")
    service.mark_repaired("slurmctld goes on")


@row("slurmctld limits RPCs (`rl_enable`)")
def _(service: ObservedService) -> None:
    conf = service.cluster.root / "etc/slurm/slurm.conf"
    before = conf.read_text()
    service.mark_broken("a bucket of 2 RPCs, 1 more every 6 s")
    try:
        conf.write_text(before + LIMIT)
        service.cluster.run(["scontrol", "reconfigure"], user="root")
        service.see_journal(service.leader, "no answer within|trying again in", 120)
    finally:
        conf.write_text(before)
        service.cluster.run(["scontrol", "reconfigure"], user="root", timeout=120)
    service.mark_repaired("the limit taken away")


@row("node dies, is drained or reserved", "dies")
def _(service: ObservedService) -> None:
    node = _node(service)
    here = _jobs_on(service, node)
    for job_id in here:
        # Once more where Slurm gives it the same node again before that has let go of its last run.
        service.expected[job_id].others += 2
    service.mark_broken(f"node {node} set down under {len(here)} elastic jobs")
    service.scontrol("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=broken", user="root")
    for job_id in here:
        job = service.harness.wait(job_id, lambda job: job.restart > 0 and job.running, "requeued and running", NODE_S)
        service.harness.trains(job_id, restart=job.restart)
    service.record.seen.append(f"requeued by Slurm, jobs {', '.join(map(str, here))} train")
    service.mark_repaired("the node resumed")
    service.scontrol("scontrol", "update", f"NodeName={node}", "State=RESUME", user="root")


@row("node dies, is drained or reserved", "is drained")
def _(service: ObservedService) -> None:
    node = "n4"
    service.mark_broken(f"node {node} drained")
    service.scontrol("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=broken", user="root")
    _nothing_new_on(service, node)
    service.mark_repaired("the node resumed")
    service.scontrol("scontrol", "update", f"NodeName={node}", "State=RESUME", user="root")


@row("node dies, is drained or reserved", "is reserved")
def _(service: ObservedService) -> None:
    node = "n4"
    service.mark_broken(f"node {node} reserved for bob")
    reservation = ["scontrol", "create", "reservation", "ReservationName=broken", "StartTime=now", "Duration=60"]
    service.cluster.run([*reservation, "Users=bob", f"Nodes={node}", "Flags=IGNORE_JOBS"], user="root")
    _nothing_new_on(service, node)
    service.mark_repaired("the reservation deleted")
    service.cluster.run(["scontrol", "delete", "ReservationName=broken"], user="root")


@row("a node's slurmd is started again in the second of a requeue")
def _(service: ObservedService) -> None:
    resize = service.cause_resize(("requeuing",))
    nodes = service.cluster.nodes[1:4]
    service.mark_broken(
        f"slurmds of {', '.join(nodes)} killed and started while job {resize.job_id} was {resize.state}"
    )
    service.cluster.kill_slurmds(*nodes)
    service.cluster.start_slurmds(*nodes)


def _node(service: ObservedService) -> str:
    """A node with elastic jobs on it, and none that must not be touched."""
    service.cause_resize()
    service.set_quiet(True)
    for _ in range(20):
        for node in ("n2", "n3", "n4"):
            if _jobs_on(service, node):
                service.set_quiet(False)
                return node
        time.sleep(1)
    raise LookupError("no node has elastic jobs")


def _jobs_on(service: ObservedService, node: str) -> list[int]:
    jobs = service.jobs()
    return [job_id for job_id in service.elastic() if job_id in jobs and node in jobs[job_id].node_list]


def _nothing_new_on(service: ObservedService, node: str) -> None:
    """While resizes go on, none brings a job to that node."""
    before = set(_jobs_on(service, node))
    for _ in range(2):
        resize = service.cause_resize()
        service.ended(resize)
    new = set(_jobs_on(service, node)) - before
    if new:
        raise AssertionError(f"jobs {sorted(new)} came to {node}")
    service.record.seen.append(f"two resizes, no job came to {node}")

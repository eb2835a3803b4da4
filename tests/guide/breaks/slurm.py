"""Slurm itself: its controller, its limits, its nodes."""

from __future__ import annotations

import time

from tests.guide.breaks.known import row
from tests.guide.scene import Scene

LIMIT = "SlurmctldParameters=rl_enable,rl_bucket_size=2,rl_refill_rate=1,rl_refill_period=6\n"
NODE_S = 90.0
FORGOTTEN_S = 5.0


@row("slurmctld down, or it times out", "killed")
def _(scene: Scene) -> None:
    resize = scene.stir()
    scene.broken(f"slurmctld killed while job {resize.job_id} was {resize.state}")
    scene.cluster.kill_slurmctld()
    scene.see_journal(scene.leader, "trying again in")
    scene.see_status(scene.leader, "Slurm: ")
    scene.mended("slurmctld started")
    scene.cluster.start_slurmctld()
    _forgotten(scene)


def _forgotten(scene: Scene) -> None:
    """A controller that crashed has forgotten its last seconds: a job that it started then is there twice. Slurm holds
    that job and drains its node, and people let them go, as without a companion."""
    time.sleep(FORGOTTEN_S)
    for job_id in scene.elastic():
        job = scene.desk.job(job_id)
        if job.held and job.reason.startswith("launch_failed"):
            scene.stories[job_id].others += 1
            scene.mended(f"job {job_id} ({job.reason}) released, nodes resumed")
            scene.scontrol("scontrol", "release", str(job_id))
            scene.scontrol("scontrol", "update", "NodeName=n[1-4]", "State=RESUME", user="root")


@row("slurmctld down, or it times out", "stopped")
def _(scene: Scene) -> None:
    resize = scene.stir()
    scene.broken(f"slurmctld stopped while job {resize.job_id} was {resize.state}")
    scene.cluster.signal_slurmctld("STOP")
    try:
        scene.see_journal(scene.leader, "no answer within|trying again in")
        scene.see_journal(scene.leader, "trying again in")
    finally:
        scene.cluster.signal_slurmctld("CONT")
    scene.mended("slurmctld goes on")


@row("slurmctld limits RPCs (`rl_enable`)")
def _(scene: Scene) -> None:
    conf = scene.cluster.root / "etc/slurm/slurm.conf"
    before = conf.read_text()
    scene.broken("a bucket of 2 RPCs, 1 more every 6 s")
    try:
        conf.write_text(before + LIMIT)
        scene.cluster.run(["scontrol", "reconfigure"], user="root")
        scene.see_journal(scene.leader, "no answer within|trying again in", 120)
    finally:
        conf.write_text(before)
        scene.cluster.run(["scontrol", "reconfigure"], user="root", timeout=120)
    scene.mended("the limit taken away")


@row("node dies, is drained or reserved", "dies")
def _(scene: Scene) -> None:
    node = _node(scene)
    here = _jobs_on(scene, node)
    for job_id in here:
        # Once more where Slurm gives it the same node again before that has let go of its last run.
        scene.stories[job_id].others += 2
    scene.broken(f"node {node} set down under {len(here)} elastic jobs")
    scene.scontrol("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=broken", user="root")
    for job_id in here:
        job = scene.desk.wait(job_id, lambda job: job.restart > 0 and job.running, "requeued and running", NODE_S)
        scene.desk.trains(job_id, restart=job.restart)
    scene.record.seen.append(f"requeued by Slurm, jobs {', '.join(map(str, here))} train")
    scene.mended("the node resumed")
    scene.scontrol("scontrol", "update", f"NodeName={node}", "State=RESUME", user="root")


@row("node dies, is drained or reserved", "is drained")
def _(scene: Scene) -> None:
    node = "n4"
    scene.broken(f"node {node} drained")
    scene.scontrol("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=broken", user="root")
    _nothing_new_on(scene, node)
    scene.mended("the node resumed")
    scene.scontrol("scontrol", "update", f"NodeName={node}", "State=RESUME", user="root")


@row("node dies, is drained or reserved", "is reserved")
def _(scene: Scene) -> None:
    node = "n4"
    scene.broken(f"node {node} reserved for bob")
    reservation = ["scontrol", "create", "reservation", "ReservationName=broken", "StartTime=now", "Duration=60"]
    scene.cluster.run([*reservation, "Users=bob", f"Nodes={node}", "Flags=IGNORE_JOBS"], user="root")
    _nothing_new_on(scene, node)
    scene.mended("the reservation deleted")
    scene.cluster.run(["scontrol", "delete", "ReservationName=broken"], user="root")


@row("a node's slurmd is started again in the second of a requeue")
def _(scene: Scene) -> None:
    resize = scene.stir(("requeuing",))
    nodes = scene.cluster.nodes[1:4]
    scene.broken(f"slurmds of {', '.join(nodes)} killed and started while job {resize.job_id} was {resize.state}")
    scene.cluster.kill_slurmds(*nodes)
    scene.cluster.start_slurmds(*nodes)


def _node(scene: Scene) -> str:
    """A node with elastic jobs on it, and none that must not be touched."""
    scene.stir()
    scene.calm(True)
    for _ in range(20):
        for node in ("n2", "n3", "n4"):
            if _jobs_on(scene, node):
                scene.calm(False)
                return node
        time.sleep(1)
    raise LookupError("no node has elastic jobs")


def _jobs_on(scene: Scene, node: str) -> list[int]:
    jobs = scene.jobs()
    return [job_id for job_id in scene.elastic() if job_id in jobs and node in jobs[job_id].node_list]


def _nothing_new_on(scene: Scene, node: str) -> None:
    """While resizes go on, none brings a job to that node."""
    before = set(_jobs_on(scene, node))
    for _ in range(2):
        resize = scene.stir()
        scene.ended(resize)
    new = set(_jobs_on(scene, node)) - before
    if new:
        raise AssertionError(f"jobs {sorted(new)} came to {node}")
    scene.record.seen.append(f"two resizes, no job came to {node}")

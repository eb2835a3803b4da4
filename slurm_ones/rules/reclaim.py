"""Room for jobs that cannot be resized, taken from elastic ones before a policy decides.

Which jobs give up how much does not depend on the policy: it is shown a cluster without what rigid jobs are to get,
on which the jobs that make room have their smaller shape already, and keeps them so as it keeps every `fixed` job.

What is guaranteed, of rigid jobs that wait for GPUs alone, in Slurm's order of priority:

- Running elastic jobs that may change in this round give up what they have beyond what they asked for, to any of them;
  and to those that come before them in Slurm's order all beyond their minimum.
- They do so only where a rigid job then has room: on the nodes where fewest GPUs are given up, in place; where that is
  not enough, jobs of one node move off it to be smaller elsewhere, for rigid ones that come before them. (Slurm starts
  these first, on what a requeue frees.) Which jobs move is found greedily: not in every case in which there is a way.
- One that would have to wait all the same takes nothing, and those after it only get room that they give back in
  time, by their time limit (EASY backfill, see `simulate.scheduler`).
- No job goes below its owner's minimum or to a size that its limits do not allow.

What is not: a job within its dwell time, in the middle of a resize, near its end or resized too often keeps what it
has, so a rigid job may wait that long. Slurm starts whom it likes in what was given up, mostly the first of its queue.
Jobs are asked to give up GPUs, not CPUs, memory, licences or a node that was asked for by name. A requeue gives a job
its whole time limit anew, so Slurm's plan for a rigid job that waits for an elastic one's end may move with it; that
job's GPUs come free when its training ends all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ones.rules.concessions import Floor
from slurm_ones.rules.rigid import Claim, Waiting
from slurm_ones.schedule.policy import Allocation, ClusterView, JobView, NodeView, Schedule
from slurm_ones.schedule.tables import build_tables
from slurm_ones.slurm.model import Shape


@dataclass(frozen=True)
class Yielded:
    """What the policy is to see, and what the jobs that make room are told."""

    cluster: ClusterView
    jobs: Sequence[JobView]
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Of each job that shrinks."""
    served: tuple[int, ...] = ()
    """Rigid jobs that have room then, side by side."""


def make_room(cluster: ClusterView, jobs: Sequence[JobView], waiting: Waiting) -> Yielded:
    """The cluster and the jobs once rigid jobs have got what they need; as they are where nobody has to yield."""
    if not waiting.claims:
        return Yielded(cluster, jobs)
    floor = Floor(cluster, jobs, waiting)
    reserved, served = math.inf, []
    for claim in waiting.claims:
        if claim.limit_s > reserved:
            continue
        if floor.serve(claim):
            served.append(claim.job_id)
        else:
            reserved = min(reserved, floor.starts_in(claim, waiting.releases))
    return replace(_yielded(cluster, jobs, floor), served=tuple(served))


def tell(schedule: Schedule, yielded: Yielded) -> Schedule:
    """The schedule with the jobs that make room at their smaller shape, and told why."""
    if not yielded.reasons:
        return schedule
    views = {job.job_id: job for job in yielded.jobs}
    smaller = {id_: Allocation(shape, views[id_].batch) for id_ in yielded.reasons if (shape := views[id_].shape)}
    return replace(
        schedule,
        allocations={**schedule.allocations, **smaller},
        reasons={**schedule.reasons, **yielded.reasons},
        parked=schedule.parked - smaller.keys(),
    )


def _yielded(cluster: ClusterView, jobs: Sequence[JobView], floor: Floor) -> Yielded:
    """What the policy is to see."""
    if not floor.yields:
        return Yielded(cluster, jobs)
    given: dict[str, int] = {}
    views, reasons = [], {}
    for job in jobs:
        claim = floor.yields.get(job.job_id)
        if claim is None or job.shape is None:
            views.append(job)
            continue
        kept = floor.held[job.job_id]
        for name in {**job.nodes, **kept}:
            given[name] = given.get(name, 0) + job.nodes.get(name, 0) - kept.get(name, 0)
        shape = Shape(len(kept), max(kept.values()))
        reasons[job.job_id] = _reason(job, shape, claim, floor.comes_first(claim, job.job_id))
        batch = _batch(cluster, job, shape.gpus)
        views.append(replace(job, shape=shape, nodes=kept, batch=batch, fixed=reasons[job.job_id]))
    nodes = tuple(NodeView(node.name, node.gpus - given.get(node.name, 0)) for node in cluster.nodes)
    return Yielded(replace(cluster, nodes=nodes, node_gpus=cluster.gpus_per_node), views, reasons)


def _batch(cluster: ClusterView, job: JobView, gpus: int) -> int:
    """The job's batch at that size."""
    tables = build_tables(cluster, [job])
    return int(tables.batch[0, tables.sizes.tolist().index(gpus)])


def _reason(job: JobView, shape: Shape, claim: Claim, first: bool) -> str:
    assert job.shape is not None
    sizes = f"shrinks from {job.shape.gpus} to {shape.gpus} GPU{'s' if shape.gpus > 1 else ''}"
    need = f"job {claim.job_id}, which cannot be resized, waits for {claim.nodes}x{claim.gpus_per_node} GPUs"
    why = "and has the higher priority" if first else f"and this job asked for {job.requested}"
    return f"{sizes}: {need} {why} (limits.yield_to_rigid)"

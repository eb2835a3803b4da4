"""Who keeps its place in a round, and shapes on the nodes for those who do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_ones.reasons import Reason, reason
from slurm_ones.schedule.ledger import Ledger
from slurm_ones.schedule.policy import ClusterView, JobView
from slurm_ones.schedule.shapes import shape_of, takes
from slurm_ones.slurm.model import Shape


def fixed_jobs(cluster: ClusterView, jobs: Sequence[JobView]) -> dict[int, Reason]:
    """Why each such job keeps its place or its wait, by job id: those that are `fixed`, and running jobs whose GPUs do
    not add up on the cluster's nodes (drained nodes, a snapshot taken in mid-change)."""
    held: dict[str, int] = {}
    for job in jobs:
        for name, gpus in job.nodes.items():
            held[name] = held.get(name, 0) + gpus
    sound = {node.name for node in cluster.nodes if held.get(node.name, 0) <= node.gpus}
    found = {
        job.job_id: reason("nodes_do_not_add_up")
        for job in jobs
        if (job.shape.gpus if job.shape else 0) != sum(job.nodes.values()) or not sound.issuperset(job.nodes)
    }
    return found | {job.job_id: job.fixed for job in jobs if job.fixed}


def place(
    cluster: ClusterView, jobs: Sequence[JobView], wanted: Mapping[int, int], *, shrink: bool = True
) -> dict[int, Shape]:
    """Shapes for the GPUs that a policy wants for each job; `jobs` in order of precedence.

    Jobs that want what they have stay where they are, fixed ones too. Of the others, in order, each gets what it wants
    or else, with `shrink`, the largest of its counts below that finds room. A job that finds none is left out.
    """
    by_id = {job.job_id: job for job in jobs}
    unchanged = [
        job for job in jobs if job.shape is not None and (job.fixed or wanted.get(job.job_id, 0) == job.shape.gpus)
    ]
    ledger = Ledger(cluster, unchanged)
    found = {job.job_id: job.shape for job in unchanged if job.shape is not None}
    moving = [job for job in jobs if job.job_id not in found and not job.fixed and wanted.get(job.job_id, 0) > 0]
    admitted: list[tuple[int, int]] = []
    budget = ledger.gpus
    for job in moving:
        gpus = wanted[job.job_id]
        if gpus <= budget:
            admitted.append((job.job_id, gpus))
            budget -= gpus
    # Large shapes first: small ones fill what they leave.
    for job_id, gpus in sorted(admitted, key=lambda pair: -pair[1]):
        counts = [gpus]
        if shrink:
            own = by_id[job_id].shape  # its own GPUs were not kept for it: with as many as now it would not move
            before = own.gpus if own is not None else 0
            limits = by_id[job_id].limits
            counts += [n for n in sorted(limits.gpus, reverse=True) if n < gpus and n != before and takes(limits, n)]
        for count in counts:
            shape = shape_of(cluster, count)
            if shape is not None and ledger.take(shape):
                found[job_id] = shape
                break
    return found

"""Who keeps its place in a round, and shapes on the nodes for those who do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, JobView
from slurm_ones.policy.ledger import Ledger
from slurm_ones.policy.shapes import shape_of, takes


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

    Jobs that want what they have stay where they are, fixed ones too, and those that can change where they are do so.
    Of the others, in order, each gets what it wants or else, with `shrink`, the largest of its counts below that finds
    room. A job that finds none is left out.
    """
    by_id = {job.job_id: job for job in jobs}
    found: dict[int, Shape] = {}
    staying, growing = [], []
    for job in jobs:
        want = wanted.get(job.job_id, 0)
        if job.shape is not None and (job.fixed or want == job.shape.gpus):
            staying.append(job)
            found[job.job_id] = job.shape
        elif cluster.uniform and (kept := stays_on(job, want)) is not None and (shape := shape_of(cluster, want)):
            staying.append(replace(job, nodes=kept))
            found[job.job_id] = shape
            growing += [job] if want > sum(kept.values()) else []
    ledger = Ledger.of_cluster(cluster, staying)
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
    for job in growing:
        has = job.shape.gpus if job.shape is not None else 0
        counts = [wanted[job.job_id]]
        counts += [n for n in reversed(job.limits.gpus) if shrink and has < n < counts[0] and takes(job.limits, n)]
        fit = next((shape for n in counts if (shape := shape_of(cluster, n)) and ledger.take_any(n - has)), None)
        if fit is not None:
            found[job.job_id] = fit
        elif shrink and job.shape is not None:
            found[job.job_id] = job.shape
        else:
            del found[job.job_id]
    return found


def stays_on(job: JobView, gpus: int) -> Mapping[str, int] | None:
    """The GPUs of each node that a running job keeps where it goes to so many `gpus`: others join on any nodes. None
    where it is placed anew."""
    if job.shape is None or not gpus:
        return None
    if gpus > job.shape.gpus:
        return job.nodes if job.joins else None
    return (job.smaller or {}).get(gpus)

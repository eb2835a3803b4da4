"""What fixed jobs leave to the others, and the schedule that follows from the GPUs that a policy wants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.policy.contract import Allocation, ClusterView, Ints, JobView, Schedule
from slurm_ones.policy.ledger import free_by_node
from slurm_ones.policy.placement import place
from slurm_ones.policy.tables import Tables


def mobile_jobs(jobs: Sequence[JobView], fixed: Collection[int]) -> list[JobView]:
    """Those that are not named in `fixed`, in order of submission."""
    return sorted((job for job in jobs if job.job_id not in fixed), key=lambda job: (job.submitted, job.job_id))


def free_after_fixed(cluster: ClusterView, jobs: Sequence[JobView], fixed: Collection[int]) -> Ints:
    """(N,) GPUs of each node that the running jobs named in `fixed` leave."""
    return free_by_node(cluster, [job for job in jobs if job.job_id in fixed])


def build_schedule(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    fixed: Mapping[int, Reason],
    tables: Tables,
    wanted: Mapping[int, int],
    why: Reason,
    score: float = float("nan"),
) -> Schedule:
    """The schedule for the GPUs that are `wanted`, in order of precedence.

    `jobs` are all of the round, those named in `fixed` (see `fixed_jobs`) included; `tables` cover the others, and the
    limits of their views say which counts they may fall back on where fragments have no room. A job that was to grow
    and finds none stays as it is. `why` says what the counts serve.
    """
    limited = {job.job_id: job for job in tables.jobs}
    rank = {job_id: i for i, job_id in enumerate(wanted)}
    ordered = sorted(jobs, key=lambda job: rank.get(job.job_id, len(rank)))
    views = [limited.get(job.job_id, job) for job in ordered]
    counts = dict(wanted)
    counts |= {job.job_id: job.shape.gpus for job in jobs if job.job_id in fixed and job.shape is not None}
    while True:
        shapes = place(cluster, views, counts)
        cannot_grow = [job for job in views if _cannot_grow(job, counts, shapes)]
        if not cannot_grow:
            break
        counts |= {job.job_id: job.shape.gpus for job in cannot_grow if job.shape is not None}
    row = {job.job_id: j for j, job in enumerate(tables.jobs)}
    column = {int(gpus): u for u, gpus in enumerate(tables.sizes)}
    free = int(free_after_fixed(cluster, jobs, fixed).sum())
    allocations, reasons, parked = {}, dict(fixed), set()
    for job in jobs:
        if job.job_id in fixed:
            if job.shape is not None:
                allocations[job.job_id] = Allocation(job.shape, job.batch)
            continue
        shape, j = shapes.get(job.job_id), row[job.job_id]
        if shape is None:
            parked.add(job.job_id)
        else:
            allocations[job.job_id] = Allocation(shape, int(tables.batch[j, column[shape.gpus]]))
        got, most, possible = shape.gpus if shape else 0, wanted.get(job.job_id, 0), tables.sizes[tables.allowed[j]]
        if not len(possible):
            reasons[job.job_id] = fits_nowhere(job)
        elif got != most or (not got and possible[0] > free):
            reasons[job.job_id] = reason("no_room", gpus=most or int(possible[0]))
        else:
            reasons[job.job_id] = why
    return Schedule(allocations, reasons, score, frozenset(parked))


def _cannot_grow(job: JobView, counts: Mapping[int, int], shapes: Mapping[int, Shape]) -> bool:
    """It runs, was to grow, and would lose GPUs instead."""
    if job.shape is None or counts.get(job.job_id, 0) <= job.shape.gpus:
        return False
    got = shapes.get(job.job_id)
    return got is None or got.gpus <= job.shape.gpus


def fits_nowhere(job: JobView) -> Reason:
    """Why a job waits that could not run on the empty cluster."""
    return reason("fits_nowhere", counts=", ".join(map(str, job.limits.gpus)) or "none")

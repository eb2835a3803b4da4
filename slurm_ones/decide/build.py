"""What jobs that keep their place leave to the others, and the schedule that follows from the sizes a policy wants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from slurm_ones.reasons import Reason, reason
from slurm_ones.schedule.placement import settle
from slurm_ones.schedule.policy import Allocation, ClusterView, Ints, JobView, Schedule
from slurm_ones.schedule.tables import Tables
from slurm_ones.slurm.model import Shape


def left_over(cluster: ClusterView, jobs: Sequence[JobView], staying: Collection[int]) -> Ints:
    """(N,) GPUs of each node that the running jobs named in `staying` leave."""
    free = {node.name: node.gpus for node in cluster.nodes}
    for job in jobs:
        for name, gpus in job.nodes.items():
            if job.job_id in staying and name in free:
                free[name] -= gpus
    return np.array([max(gpus, 0) for gpus in free.values()], dtype=np.int64)


def conclude(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    staying: Mapping[int, Reason],
    tables: Tables,
    wanted: Mapping[int, int],
    why: Reason,
    score: float = float("nan"),
) -> Schedule:
    """The schedule for the GPU counts `wanted`, in order of precedence.

    `jobs` are all of the round, those named in `staying` (see `pinned.pinned`) included; `tables` cover the others, and
    the limits of their views say which sizes they may fall back on where fragments have no room. A job that was to grow
    and finds none stays as it is. `why` says what the sizes serve.
    """
    limited = {job.job_id: job for job in tables.jobs}
    place = {job_id: i for i, job_id in enumerate(wanted)}
    ordered = sorted(jobs, key=lambda job: place.get(job.job_id, len(place)))
    views = [limited.get(job.job_id, job) for job in ordered]
    sizes = dict(wanted)
    sizes |= {job.job_id: job.shape.gpus for job in jobs if job.job_id in staying and job.shape is not None}
    while True:
        shapes = settle(cluster, views, sizes)
        thwarted = [job for job in views if _thwarted(job, sizes, shapes)]
        if not thwarted:
            break
        sizes |= {job.job_id: job.shape.gpus for job in thwarted if job.shape is not None}
    row = {job.job_id: j for j, job in enumerate(tables.jobs)}
    column = {int(size): u for u, size in enumerate(tables.sizes)}
    allocations = {}
    for job in jobs:
        shape = shapes.get(job.job_id)
        if job.job_id in staying and job.shape is not None:
            allocations[job.job_id] = Allocation(job.shape, job.batch)
        elif shape is not None and job.job_id not in staying:
            batch = int(tables.batch[row[job.job_id], column[shape.gpus]])
            allocations[job.job_id] = Allocation(shape, batch)
    parked = frozenset(job.job_id for job in jobs if job.job_id not in allocations and job.job_id not in staying)
    reasons, free = dict(staying), int(left_over(cluster, jobs, staying).sum())
    for job in jobs:
        if job.job_id in staying:
            continue
        shape, possible = shapes.get(job.job_id), tables.sizes[tables.allowed[row[job.job_id]]]
        got = shape.gpus if shape else 0
        if not len(possible):
            reasons[job.job_id] = fits_nowhere(job)
        elif got == wanted.get(job.job_id, 0):
            reasons[job.job_id] = why if got or possible[0] <= free else reason("no_room", gpus=int(possible[0]))
        else:
            reasons[job.job_id] = reason("no_room", gpus=wanted[job.job_id])
    return Schedule(allocations, reasons, score, parked)


def _thwarted(job: JobView, sizes: Mapping[int, int], shapes: Mapping[int, Shape]) -> bool:
    """It runs, was to grow, and would lose GPUs instead."""
    if job.shape is None or sizes.get(job.job_id, 0) <= job.shape.gpus:
        return False
    got = shapes.get(job.job_id)
    return got is None or got.gpus <= job.shape.gpus


def fits_nowhere(job: JobView) -> Reason:
    """Why a job waits that could not run on the empty cluster."""
    return reason("fits_nowhere", counts=", ".join(map(str, job.limits.gpus)) or "none")

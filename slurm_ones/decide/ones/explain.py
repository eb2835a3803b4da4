"""Why each job gets what it gets, and what else was weighed for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.decide.build import fits_nowhere
from slurm_ones.decide.ones.worth import Choices
from slurm_ones.schedule.policy import Allocation, ClusterView, Floats, JobView, Weighed
from slurm_ones.schedule.shapes import shape_of
from slurm_ones.schedule.tables import Tables

WEIGHED = 3
"""Sizes of each job that a schedule names."""


def reasons(
    jobs: Sequence[JobView],
    fixed: Mapping[int, Reason],
    tables: Tables,
    wanted: Mapping[int, int],
    allocations: Mapping[int, Allocation],
    free: int,
    said: Mapping[int, Reason],
) -> dict[int, Reason]:
    """For each job of the round, `fixed` ones included. `wanted` are the GPUs of the best candidate,
    `free` those that there are for all who may change, `said` what rules of the objective say by job id."""
    row = {job.job_id: j for j, job in enumerate(tables.jobs)}
    column = {int(size): u for u, size in enumerate(tables.sizes)}
    found = dict(fixed)
    for job in jobs:
        if job.job_id not in fixed:
            goodput = tables.goodput[row[job.job_id]]
            why = said.get(job.job_id)
            found[job.job_id] = _reason(
                job, goodput, column, wanted[job.job_id], allocations.get(job.job_id), free, why
            )
    return found


def weighed(cluster: ClusterView, tables: Tables, choices: Choices) -> dict[int, tuple[Weighed, ...]]:
    """The sizes of most worth to each job that may change or start, best first."""
    if not tables.jobs:
        return {}
    # Of sizes of one worth the smaller comes first.
    best = np.argsort(-choices.worth, axis=1, kind="stable")[:, :WEIGHED]
    worth = np.take_along_axis(choices.worth, best, axis=1)
    shapes = [shape_of(cluster, int(size)) for size in tables.sizes]
    found = {}
    for j, (columns, values) in enumerate(zip(best.tolist(), worth.tolist(), strict=True)):
        named = zip(columns, values, strict=True)
        found[tables.jobs[j].job_id] = tuple(
            Weighed(_at(tables, shapes[u], j, u), value) for u, value in named if np.isfinite(value)
        )
    return found


def _at(tables: Tables, shape: Shape | None, j: int, u: int) -> Allocation | None:
    """What column u, mostly of that shape, stands for: the job's own shape where it runs at that size."""
    own = tables.jobs[j].shape
    if own is not None and u == tables.current[j]:
        shape = own
    return Allocation(shape, int(tables.batch[j, u])) if shape is not None and u else None


def _reason(
    job: JobView,
    goodput: Floats,
    column: Mapping[int, int],
    wanted: int,
    got: Allocation | None,
    free: int,
    said: Reason | None,
) -> Reason:
    """`goodput` (U,) is 0 where the job may not be; `column` says where each size is."""
    gpus, before = got.shape.gpus if got else 0, job.shape.gpus if job.shape else 0
    if not goodput.any():
        return said or fits_nowhere(job)
    smallest = list(column)[int((goodput > 0).argmax())]
    if gpus != wanted or (got is None and smallest > free):
        return reason("no_room", gpus=wanted or smallest)
    if said is not None:
        return said
    if got is None or not before:
        return reason("least_total_time")
    if gpus == before:
        if got.batch != job.batch:
            return reason("better_batch", batch=got.batch, before=job.batch)
        return reason("no_change_repays", seconds=job.resize_s)
    factor = float(goodput[column[gpus]] / max(goodput[column[before]], 1e-300))
    return reason("trains_faster" if factor > 1 else "gives_up_gpus", factor=factor)

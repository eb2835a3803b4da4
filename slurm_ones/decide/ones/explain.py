"""Why each job gets what it gets, in words for its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slurm_ones.decide.ones.worth import Choices
from slurm_ones.schedule.policy import Allocation, ClusterView, JobView, Weighed
from slurm_ones.schedule.shapes import shape_of
from slurm_ones.schedule.tables import Tables
from slurm_ones.slurm.model import Shape

WEIGHED = 3
"""Sizes of each job that are told of."""


def reasons(
    jobs: Sequence[JobView], staying: Mapping[int, str], tables: Tables, allocations: Mapping[int, Allocation]
) -> dict[int, str]:
    """For each job of the round, `staying` ones included."""
    row = {job.job_id: j for j, job in enumerate(tables.jobs)}
    column = {int(size): u for u, size in enumerate(tables.sizes)}
    found = {}
    for job in jobs:
        got = allocations.get(job.job_id)
        if job.job_id in staying:
            found[job.job_id] = f"{'waits' if got is None else 'keeps ' + _gpus(got.shape.gpus)}: {staying[job.job_id]}"
        elif got is None:
            found[job.job_id] = _left_out(job, tables, row[job.job_id])
        else:
            found[job.job_id] = _given(job, got, tables, row[job.job_id], column)
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
        told = zip(columns, values, strict=True)
        found[tables.jobs[j].job_id] = tuple(
            Weighed(_at(tables, shapes[u], j, u), value) for u, value in told if np.isfinite(value)
        )
    return found


def _at(tables: Tables, shape: Shape | None, j: int, u: int) -> Allocation | None:
    """What column u, mostly of that shape, stands for: the job's own shape where it runs at that size."""
    own = tables.jobs[j].shape
    if own is not None and u == tables.current[j]:
        shape = own
    return Allocation(shape, int(tables.batch[j, u])) if shape is not None and u else None


def _left_out(job: JobView, tables: Tables, j: int) -> str:
    if not tables.allowed[j].any():
        valid = ", ".join(map(str, job.limits.gpus)) or "none"
        return f"waits: none of the GPU counts it takes ({valid}) and their batches fit this cluster"
    verb = "waits" if job.shape is None else "gives its GPUs up for a while"
    return f"{verb}: they shorten others' time more"


def _given(job: JobView, got: Allocation, tables: Tables, j: int, column: Mapping[int, int]) -> str:
    gpus, before = got.shape.gpus, job.shape.gpus if job.shape else 0
    if not before:
        return f"starts on {_gpus(gpus)}, where they shorten the time of all jobs most"
    if gpus == before:
        more = "" if got.batch == job.batch else f" with batch {got.batch}, which trains faster"
        return f"keeps {_gpus(gpus)}{more}: no change would repay its interruption of {job.resize_s:.0f} s"
    faster = tables.goodput[j, column[gpus]] / max(tables.goodput[j, column[before]], 1e-300)
    if gpus > before:
        return f"grows from {before} to {_gpus(gpus)}: it is expected to train {faster:.1f} times as fast"
    return f"shrinks from {before} to {_gpus(gpus)} ({faster:.1f} times the speed): they shorten others' time more"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"

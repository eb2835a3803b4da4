"""A decision as it is explained and remembered: why each job gets what it gets, and how long the decision stands.

It stands for `STANDS_S` at most, as long as the cluster and the jobs are the same, each with the same GPUs, batch and
limits, and as long as what is expected of them is nearly the same: the speed of each at one size, and what it still has
to do. Its time passes meanwhile, which the next decision takes into account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.ones.worth import Choices
from slurm_ones.policy.build import fits_nowhere
from slurm_ones.policy.contract import Allocation, ClusterView, Floats, JobView, Schedule, Weighed
from slurm_ones.policy.figures import to_come
from slurm_ones.policy.shapes import nodes_of, shape_of
from slurm_ones.policy.tables import Tables, predict_each

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


STANDS_S = 60.0
"""Longest that a decision stands."""
SPEED, TO_COME = 0.02, 0.05
"""Relative changes of a job's speed, and of what it still has to do, that are too small to decide anew."""

PASSING = frozenset({"seconds", "steps"})
"""Arguments of reasons that change by themselves as time passes."""


@dataclass(frozen=True)
class Decided:
    """A decision, and what it was made from."""

    cluster: ClusterView
    jobs: tuple[JobView, ...]
    """In order of submission."""
    now: float
    figures: Floats
    """(2, J) each job's speed at one size, and what it has to do."""
    schedule: Schedule

    def stands(self, cluster: ClusterView, jobs: Sequence[JobView], now: float) -> bool:
        """Whether nothing has changed since; `jobs` in order of submission."""
        if not 0.0 <= now - self.now < STANDS_S or len(jobs) != len(self.jobs):
            return False
        if cluster != self.cluster or any(_kept(a) != _kept(b) for a, b in zip(self.jobs, jobs, strict=True)):
            return False
        drift = np.abs(figures(cluster, jobs) - self.figures)
        return bool((drift <= np.array([[SPEED], [TO_COME]]) * self.figures).all())

    def as_of(self, jobs: Sequence[JobView]) -> Schedule:
        """The schedule, with the reasons of those `jobs` that are fixed as they read now."""
        said = self.schedule.reasons
        newer = {
            job.job_id: job.fixed for job in jobs if job.fixed and _lasting(said.get(job.job_id)) == _lasting(job.fixed)
        }
        return replace(self.schedule, reasons={**said, **newer}) if newer else self.schedule


def remembered(cluster: ClusterView, jobs: Sequence[JobView], now: float, schedule: Schedule) -> Decided:
    """What is to be remembered of a decision on these jobs, in order of submission."""
    return Decided(cluster, tuple(jobs), now, figures(cluster, jobs), schedule)


def figures(cluster: ClusterView, jobs: Sequence[JobView]) -> Floats:
    """(2, J) each job's speed where it runs, or at what it asked for, and its progress to come."""
    gpus = np.array([job.shape.gpus if job.shape else max(job.requested, 1) for job in jobs], dtype=np.int64)
    nodes = [job.held_nodes or nodes_of(cluster, max(job.requested, 1)) for job in jobs]
    batch = np.maximum(np.array([job.batch for job in jobs], dtype=np.int64), 1)
    _, goodput = predict_each(jobs, np.array(nodes, dtype=np.int64), gpus, batch)
    return np.stack([goodput, np.array([to_come(job) for job in jobs])]) if jobs else np.zeros((2, 0))


def _kept(job: JobView) -> tuple[object, ...]:
    """What of a job must be the same."""
    return (
        *(job.job_id, job.requested, job.shape, job.nodes, job.batch, job.limits, job.smaller, _lasting(job.fixed)),
        *(job.resizes, job.resize_s, job.shrink_s, job.prepare_s, job.deadline, job.promised, job.on),
    )


def _lasting(why: Reason | None) -> object:
    """The reason without what changes by itself."""
    return why and (why.code, [(name, value) for name, value in why.arguments if name not in PASSING])

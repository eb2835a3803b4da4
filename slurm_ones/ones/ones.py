"""Policy `ones`: a search within each kind of GPU.

A decision is reused for at most `STANDS_S`, while the cluster and each job's GPUs, batch and limits stay the same.
Expected speed and remaining work may change a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ones_db.reasons import Reason
from slurm_ones.ones.kinds import ByKind
from slurm_ones.ones.search import OnesOptions, Search
from slurm_ones.policy.contract import ClusterView, Floats, JobView, Schedule
from slurm_ones.policy.shapes import nodes_of
from slurm_ones.policy.tables import predict_each, to_come


class Ones:
    """Policy `ones`, which keeps its search and its last decision."""

    name = "ones"
    options_type = OnesOptions

    def __init__(self, options: OnesOptions | None = None) -> None:
        self.options = options or OnesOptions()
        self.search = Search(self.options)
        self._by_kind = ByKind(self.search)
        self._decided: Decided | None = None

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        jobs = sorted(jobs, key=lambda job: (job.submitted, job.job_id))
        self.search.remember(jobs, now)
        if not self.options.stand:
            return self._decide(cluster, jobs, now, rng)
        if self._decided is None or not self._decided.stands(cluster, jobs, now):
            schedule = self._decide(cluster, jobs, now, rng)
            self._decided = Decided(cluster, tuple(jobs), now, figures(cluster, jobs), schedule)
        return self._decided.as_of(jobs)

    def _decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        if not self.options.kinds or len(cluster.kinds) < 2:
            return self.search.decide(cluster, jobs, now, rng)
        if not self.options.deadlines:
            jobs = [replace(job, deadline=None) for job in jobs]
        return self._by_kind.decide(cluster, jobs, now, rng)


STANDS_S = 60.0
"""Longest time, in seconds, for which a decision is reused."""
SPEED, TO_COME = 0.02, 0.05
"""Largest relative change of a job's speed, and of its remaining work, with which a decision is still reused."""
PASSING = "steps"
"""Argument of a reason, a number of training steps. Reasons that differ only in it count as equal."""


@dataclass(frozen=True)
class Decided:
    """A decision, and the input from which it was made."""

    cluster: ClusterView
    jobs: tuple[JobView, ...]
    """Jobs in order of submission."""
    now: float
    figures: Floats
    """(2, J) goodput of each job at its present or requested size, and its remaining progress."""
    schedule: Schedule

    def stands(self, cluster: ClusterView, jobs: Sequence[JobView], now: float) -> bool:
        """Tell whether the decision may be reused for this input; `jobs` are in order of submission."""
        if not 0.0 <= now - self.now < STANDS_S or len(jobs) != len(self.jobs):
            return False
        if cluster != self.cluster or any(_kept(a) != _kept(b) for a, b in zip(self.jobs, jobs, strict=True)):
            return False
        drift = np.abs(figures(cluster, jobs) - self.figures)
        return bool((drift <= np.array([[SPEED], [TO_COME]]) * self.figures).all())

    def as_of(self, jobs: Sequence[JobView]) -> Schedule:
        """Return the schedule with the present numbers in the reasons of fixed jobs."""
        said = self.schedule.reasons
        newer = {
            job.job_id: job.fixed for job in jobs if job.fixed and _lasting(said.get(job.job_id)) == _lasting(job.fixed)
        }
        return replace(self.schedule, reasons={**said, **newer}) if newer else self.schedule


def figures(cluster: ClusterView, jobs: Sequence[JobView]) -> Floats:
    """Return (2, J): each job's goodput at its present size (or, if it waits, the requested size), and its remaining
    progress."""
    gpus = np.array([job.shape.gpus if job.shape else max(job.requested, 1) for job in jobs], dtype=np.int64)
    nodes = [job.held_nodes or nodes_of(cluster, max(job.requested, 1)) for job in jobs]
    batch = np.maximum(np.array([job.batch for job in jobs], dtype=np.int64), 1)
    _, goodput = predict_each(jobs, np.array(nodes, dtype=np.int64), gpus, batch)
    return np.stack([goodput, np.array([to_come(job) for job in jobs])]) if jobs else np.zeros((2, 0))


def _kept(job: JobView) -> tuple[object, ...]:
    return (
        *(job.job_id, job.requested, job.shape, job.nodes, job.batch, job.limits, job.smaller, _lasting(job.fixed)),
        *(job.resizes, job.resize_s, job.shrink_s, job.prepare_s, job.deadline, job.promised, job.on, job.borrows),
    )


def _lasting(why: Reason | None) -> object:
    return why and (why.code, [(name, value) for name, value in why.arguments if name != PASSING])

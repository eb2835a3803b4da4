"""How large a job may become at once: how far its sizes may go beyond what it has tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from slurm_ones.decide.job_figures import within
from slurm_ones.decide.ones.terms import Situation, Term
from slurm_ones.schedule.policy import Bools, JobView

LARGEST_S = 1e15
UNKNOWN = 0.95
"""Relative deviation from which on a speed is no more than a guess."""
CHEAP = 0.01
"""Share of the time a change lasts up to which giving up GPUs again costs so little that a first size may be tried."""


@dataclass(frozen=True)
class Reach(Term):
    """A job gets at most `leap` times the most GPUs it has had, and what it asked for if it has not run; where giving
    up GPUs again costs next to nothing (`first_size`), `leap` times that, as far as its speed is more than a guess."""

    leap: float
    first_size: bool
    horizon_s: float

    def reachable(self, job: JobView, most: Mapping[int, int]) -> JobView:
        """The job with the sizes that it may have at most, its smallest at least: so that none else is asked about."""
        if job.deadline is not None:
            return job  # what it needs to end in time is weighed against others, by what is known of its speed
        had = most[job.job_id]
        bound = self.leap * had if had else max(job.requested, 1)
        if not had and self.tries(job):
            bound *= self.leap
        counts = job.limits.gpus
        if not counts or counts[-1] <= bound:
            return job
        near = tuple(n for n in counts if n <= max(bound, counts[0]))
        return replace(job, limits=replace(job.limits, gpus=near))

    def tries(self, job: JobView) -> bool:
        """Whether a first size that turns out too large costs next to nothing."""
        return self.first_size and shrink_s(job) <= CHEAP * self.horizon_s

    def mask(self, at: Situation, allowed: Bools) -> Bools:
        """Without sizes beyond what a job that has not run asked for whose speed is no more than a guess."""
        jobs = at.tables.jobs
        new = [
            j for j, job in enumerate(jobs) if not at.most[job.job_id] and (job.deadline is not None or self.tries(job))
        ]
        if not new:
            return allowed
        asked = np.array([max(jobs[j].requested, 1, min(jobs[j].limits.gpus, default=0)) for j in new])
        allowed = allowed.copy()
        allowed[new] &= (at.tables.sizes <= asked[:, None]) | (at.tables.uncertainty[new] < UNKNOWN)
        return allowed


def shrink_s(job: JobView) -> float:
    """Seconds that giving up GPUs interrupts the job."""
    return within(job.resize_s if job.shrink_s is None else job.shrink_s, 0.0, LARGEST_S)

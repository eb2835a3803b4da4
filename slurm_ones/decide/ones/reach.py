"""How large a job may become at once: how far its sizes may go beyond what it has tried.

A first size beyond what was asked for may turn out too large, with a chance of about the relative deviation σ of its
predicted speed. Then the job gives up GPUs again, at a pause of p seconds, once the guard against figures that waver
lets it (`rules.dwell`: four pauses later). So trying costs σ · 5p of the time H for which a size is expected to last,
and the size is worth 1 − σ · 5p / H of what it would be. Known curves are used in full, cheap pauses leave most sizes
open, and doubtful ones at a dear pause must promise much more. A speed that is no more than a guess is no promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from slurm_ones.decide.job_figures import within
from slurm_ones.decide.ones.terms import Priced, Situation, Term
from slurm_ones.schedule.policy import Bools, Floats, JobView

LARGEST_S = 1e15
UNKNOWN = 0.95
"""Relative deviation from which on a speed is no more than a guess."""
PAUSES = 5.0
"""What a first size that was too large costs, in pauses: one, and the wait of four before it."""


@dataclass(frozen=True)
class Reach(Term):
    """A job gets at most `leap` times the most GPUs it has had. One that has not run gets what it asked for, or with
    `first_size` as much more as its speed is known and giving up GPUs again is cheap."""

    leap: float
    first_size: bool
    horizon_s: float
    """Seconds that a size is expected to last."""

    def reachable(self, job: JobView, most: Mapping[int, int]) -> JobView:
        """The job with the sizes that it may have at most, its smallest at least: so that none else is asked about."""
        if job.deadline is not None:
            return job  # what it needs to end in time is weighed against others, by what is known of its speed
        had = most[job.job_id]
        bound = self.leap * had if had else max(job.requested, 1)
        if not had and self.first_size:
            bound *= self.leap
        counts = job.limits.gpus
        if not counts or counts[-1] <= bound:
            return job
        near = tuple(n for n in counts if n <= max(bound, counts[0]))
        return replace(job, limits=replace(job.limits, gpus=near))

    def mask(self, at: Situation, allowed: Bools) -> Bools:
        """Without sizes beyond what a job that has not run asked for whose speed is no more than a guess."""
        new, beyond = self._beyond(at)
        if not new:
            return allowed
        allowed = allowed.copy()
        allowed[new] &= ~beyond | (at.tables.uncertainty[new] < UNKNOWN)
        return allowed

    def worth(self, at: Priced, worth: Floats) -> Floats:
        """Less what trying a first size costs."""
        new, beyond = self._beyond(at)
        if not new:
            return worth
        pause = np.array([shrink_s(at.tables.jobs[j]) for j in new])[:, None]
        lost = np.minimum(at.tables.uncertainty[new] * PAUSES * pause / self.horizon_s, 1.0)
        worth = worth.copy()
        worth[new] *= np.where(beyond, 1.0 - lost, 1.0)
        return worth

    def _beyond(self, at: Situation) -> tuple[list[int], Bools]:
        """The rows (R) of jobs that have not run, and which columns (R, U) are beyond what they asked for."""
        jobs = at.tables.jobs
        new = [j for j, job in enumerate(jobs) if not at.most[job.job_id]]
        asked = np.array([max(jobs[j].requested, 1, min(jobs[j].limits.gpus, default=0)) for j in new])
        return new, at.tables.sizes > asked[:, None]


def shrink_s(job: JobView) -> float:
    """Seconds that giving up GPUs interrupts the job."""
    return within(job.resize_s if job.shrink_s is None else job.shrink_s, 0.0, LARGEST_S)

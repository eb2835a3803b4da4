"""What jobs that are still to be submitted do to the prices of GPUs.

Prices follow from which jobs are left at each moment to come (`worth`). Jobs that arrive meanwhile are there as well.
Arrivals of rate r that stay τ seconds are r τ (1 - exp(-t/τ)) jobs t seconds from now: none at once. Where none come, a
job's progress is worth what it is when it ends among those left of today's (heSRPT). Where others always take their
place, GPUs keep the price that they have, and what is left of a job does not matter (WHAM, see `decide.wham`). Between
the two this takes the geometric mean, weighted by how many of the jobs that will be there at its end are still to come.
That it lies between the two follows from the condition that holds at each job's end. This mean is our choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.decide.ones.terms import Priced, Term
from slurm_ones.decide.ones.worth import PRICES, worth_of_progress
from slurm_ones.schedule.policy import Arrivals, Floats, Ints


@dataclass(frozen=True)
class Arriving(Term):
    """Counts expected arrivals by `share`: 1 as many as are expected, 0 none."""

    share: float

    def worth(self, at: Priced, worth: Floats) -> Floats:
        return worth * self.factors(at)[:, None]

    def factors(self, at: Priced) -> Floats:
        """(J,) by which expected arrivals change what a unit of each job's progress is worth."""
        arrivals = at.cluster.arrivals
        if arrivals is None or not len(at.unit):
            return np.ones(len(at.unit))
        lasting, _ = worth_of_progress(
            at.speed, at.tables.sizes, at.remaining, at.weight, at.nodes.gpus, recursive=False
        )
        # As the other worths, these are to save all waiting: what GPUs can save at most is in proportion to worths.
        lasting = lasting * (at.weight[lasting > 0].sum() / max(self._saved(at, lasting), 1e-300))
        # Of today's jobs, those that end no sooner.
        left = len(at.ends) - np.searchsorted(np.sort(at.ends), at.ends)
        new = self.share * present(arrivals, at.ends)
        known = (at.unit > 0) & (lasting > 0)
        ratio = np.where(known, lasting / np.where(known, at.unit, 1.0), 1.0)
        result: Floats = ratio ** (new / (new + left))
        return result

    def _saved(self, at: Priced, unit: Floats) -> float:
        """Seconds of waiting that all GPUs save each second, at best, where progress is worth that (J,)."""
        sizes = at.tables.sizes
        saved = PRICES * at.nodes.gpus
        for speed, worth in zip(at.speed, unit, strict=True):
            saved = saved + (worth * speed - PRICES[:, None] * sizes).max(axis=1)
        return float(saved.min())

    def reasons(self, at: Priced, columns: Ints) -> Mapping[int, Reason]:
        """The jobs that keep or get fewer GPUs, or more, than they would by the worth of today's jobs alone."""
        arrivals = at.cluster.arrivals
        if arrivals is None:
            return {}
        factors, sizes = self.factors(at), at.tables.sizes
        found = {}
        for j in np.flatnonzero(np.abs(np.log(factors)) > NOTABLE):
            job, gpus = at.tables.jobs[j], int(sizes[columns[j]])
            if gpus != (job.shape.gpus if job.shape else 0):
                found[job.job_id] = reason(
                    "expects_arrivals", gpus=gpus, minutes=arrivals.gap_s() / 60.0, percent=100.0 * (factors[j] - 1.0)
                )
        return found


NOTABLE = 0.1
"""Logarithm of the factor of a job's worth from which on expected arrivals are named as the reason."""


def present(arrivals: Arrivals, after_s: Floats) -> Floats:
    """Jobs (J,) that will have come by then and not have ended, so many seconds (J,) from now, infinity included."""
    rate = np.mean(arrivals.rate) if arrivals.rate else 0.0
    stay = max(arrivals.stay_s, 1.0)
    result: Floats = rate * stay * -np.expm1(-after_s / stay)
    return result

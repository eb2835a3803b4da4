"""What a candidate costs (ONES §3.2)."""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.policy import Floats, Ints

LEAST_PROGRESS = 1e-3
"""ρ is not believed to be smaller: a draw near 0 would decide a whole generation."""


def sample_progress(space: Space, rng: np.random.Generator) -> Floats:
    """(J,) one draw of ρ for each job."""
    return np.clip(np.nan_to_num(rng.beta(space.alpha, space.beta), nan=0.5), LEAST_PROGRESS, 1.0)


def remaining_utilisation(space: Space, counts: Ints, rho: Floats) -> Floats:
    """(K,) GPU-seconds to come of each candidate (K, J): Σ_j n_j · Y_j · (1/ρ_j − 1) / X_j(n_j).

    Y are the samples used, X the samples/s. A job left out costs nothing, nor does one that has not begun: the score
    prefers empty schedules, and only filling hides that.
    """
    speed = space.tables.speed
    per_sample = np.divide(space.tables.sizes, speed, out=np.zeros_like(speed), where=speed > 0)
    work = space.samples * (1.0 / rho - 1.0)
    result: Floats = (work * per_sample[np.arange(len(work)), space.column[counts]]).sum(axis=1)
    return result

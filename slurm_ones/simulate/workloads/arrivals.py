"""When jobs are submitted."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from slurm_ones.schedule.policy import Floats

Arrivals = Literal["poisson", "uniform", "diurnal"]
"""Independent of each other; with gaps that are uniform from none to twice their mean; more by day than by night."""


def submission_times(how: Arrivals, jobs: int, window_s: float, rng: np.random.Generator) -> Floats:
    """(jobs,) submission times in seconds, ascending, over a window of that length (on average, with `uniform`)."""
    if how == "uniform":
        gaps = rng.uniform(0.0, 2.0 * window_s / jobs, jobs)
        return np.asarray(np.cumsum(gaps), dtype=np.float64)
    # Given how many come, the times of a Poisson process are independent.
    shares = np.sort(rng.random(jobs))
    if how == "poisson":
        return np.asarray(shares * window_s, dtype=np.float64)
    grid = np.linspace(0.0, window_s, max(24 * 60, math.ceil(window_s / 600.0)) + 1)
    reached = np.append(0.0, np.cumsum(day_rate(grid[1:])))
    return np.asarray(np.interp(shares, reached / reached[-1], grid), dtype=np.float64)


def day_rate(seconds: Floats) -> Floats:
    """Rate of submissions over the day's mean, so many seconds after eight in the morning: most in the early afternoon,
    fewest at night, as in Philly (Jeon et al., ATC 2019)."""
    result: Floats = 1.0 + 0.8 * np.cos(2.0 * math.pi * (seconds / 3600.0 + 8.0 - 14.0) / 24.0)
    return result

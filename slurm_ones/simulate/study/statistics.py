"""How sure the figures are: intervals over seeds, differences paired by seed, a test paired by job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from slurm_ones.schedule.policy import Floats

CONFIDENCE = 0.95
RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95 % confidence interval; NaN bounds where there is one seed alone."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """A policy against the first one. Jobs and seeds are paired: both ran the same ones."""

    difference: Estimate
    """Mean JCT less the first policy's, in seconds."""
    ratio: Estimate
    """Mean JCT over the first policy's."""
    p_value: float
    """Wilcoxon signed-rank test over the JCTs of the jobs, two-sided, as in ONES (SC21, §4); NaN where there is
    nothing to test."""
    sooner: float
    """Share of the jobs that this policy ended sooner than the first."""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean over seeds, with a percentile bootstrap."""
    found = np.array([value for value in values if math.isfinite(value)])
    if not len(found):
        return Estimate(math.nan, math.nan, math.nan)
    mean = float(found.mean())
    if len(found) == 1:
        return Estimate(mean, math.nan, math.nan)
    if np.ptp(found) == 0:
        return Estimate(mean, mean, mean)
    result = stats.bootstrap(
        (found,),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return Estimate(mean, float(low), float(high))


def compare(jct: Sequence[Floats], first: Sequence[Floats]) -> Comparison:
    """A policy's JCTs against the first one's: an array a seed each, the jobs in one order."""
    means = np.array([float(seed.mean()) for seed in jct])
    others = np.array([float(seed.mean()) for seed in first])
    paired = np.concatenate(list(jct)) - np.concatenate(list(first))
    return Comparison(
        estimate(list(means - others)), estimate(list(means / others)), _p_value(paired), float((paired < 0).mean())
    )


def _p_value(differences: Floats) -> float:
    if len(differences) < 2 or not differences.any():
        return math.nan
    return float(stats.wilcoxon(differences).pvalue)

"""Statistical efficiency: how much a sample is worth at a batch.

From the gradient noise scale B = tr(Σ)/|G|² (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018): a
step at batch M brings as much as M/(B + M) of a step along the true gradient. So a sample at batch M is worth
(B + M0)/(B + M) of one at the base batch M0 (Pollux, OSDI 2021, §3.1, multiplies throughput by it).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

import numpy as np

from slurm_ones.policy.contract import Floats, Ints

LEAST, MOST = 1e-2, 1e4
"""Bounds of the noise scale, in base batches."""
CAUTIOUS = 4.0
"""Noise scale of a job that never said, in base batches, before any job has: a batch four times the base is then worth
5/8 of its samples. Low among what is measured, since a large batch that was not worth it cannot be had back."""


class NoiseEfficiency:
    """An `EfficiencyModel` from a gradient noise scale in samples. A scale without end makes all batches equal."""

    def __init__(self, base_batch: float, noise: float) -> None:
        self.base_batch = max(float(base_batch), 1.0)
        self.noise = float(noise) if noise >= 0 else math.inf

    def efficiency(self, batches: Ints) -> Floats:
        """Worth of a sample at each global batch, in (0, 1]; 1 up to the base batch."""
        batch = np.maximum(np.asarray(batches, dtype=np.float64), self.base_batch)
        if math.isinf(self.noise):
            return np.ones_like(batch)
        result: Floats = (self.noise + self.base_batch) / (self.noise + batch)
        return result


def noise_ratio(base_batch: float, noises: Iterable[float]) -> float | None:
    """The gradient noise scale in base batches, from the newest reports: their median, within bounds; None where there
    are none that make sense. The scale drifts over epochs and jumps from report to report."""
    known = [noise / max(base_batch, 1.0) for noise in noises if math.isfinite(noise) and noise > 0]
    return min(max(median(known), LEAST), MOST) if known else None

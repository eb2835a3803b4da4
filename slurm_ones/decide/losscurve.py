"""How many epochs until a job's loss has converged (Optimus, EuroSys 2018, §3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slurm_ones.schedule.policy import Floats

Losses = tuple[tuple[float, float], ...]
"""(epochs done, loss) in order."""

ENOUGH = 5
"""Reported losses below which nothing is fitted."""
MOST = 64
"""Losses that enter a fit, spread evenly over those reported."""
FLOORS = 24
"""Values tried for the loss that is left in the end."""


@dataclass(frozen=True)
class LossCurve:
    """Loss after k epochs: 1/(slope · k + offset) + floor, as a fraction of the largest loss reported."""

    slope: float
    offset: float
    floor: float

    def loss(self, epochs: Floats) -> Floats:
        """Loss after these epochs."""
        result: Floats = 1.0 / np.maximum(self.slope * epochs + self.offset, 1e-12) + self.floor
        return result

    def converged(self, drop: float) -> float:
        """Epochs after which an epoch lowers the loss by less than `drop`."""
        if self.slope <= 0.0:
            return 0.0
        # slope / (slope · k + offset)² is what the epoch around k brings.
        return max((math.sqrt(self.slope / drop) - self.offset) / self.slope, 0.0)


def fit(losses: Losses) -> LossCurve | None:
    """The curve through them; None where too few of them make sense.

    Nonnegative least squares for each of several floors, the best of them kept. Each loss is first replaced by the
    median of itself and its neighbours, against outliers.
    """
    points = np.array([p for p in losses if all(map(math.isfinite, p)) and p[0] >= 0 and 0 < p[1] < 1e12])
    if len(points) < ENOUGH:
        return None
    if len(points) > MOST:
        points = points[np.linspace(0, len(points) - 1, MOST).round().astype(int)]
    epochs, loss = points[:, 0], points[:, 1] / points[:, 1].max()
    loss = np.concatenate([loss[:1], np.median([loss[:-2], loss[1:-1], loss[2:]], axis=0), loss[-1:]])
    floors = loss.min() * np.linspace(0.0, 0.99, FLOORS)[:, None]
    above = loss[None] - floors
    slope, offset = _nonnegative(epochs[None], 1.0 / above, above**4)
    error = ((1.0 / np.maximum(slope * epochs + offset, 1e-12) + floors - loss) ** 2).sum(axis=1)
    best = int(np.argmin(error))
    return LossCurve(float(slope[best, 0]), float(offset[best, 0]), float(floors[best, 0]))


def _nonnegative(x: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """(F, 1) a and b ≥ 0 that minimise Σ weight · (a·x + b − y)² in each row of y, which is positive.

    An error in 1/l counts as what it is in l: weights are the fourth power of l.
    """
    w, wx, wxx = weight.sum(axis=1), (weight * x).sum(axis=1), (weight * x * x).sum(axis=1)
    wy, wxy = (weight * y).sum(axis=1), (weight * x * y).sum(axis=1)
    det = w * wxx - wx * wx
    safe = np.where(det > 1e-12 * w * wxx, det, 1.0)
    inside = det > 1e-12 * w * wxx
    a = np.where(inside, (w * wxy - wx * wy) / safe, 0.0)
    b = np.where(inside, (wxx * wy - wx * wxy) / safe, wy / w)
    # Of two unknowns, one that would be negative is zero and the other alone fits.
    b = np.where(a < 0, wy / w, b)
    a = np.where(b < 0, wxy / np.maximum(wxx, 1e-300), np.maximum(a, 0.0))
    return a[:, None], np.maximum(b, 0.0)[:, None]

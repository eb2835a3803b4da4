"""Position of a simulated training, its advance by samples, and early stopping.

Training stops early if the metric has not improved for `patience` epochs. An epoch is one pass over the data, however
little progress it brings. So at a batch of low efficiency, patience runs out at less progress and the metric stays
lower: failing fast looks like finishing fast.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurm_ones.simulate.training.application import Application

EPSILON = 1e-6


def interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return what `numpy.interp` does for one number, at a tenth of its cost."""
    right = bisect_right(xs, x)
    left = max(right - 1, 0)
    if right in (0, len(xs)) or xs[left] == x:
        return ys[left]
    return (ys[right] - ys[left]) / (xs[right] - xs[left]) * (x - xs[left]) + ys[left]


@dataclass(frozen=True)
class Position:
    """Position in the training, as a checkpoint holds it."""

    epoch: int = 0
    """Number of complete passes over the data."""
    cursor: int = 0
    """Samples of the present pass that are used."""
    step: int = 0
    progress: float = 0.0
    """Progress in samples of the base batch."""
    wanted: int = 0
    """Global batch last requested."""
    reached: tuple[float, ...] = (0.0,)
    """Progress at the ends of the last `patience` passes."""


class TrainingCurve:
    """Progress of one training from first to last sample: a `share` of the application's epochs."""

    def __init__(self, application: Application, share: float) -> None:
        self.application = application
        self.dataset = application.dataset
        self.epochs = max(1, math.ceil(len(application.ends) * share - 1e-9))
        """Number of passes at the base batch."""
        # Half a sample an epoch may be lost to rounding the dataset's length.
        self.total = application.total * share - 0.5 * len(application.ends)
        metric = application.metric[:, 0]
        self._ends: list[float] = [0.0, *application.ends.tolist()]
        self._metric: list[float] = [min(float(metric[0]), 0.0), *metric.tolist()]
        self._sample_curves: dict[float, list[float]] = {}

    def _sample_curve(self, batch: float) -> list[float]:
        """Return the samples to each epoch's end in the profile at this batch."""
        if batch not in self._sample_curves:
            samples = np.append(0.0, np.cumsum(np.diff(self._ends) / self.application.efficiencies(batch)))
            self._sample_curves[batch] = samples.tolist()
        return self._sample_curves[batch]

    def use(self, at: Position, samples: int, batch: int, steps: int) -> Position:
        """Return the position after further `samples` of the same pass, used in batches of size `batch`."""
        ends, used = self._ends, self._sample_curve(float(batch))
        progress = interpolated(interpolated(at.progress, ends, used) + samples, used, ends)
        return replace(at, cursor=at.cursor + samples, step=at.step + steps, progress=progress)

    def used(self, at: Position) -> int:
        """Return the total number of samples used up to a position."""
        return at.epoch * self.dataset + at.cursor

    def samples_left(self, at: Position, batch: int) -> float:
        """Return the number of samples from `at` to the end of training at this batch size."""
        before, until = (
            interpolated(one, self._ends, self._sample_curve(float(batch))) for one in (at.progress, self.total)
        )
        return max(until - before, 0.0)

    def finished(self, at: Position) -> bool:
        """Return True if the position is at the end of the training."""
        return at.progress >= self.total * (1.0 - 1e-12)

    def next_pass(self, at: Position) -> tuple[Position, bool]:
        """Return the position at the start of the next epoch, and True if early stopping ends the training there."""
        app, reached, gives_up = self.application, at.reached, False
        if app.patience:
            full = len(reached) >= app.patience
            gives_up = full and app.gained(reached[-app.patience], at.progress) <= app.least_gain * (1.0 + EPSILON)
            reached = (*reached, at.progress)[-app.patience :]
        return replace(at, epoch=at.epoch + 1, cursor=0, reached=reached), gives_up

    def accuracy(self, at: Position, batch: int) -> float | None:
        """Return the validation metric at a position; None for a negative or unknown metric."""
        metric = self.application.metric_at(at.progress, batch)
        return metric if math.isfinite(metric) and metric >= 0 else None

    def loss(self, at: Position) -> float:
        """Return a training loss that falls as the metric rises: from some 2 at the start to 0.05 at the best."""
        metric = interpolated(at.progress, self._ends, self._metric)
        best, first = max(self._metric), self._metric[0]
        return 0.05 + 2.0 * min(max((best - metric) / max(best - first, 1e-9), 0.0), 1.0)

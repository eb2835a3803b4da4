"""When a training gives up: its metric has not improved for as many epochs as its user has patience (early stopping).

An epoch is a pass over the data, whatever it brought. So at a batch of low efficiency, where a pass brings little,
patience runs out earlier in the training, and the metric stays lower: failing fast looks like finishing fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_ones.simulate.training.application import Application

EPSILON = 1e-6


@dataclass
class Patience:
    """The epochs of one job over its data."""

    application: Application
    used: float = 0.0
    """Samples used since the end of the last epoch."""
    reached: tuple[float, ...] = (0.0,)
    """Progress at the ends of the last epochs, as many as patience looks back."""

    @property
    def room(self) -> float:
        """Samples to the end of the epoch; infinite for an application without patience."""
        return self.application.dataset - self.used if self.application.patience else math.inf

    def use(self, samples: float, progress: float) -> bool:
        """Count samples, `room` of them at most, that led to this progress; whether the training now gives up."""
        app = self.application
        if not app.patience:
            return False
        self.used += samples
        if self.used < app.dataset * (1.0 - EPSILON):
            return False
        self.used = 0.0
        full = len(self.reached) >= app.patience
        before = self.reached[-app.patience] if full else 0.0
        self.reached = (*self.reached, progress)[-app.patience :]
        return full and app.gained(before, progress) <= app.least_gain * (1.0 + EPSILON)

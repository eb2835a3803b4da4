"""Measures the throughput of stretches of steps, and the loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from ones_wrapper.checkpoint import Progress
from ones_wrapper.protocol import Throughput

WARM_UP = 2
"""Steps after a start that are not measured: memory and communicators are being set up."""


class Meter:
    """A stopwatch that runs during steps alone, not while checkpoints, drains or evaluation take their
    time.
    """

    def __init__(self, every_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._every_s = every_s
        self._clock = clock
        self._began = clock()
        self._left = WARM_UP
        self._latest: Throughput | None = None
        self._samples = 0
        self._seconds = 0.0
        self.step_s = 0.0
        """Length of a step in seconds, smoothed."""
        self._loss: torch.Tensor | float = 0.0
        self._loss_samples = 0
        self._stretch_loss: torch.Tensor | float = 0.0
        self._stretch_loss_samples = 0

    def start(self) -> None:
        """A step begins, with fetching its data."""
        self._began = self._clock()

    def stop(self, progress: Progress, samples: int, batch: int, lr_factor: float) -> Throughput | None:
        """A step of `samples` samples ended; the report of the stretch when it is long enough."""
        seconds = self._clock() - self._began
        if self._left:
            self._left -= 1
            return None
        self.step_s = seconds if self.step_s == 0 else 0.9 * self.step_s + 0.1 * seconds
        self._samples += samples
        self._seconds += seconds
        self._latest = Throughput(
            progress.epoch,
            progress.step,
            progress.cursor,
            self._samples,
            self._seconds,
            batch,
            lr_factor,
            noise=progress.noise or None,
            progress=progress.useful,
        )
        return self.flush() if self._seconds >= self._every_s else None

    def flush(self) -> Throughput | None:
        """The report of the stretch so far, if there is any; a new stretch begins."""
        latest, self._latest = self._latest, None
        self._samples, self._seconds = 0, 0.0
        loss, samples = self._stretch_loss, self._stretch_loss_samples
        self._stretch_loss, self._stretch_loss_samples = 0.0, 0
        if latest is None:
            return None
        mean = float(loss) / samples if samples else math.nan
        return Throughput(**{**vars(latest), "loss": mean if math.isfinite(mean) else None})

    def loss(self, loss: torch.Tensor | float, samples: int) -> None:
        """Add a step's mean loss over `samples` samples; stays on the device."""
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        if samples:
            self._loss = self._loss + value * samples
            self._loss_samples += samples
            self._stretch_loss = self._stretch_loss + value * samples
            self._stretch_loss_samples += samples

    def take_epoch(self) -> tuple[float, float]:
        """(sum of losses, samples) of this rank since the last call."""
        taken = float(self._loss), float(self._loss_samples)
        self._loss, self._loss_samples = 0.0, 0
        return taken

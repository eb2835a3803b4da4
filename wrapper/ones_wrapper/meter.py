"""Measures the throughput of stretches of steps, and the loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ones_wrapper.checkpoint import Progress
from ones_wrapper.protocol import Throughput

WARM_UP = 2
"""Steps after a start that are not measured: memory and communicators are being set up."""


@dataclass
class Losses:
    """A sum of losses over samples. It stays on the device until it is read."""

    total: torch.Tensor | float = 0.0
    samples: torch.Tensor | float = 0.0
    nonfinite: torch.Tensor | float = 0.0
    """Losses that were not finite numbers; they are in neither of the others."""

    def add(self, loss: torch.Tensor | float, samples: int) -> None:
        """A mean loss over `samples` samples."""
        if isinstance(loss, torch.Tensor):
            value = loss.detach()
            finite = torch.isfinite(value)
            self.total = self.total + torch.where(finite, value * samples, 0.0)
            self.samples = self.samples + finite * samples
            self.nonfinite = self.nonfinite + ~finite
        elif math.isfinite(loss):
            self.total, self.samples = self.total + loss * samples, self.samples + samples
        else:
            self.nonfinite = self.nonfinite + 1

    def include(self, other: Losses) -> None:
        """Add all of another sum."""
        self.total = self.total + other.total
        self.samples = self.samples + other.samples
        self.nonfinite = self.nonfinite + other.nonfinite

    @property
    def mean(self) -> float | None:
        """The mean over samples; None without a finite one. Waits for the device."""
        samples = float(self.samples)
        return float(self.total) / samples if samples else None


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
        self.last_s = 0.0
        """Length of the last step."""
        self._epoch, self._stretch = Losses(), Losses()

    def start(self) -> None:
        """A step begins, with fetching its data."""
        self._began = self._clock()

    def stop(self, progress: Progress, samples: int, batch: int, lr_factor: float) -> Throughput | None:
        """A step of `samples` samples ended; the report of the stretch when it is long enough."""
        self.last_s = seconds = self._clock() - self._began
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
        losses, self._stretch = self._stretch, Losses()
        self._epoch.include(losses)
        if latest is None:
            return None
        return replace(latest, loss=losses.mean, nonfinite=int(losses.nonfinite))

    def loss(self, loss: torch.Tensor | float, samples: int) -> None:
        """Add the mean loss over `samples` samples of a pass; stays on the device."""
        if samples:
            self._stretch.add(loss, samples)

    def take_epoch(self) -> Losses:
        """The losses of this rank since the last call."""
        taken, now = self._epoch, self._stretch
        taken.include(now)
        self._epoch = Losses(-now.total, -now.samples, -now.nonfinite)  # the stretch adds them when it ends
        return taken

"""Time and losses of a run's steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.data.uneven import OwnTime
from ones_wrapper.devices.use import DeviceUse
from ones_wrapper.protocol import Throughput

WARM_UP = 2
"""Number of steps after a start that are not measured, because they set up memory and communicators."""


PENDING = 64
"""Number of losses that are collected before they are added up."""


@dataclass
class Losses:
    """Sum of losses over samples, on the device until it is read."""

    total: torch.Tensor | float = 0.0
    samples: torch.Tensor | float = 0.0
    nonfinite: torch.Tensor | float = 0.0
    """Number of losses that are not finite, which `total` and `samples` leave out."""

    def add(self, losses: Sequence[torch.Tensor], samples: Sequence[int]) -> None:
        """Add the mean losses of passes, each over the given number of samples. All losses are on one device."""
        values = torch.stack([loss.reshape(()) for loss in losses])
        weights = torch.tensor(samples).to(values.device, non_blocking=True)
        finite = torch.isfinite(values)
        self.total = self.total + torch.where(finite, values * weights, 0.0).sum()
        self.samples = self.samples + (finite * weights).sum()
        self.nonfinite = self.nonfinite + (~finite).sum()

    def include(self, other: Losses) -> None:
        """Add another sum to this one."""
        self.total = self.total + other.total
        self.samples = self.samples + other.samples
        self.nonfinite = self.nonfinite + other.nonfinite

    @property
    def mean(self) -> float | None:
        """Mean loss over the samples; None if no loss was finite. Waits for the device."""
        samples = float(self.samples)
        return float(self.total) / samples if samples else None


class Meter:
    """Stopwatch that runs only during steps, not during checkpoints, drains or evaluations."""

    def __init__(
        self,
        every_s: float,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[], None] = lambda: None,
        use: DeviceUse | None = None,
    ) -> None:
        """`wait` waits until the device has done all queued work, so that a step's time does not end when the step is
        queued. `use` measures the device's use, on the rank that reports."""
        self._use, self._every_s, self._clock, self._wait = use, every_s, clock, wait
        self._began = clock()
        self._left = WARM_UP
        self._latest: Callable[..., Throughput] | None = None
        self._samples = self._tokens = 0
        self._seconds = 0.0
        self.step_s = 0.0
        """Smoothed length of a step in seconds."""
        self.last_s = 0.0
        self._epoch, self._interval = Losses(), Losses()
        self.watch: OwnTime | None = None
        """Clock of this rank's time without waits for other ranks, if shares are uneven."""
        self._pending: list[tuple[torch.Tensor, int]] = []
        """Losses of the interval that are not added up yet: adding many takes as long as adding one."""

    def ranks_changed(self) -> None:
        """Do not measure the next steps, as after a start."""
        self._left, self.step_s = WARM_UP, 0.0

    def start(self) -> None:
        """Start the clock of a new step, before its data is fetched."""
        self._began = self._clock()
        if self.watch is not None:
            self.watch.start()

    def leave_out(self, seconds: float) -> None:
        """Subtract these seconds, such as those of an evaluation, from the present step's time."""
        self._began += seconds
        if self.watch is not None:
            self.watch.leave_out(seconds)

    def stop(
        self, progress: TrainingProgress, samples: int, batch: int, lr_factor: float, tokens: int = 0
    ) -> Throughput | None:
        """End a step of `samples` samples with `tokens` tokens. Return the report of the interval if it is long
        enough."""
        seconds = self._clock() - self._began
        # Also in the warm-up: a pause lasts until the first step is done, and the first interval would wait for both.
        if self._left or self._seconds + seconds >= self._every_s:
            self._wait()
            seconds = self._clock() - self._began
        self.last_s = seconds
        if self._left:
            self._left -= 1
            return None
        self.step_s = seconds if self.step_s == 0 else 0.9 * self.step_s + 0.1 * seconds
        self._samples += samples
        self._tokens += tokens
        self._seconds += seconds
        if self._use is not None:
            self._use.look()
        self._latest = partial(
            Throughput,
            progress.epoch,
            progress.step,
            progress.cursor,
            self._samples,
            batch=batch,
            lr_factor=lr_factor,
            noise=progress.noise or None,
            progress=progress.useful,
            tokens=self._tokens or None,
        )
        return self._end() if self._seconds >= self._every_s else None

    def settle(self) -> None:
        """Wait for the device, and count the wait in the interval. A checkpoint or evaluation then begins with an idle
        device."""
        if self._latest is not None:
            began = self._clock()
            self._wait()
            self._seconds += self._clock() - began

    def forget(self) -> None:
        """Drop what is not reported yet: reading the losses would wait for ever on a device that hangs."""
        self._latest, self._pending = None, []
        self._epoch, self._interval = Losses(), Losses()

    def flush(self) -> Throughput | None:
        """Return the report of the present interval, if it has steps, and begin a new interval."""
        self.settle()
        return self._end()

    def _end(self) -> Throughput | None:
        latest, self._latest = self._latest, None
        seconds, self._samples, self._tokens, self._seconds = self._seconds, 0, 0, 0.0
        self._settle()
        losses, self._interval = self._interval, Losses()
        self._epoch.include(losses)
        if latest is None:
            return None
        use, memory = self._use.take() if self._use is not None else (None, None)
        return latest(
            seconds=seconds, loss=losses.mean, nonfinite=int(losses.nonfinite), gpu_use=use, gpu_memory=memory
        )

    def loss(self, loss: torch.Tensor | float, samples: int) -> None:
        """Add the mean loss over the `samples` samples of a pass. Does not wait for the device."""
        if not samples:
            return
        # A copy: the script may go on with the tensor.
        own = loss.detach().clone() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
        self._pending.append((own, samples))
        if len(self._pending) == PENDING:
            self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        # Most scripts have one kind of loss; sums of half precision would lose samples.
        for kind in {(loss.device, loss.dtype) for loss, _ in pending}:
            some = [(loss, samples) for loss, samples in pending if (loss.device, loss.dtype) == kind]
            losses = [loss if loss.dtype == torch.float64 else loss.float() for loss, _ in some]
            self._interval.add(losses, [samples for _, samples in some])

    def take_epoch(self) -> Losses:
        """Return this rank's losses since the last call."""
        self._settle()
        taken, now = self._epoch, self._interval
        taken.include(now)
        self._epoch = Losses(-now.total, -now.samples, -now.nonfinite)  # the interval adds them when it ends
        return taken

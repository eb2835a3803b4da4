"""Gradient noise scale, from the norms of the gradients that ranks exchange anyway (McCandlish et al. 2018, App. A.1).

A rank's gradient g_i is the mean over its n_i samples, the exchanged gradient g the mean over all n. So E|g_i|² =
|G|² + tr(Σ)/n_i and E|g|² = |G|² + tr(Σ)/n. Let large be |g|², and small the mean of |g_i|² with weights n_i/n over the
k ranks with samples. Then E small = |G|² + k tr(Σ)/n, which gives the unbiased estimates tr(Σ) = n (small −
large)/(k − 1) and |G|² = large − tr(Σ)/n. The noise scale is the ratio of their running means.

A single rank compares each step's gradient a with the previous step's b: tr(Σ) = n |a − b|²/2 and |G|² = a·b. These are
also unbiased if the model changes little from step to step. A copy of the gradients is kept for this.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import torch

from ones_wrapper.group import Group

SPAN = 100
"""Number of measured steps after which a step's weight in the running means has fallen to 1/e."""
WINDOWS = 24
"""Largest number of windows. The means' uncertainty follows from the spread between windows."""
LEAST = 5
"""Fewest windows that a lower bound needs."""
PART = 2
"""Number of equal parts into which the measured steps are divided; only the newest part is kept. A run's first
gradients are so large that they would hide the noise scale's growth for long. With 3 parts a single rank's batch grew
until training diverged (docs/benchmarks/training.md)."""
LOW = 0.84
"""Number of standard deviations between the estimate and its lower bound. A normal distribution has 20 % of its values
below that."""
EVERY = 4
"""Steps from one measured step to the next. Norms take time, and the noise scale changes only over thousands of
steps."""
FIRST = 32
"""Number of first steps of the job that are all measured, so that its first report has a noise scale."""
MOST = 1e4
"""Largest noise scale, as a multiple of the batch. Above it, |G|² is too small to be measured."""
PENDING = 64
"""Number of squared norms that are collected before they are added up: adding many takes as long as adding one."""


class Window(NamedTuple):
    """Means of the estimates of tr(Σ) (`trace`) and |G|² (`square`) over the measured steps between two exchanges."""

    steps: int
    trace: float
    square: float


class NoiseScale:
    """Measurement of the gradient noise scale of one run. Only `exchange` waits for the GPU."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.measures = True
        """True if the present step is measured; equal on all ranks."""
        self._keeps = True
        """True if the next step is measured; a single rank then keeps this step's gradients."""
        self.looks = True
        """True if the present step's gradients are measured, or kept by a single rank for the next step."""
        self._alone_samples = 0
        self._skips = False
        self._batch = 0
        self.ranks_changed(0.0, 0.0)

    def ranks_changed(self, known: float, known_low: float) -> None:
        """Begin again with new ranks. `known` is the present noise scale, `known_low` its lower bound."""
        self.known, self.known_low = known, known_low
        """Newest noise scale of earlier ranks or runs, in samples, and its lower bound; 0 if unknown."""
        self._alone: dict[int, torch.Tensor] = {}
        """Previous gradient of each bucket, kept by a single rank."""
        self._step: list[tuple[torch.Tensor, float, float]] = []
        """(square, weight in tr(Σ), weight in |G|²) for each bucket of the present step on this rank."""
        self._seen: list[tuple[torch.Tensor, float, float]] = []
        """(square, weight in tr(Σ), weight in |G|²) for each bucket of finished steps, until they are added to
        `_window`."""
        self._window: list[torch.Tensor | float] = [0.0, 0.0]
        self._steps = 0
        self._windows: deque[Window] = deque(maxlen=WINDOWS)
        self._measured_steps = 0
        """Number of measured steps since the ranks changed, equal on all ranks, so that all drop the same windows."""

    def begin(self, number: int) -> None:
        """Begin step `number` of the job, counted from 0."""
        self.measures, self._keeps = _measured(number), _measured(number + 1)
        self.looks = self.measures or (self._keeps and self._group.world == 1)

    def local(self, bucket: int, gradient: torch.Tensor, samples: float, total: int, passes: int = 1) -> None:
        """Measure a bucket of this rank's own gradient, the mean over `samples` of the step's `total` samples. With
        `passes` above 1, each pass counts as a rank."""
        parts = min(self._group.world * passes, total)
        if self._group.world == 1:
            self._compare(bucket, gradient, samples)
        elif self.measures and samples and parts > 1:
            self._step.append((_square(gradient), samples / (parts - 1), -samples / total / (parts - 1)))

    def whole(self, gradient: torch.Tensor, total: int) -> None:
        """Measure a bucket of the exchanged gradient, the mean over the step's samples. Counted on rank 0 only."""
        if self._group.rank == 0:
            self.whole_shard(gradient, total)

    def whole_shard(self, gradient: torch.Tensor, total: int, passes: int = 1) -> None:
        """Measure this rank's shard of the exchanged gradient; the squares of all ranks' shards are added up."""
        parts = min(self._group.world * passes, total)
        if self.measures and parts > 1:
            self._step.append((_square(gradient), -total / (parts - 1), parts / (parts - 1)))

    def _compare(self, bucket: int, gradient: torch.Tensor, samples: float) -> None:
        last = self._alone.get(bucket)
        if last is not None and last.shape != gradient.shape:
            last = None
        if self.measures and last is not None and self._alone_samples == samples:
            self._step += [(_square(gradient - last), samples / 2, 0.0), (_dot(gradient, last), 0.0, 1.0)]
        if self._keeps and last is not None:
            last.copy_(gradient)
        elif self._keeps:
            self._alone[bucket] = gradient.detach().clone()

    def skip(self) -> None:
        """Leave out the present step, for which no rank has the mean gradient. All ranks must call this in the same
        steps."""
        self._skips = True

    def step(self, total: int) -> None:
        """End a step of `total` samples."""
        self._alone_samples = total
        found, self._step = self._step, []
        skipped, self._skips = self._skips, False
        if skipped or not self.measures:
            return
        if found if self._group.world == 1 else total > 1:
            self._seen += found
            if len(self._seen) >= PENDING:
                self._settle()
            self._steps += 1
            self._batch = total

    def _settle(self) -> None:
        seen, self._seen = self._seen, []
        for kind in {(square.device, square.dtype) for square, _, _ in seen}:
            some = [one for one in seen if (one[0].device, one[0].dtype) == kind]
            squares = torch.stack([square for square, _, _ in some])
            counts = torch.tensor([also for _, *also in some], dtype=squares.dtype)
            # No matrix product: a script's autocast would round it to three digits.
            sums = (squares[:, None] * counts.to(squares.device, non_blocking=True)).sum(0)
            self._window = [before + more for before, more in zip(self._window, sums, strict=True)]

    def exchange(self) -> None:
        """Add up the measurements of all ranks since the last call. Collective."""
        self._settle()
        steps, window = self._steps, [float(value) for value in self._window]
        self._window, self._steps = [0.0, 0.0], 0
        trace, square = self._group.total(window)
        # A step whose gradients overflowed is left out.
        if steps and math.isfinite(trace) and math.isfinite(square):
            self._windows.append(Window(steps, trace / steps, square / steps))
            self._measured_steps += steps
            self._forget()

    def _forget(self) -> None:
        """Drop windows older than the newest part (`PART`) of the measured steps, but keep at least `LEAST`."""
        kept = sum(window.steps for window in self._windows)
        while len(self._windows) > LEAST and kept - self._windows[0].steps >= self._measured_steps / PART:
            kept -= self._windows.popleft().steps

    def _weights(self) -> list[float]:
        """Return each window's weight in the means; the sum is 1."""
        found, after = [], 1.0
        for window in reversed(self._windows):
            keep = math.exp(-window.steps / SPAN)
            found.append(after * (1.0 - keep))
            after *= keep
        return [weight / (1.0 - after) for weight in reversed(found)]

    def _means(self) -> tuple[float, float]:
        weights = self._weights()
        traces = sum(weight * window.trace for weight, window in zip(weights, self._windows, strict=True))
        return traces, sum(weight * window.square for weight, window in zip(weights, self._windows, strict=True))

    @property
    def samples(self) -> float | None:
        """Noise scale in samples. Before the first measurement, that of an earlier run, or None."""
        if not self._windows:
            return self.known or None
        trace, square = self._means()
        if trace <= 0:
            return 0.0
        most = MOST * max(self._batch, 1)
        return min(trace / square, most) if square > 0 else most

    @property
    def low(self) -> float:
        """Lower bound of the noise scale in samples, exceeded with a probability of 80 %; 0 if unknown.

        By Fieller's method it is the smallest N for which tr(Σ) − N |G|² is at most `LOW` standard deviations above 0.
        The spread of the windows gives the standard deviation. The bound is unknown if no N fulfils this, for example
        if each step of a single rank reverses the gradient.
        """
        if len(self._windows) < LEAST:
            return self.known_low
        trace, square = self._means()
        spread = sum(weight**2 / one.steps for weight, one in zip(self._weights(), self._windows, strict=True))

        def clearly_above(noise: float) -> bool:
            others = [one.steps * (one.trace - trace - noise * (one.square - square)) ** 2 for one in self._windows]
            deviation = math.sqrt(spread * sum(others) / (len(others) - 1))
            return trace - noise * square > LOW * deviation

        low, high = 0.0, float(MOST * max(self._batch, 1))
        if clearly_above(high):
            return 0.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if clearly_above(middle) else (low, middle)
        return low


def _measured(number: int) -> bool:
    return number < FIRST or number % EVERY == 0


def _square(gradient: torch.Tensor) -> torch.Tensor:
    return _square_by_norm(gradient) if gradient.device.type == "cuda" else _dot(gradient, gradient)


def _square_by_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return the squared norm without cuBLAS, which keeps up to 32 MiB for each stream that it has used."""
    gradient = _real(gradient)
    wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=wide)
    return norm.square()


def _real(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    one, other = _real(one), _real(other)
    if one.dtype in (torch.float32, torch.float64):
        return torch.dot(one.ravel(), other.ravel())
    return torch.dot(one.ravel().float(), other.ravel().float())

"""Uneven ranks (`init(uneven=True)`): each rank measures its own time, and all agree on shares in proportion to speed.

A rank's own time in a step lasts from the beginning of the data's fetch until backward has computed the last gradient.
The wait for slower ranks and the optimizer's step do not depend on the share, and are not included. At step boundaries
ranks exchange their times per sample, and compute equal shares from them.

A rank's new weight is its measured samples per second. If a step's time also has a constant part, repeated changes
still lead to equal times (a fixed-point iteration). Times are smoothed (`SMOOTHING`), and a change at most halves or
doubles a weight. Each change fetches data again, so that it must save the fraction `GAIN` of the step's time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from ones_wrapper.data.feed import split
from ones_wrapper.data.shares import Shares

SMOOTHING = 0.5
"""Weight of the newest measurement in the smoothed times."""
GAIN = 0.05
"""Smallest fraction of a step's time that a change of shares must save."""
BOUND = 2.0
"""Largest factor by which one change raises or lowers a rank's weight."""
WARM_UP = 2
"""Number of steps after each change that are not measured, since data is fetched again, and memory allocated at
first."""
STEPS = 8
"""Fewest steps in a measurement."""
WINDOW = 64
"""Largest number of steps in a measurement."""
LATE = 16
"""Largest number of steps whose GPU times may be unknown yet, since the processor runs ahead of the GPU."""
UNIT = 1e-12
"""Unit in seconds of the times that ranks exchange as integers."""


class OwnTime:
    """Clock of a rank's own time in a step. It runs from `start` on, and pauses while gradients are exchanged."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._began = self._until = clock()
        self._own = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Start the clock of a new step, before its data is fetched."""
        self._own, self._events = 0.0, []
        self._resume()

    def _resume(self) -> None:
        self._began = self._until = self._clock()
        if self._cuda:
            self._events.append((_recorded(), _recorded()))

    def leave_out(self, seconds: float) -> None:
        """Subtract these seconds from the present step's time."""
        self._began += seconds

    def arrived(self) -> None:
        """Pause the clock: backward has computed gradients, and their exchange begins."""
        self._until = self._clock()
        if self._cuda:
            self._events[-1][1].record()

    def exchanged(self) -> None:
        """Continue the clock, because the exchange has ended."""
        self._own += max(0.0, self._until - self._began)
        self._resume()

    def taken(self) -> Callable[[], float | None]:
        """Return a function that returns the time since `start`; see `taken_s`."""
        return partial(taken_s, self._own + max(0.0, self._until - self._began), tuple(self._events))


def taken_s(processor_s: float, events: Sequence[tuple[Any, Any]]) -> float | None:
    """Return the larger of a step's processor time and GPU time in seconds; None until the GPU has finished the
    step."""
    if not all(end.query() for _, end in events):
        return None
    return max(processor_s, sum(float(start.elapsed_time(end)) for start, end in events) / 1000.0)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Uneven:
    """Shares by measured speed in one run. All ranks compute equal shares from the times that they exchange."""

    def __init__(self, device: torch.device, most: int) -> None:
        """`most` is the largest number of samples in a pass of this rank."""
        self.watch = OwnTime(device)
        self.shares: Shares | None = None
        self.most = most
        self.ranks_changed()

    def ranks_changed(self) -> None:
        """Begin again with new ranks: shares are even until times are measured."""
        self.shares = None
        self._times: tuple[float, ...] = ()
        """Smoothed seconds per sample by rank; equal on all ranks."""
        self._new: deque[float] = deque(maxlen=WINDOW)
        self._late: deque[tuple[int, Callable[[], float | None]]] = deque(maxlen=LATE)
        """(samples, function that returns the time) of the last steps whose times are not in `_new` yet, oldest
        first."""
        self._left = WARM_UP

    def step(self, samples: int) -> None:
        """Record the end of a step in which this rank had `samples` samples."""
        if self._left:
            self._left -= 1
        elif samples:
            self._late.append((samples, self.watch.taken()))
        while self._late and (seconds := self._late[0][1]()) is not None:
            held, _ = self._late.popleft()
            self._new.extend([seconds / held] if seconds else [])

    def proposal(self, rank: int, world: int) -> list[int]:
        """Return this rank's numbers for the agreement, [2 × world]. They are each rank's time per sample in units of
        `UNIT`, then each rank's largest pass in samples. Entries of other ranks are 0, and so is this rank's time until
        enough steps are measured."""
        if world == 1:
            return []
        slots = [0] * (2 * world)
        slots[world + rank] = self.most
        if len(self._new) >= STEPS:
            slots[rank] = max(1, round(median(self._new) / UNIT))
        return slots

    def agreed(self, slots: Sequence[int], total: int, passes: int) -> bool:
        """Update the shares from the agreed numbers `slots`; return True if they changed. `total` is the global batch,
        and `passes` the number of passes in a step."""
        world = len(slots) // 2
        if not all(slots) or not world:
            return False
        self._new.clear()
        times = tuple(slot * UNIT for slot in slots[:world])
        if len(self._times) == world:
            times = tuple(old + SMOOTHING * (new - old) for old, new in zip(self._times, times, strict=True))
        self._times = times
        found = Shares(_bounded(self.shares, times), tuple(slots[world:]))
        before = counts(self.shares, total, world, passes)
        after = counts(found, total, world, passes)
        if _slowest(after, times) > (1.0 - GAIN) * _slowest(before, times):
            return False
        self.shares, self._left = found, WARM_UP
        self._late.clear()
        return True


def counts(shares: Shares | None, total: int, world: int, passes: int) -> tuple[int, ...]:
    """Return each rank's number of samples in a step of `total` samples."""
    if shares is not None:
        return shares.samples(total, passes)
    return tuple(split(0, total, world, rank).samples for rank in range(world))


def _bounded(shares: Shares | None, times: Sequence[float]) -> tuple[float, ...]:
    """Return each rank's weight by its speed, changed at most by the factor `BOUND`; the mean is about 1."""
    world, whole = len(times), sum(1.0 / each for each in times)
    before = shares.speeds if shares is not None else (1.0,) * world
    wanted = (world / (each * whole) for each in times)
    return tuple(min(max(new, old / BOUND), old * BOUND) for new, old in zip(wanted, before, strict=True))


def _slowest(samples: Sequence[int], times: Sequence[float]) -> float:
    return max(each * seconds for each, seconds in zip(samples, times, strict=True))

"""Uneven ranks: each rank measures its own time, and all agree on shares in proportion to speed (`init(uneven=True)`).

A rank's own time in a step begins with fetching its data and ends when backward has brought its last gradient. After
that come the wait for slower ranks and the optimizer's step, which do not depend on the share. Ranks exchange their
times per sample at step boundaries, and each computes the same shares from them.

The rule is a fixed-point iteration on samples over time: if a step also has a constant part, ranks still come to equal
times. The rule is smoothed (`SMOOTHING`), and bounded (a change at most halves or doubles a rank's weight). No change
is made that would shorten the step by less than `GAIN`, since each change fetches data again.
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
"""Weight of the newest measurement."""
GAIN = 0.05
"""Smallest part of a step's time that a change of shares must save."""
BOUND = 2.0
"""Largest factor by which one change raises or lowers a rank's weight."""
WARM_UP = 2
"""Steps after each change that are not measured: data is fetched again, and after a start memory is set up."""
STEPS = 8
"""Fewest steps that a measurement takes."""
WINDOW = 64
"""Most steps that a measurement takes."""
LATE = 16
"""Number of steps whose times are kept until the GPU has finished them, since the processor runs ahead."""
UNIT = 1e-12
"""Seconds in one unit of the times that ranks exchange, which are integers."""


class OwnTime:
    """This rank's own time in the present step: from `start`, or the end of an exchange, to the last gradient."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._began = self._until = clock()
        self._own = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Begin a step, whose first part is to fetch its data."""
        self._own, self._events = 0.0, []
        self._resume()

    def _resume(self) -> None:
        self._began = self._until = self._clock()
        if self._cuda:
            self._events.append((_recorded(), _recorded()))

    def leave_out(self, seconds: float) -> None:
        """Exclude these seconds of the present step."""
        self._began += seconds

    def arrived(self) -> None:
        """Note that backward brought gradients: an exchange begins, which is not the rank's own time."""
        self._until = self._clock()
        if self._cuda:
            self._events[-1][1].record()

    def exchanged(self) -> None:
        """Note the end of an exchange: from now on this rank's own time runs again."""
        self._own += max(0.0, self._until - self._began)
        self._resume()

    def taken(self) -> Callable[[], float | None]:
        """Return a function that returns this rank's own time since `start` (`taken_s`)."""
        return partial(taken_s, self._own + max(0.0, self._until - self._began), tuple(self._events))


def taken_s(processor_s: float, events: Sequence[tuple[Any, Any]]) -> float | None:
    """Return the longer of processor time and GPU time of a step, in seconds; None while the GPU is not done."""
    if not all(end.query() for _, end in events):
        return None
    return max(processor_s, sum(float(start.elapsed_time(end)) for start, end in events) / 1000.0)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Uneven:
    """Uneven shares of one run's steps. All ranks compute the same shares from the times that they exchanged."""

    def __init__(self, device: torch.device, most: int) -> None:
        """`most` is the number of samples that this rank holds in a pass."""
        self.watch = OwnTime(device)
        self.shares: Shares | None = None
        self.most = most
        self.ranks_changed()

    def ranks_changed(self) -> None:
        """Begin again after ranks changed: shares are even until they are measured."""
        self.shares = None
        self._times: tuple[float, ...] = ()
        """Smoothed seconds a sample of each rank, the same on all ranks."""
        self._new: deque[float] = deque(maxlen=WINDOW)
        self._late: deque[tuple[int, Callable[[], float | None]]] = deque(maxlen=LATE)
        """Samples and times of the last steps, oldest first, that are not in `_new` yet."""
        self._left = WARM_UP

    def step(self, samples: int) -> None:
        """End a step in which this rank had `samples` samples."""
        if self._left:
            self._left -= 1
        elif samples:
            self._late.append((samples, self.watch.taken()))
        while self._late and (seconds := self._late[0][1]()) is not None:
            held, _ = self._late.popleft()
            self._new.extend([seconds / held] if seconds else [])

    def proposal(self, rank: int, world: int) -> list[int]:
        """Return this rank's part of the agreement, two slots for each rank: time per sample in `UNIT`, and most
        samples of a pass. Other ranks' slots are 0; so is this rank's time until it has measured enough steps."""
        if world == 1:
            return []
        slots = [0] * (2 * world)
        slots[world + rank] = self.most
        if len(self._new) >= STEPS:
            slots[rank] = max(1, round(median(self._new) / UNIT))
        return slots

    def agreed(self, slots: Sequence[int], total: int, passes: int) -> bool:
        """Update the shares from all ranks' slots; return whether they changed. `total` is the global batch in force,
        made in `passes` passes."""
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
    """Return each rank's samples in a step of `total` samples."""
    if shares is not None:
        return shares.samples(total, passes)
    return tuple(split(0, total, world, rank).samples for rank in range(world))


def _bounded(shares: Shares | None, times: Sequence[float]) -> tuple[float, ...]:
    """Return the ranks' weights by speed, each changed at most by the factor `BOUND`; their mean is about 1."""
    world, whole = len(times), sum(1.0 / each for each in times)
    before = shares.speeds if shares is not None else (1.0,) * world
    wanted = (world / (each * whole) for each in times)
    return tuple(min(max(new, old / BOUND), old * BOUND) for new, old in zip(wanted, before, strict=True))


def _slowest(samples: Sequence[int], times: Sequence[float]) -> float:
    return max(each * seconds for each, seconds in zip(samples, times, strict=True))

"""Virtual time: what happens when, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

EPOCH = 1_700_000_000.0
"""Unix time at which simulations begin."""


@dataclass
class Event:
    """Something that will happen, unless it is cancelled."""

    time: float
    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Let it not happen."""
        self.action = None


class Timeline:
    """A clock that goes from event to event. Calling it gives the time, so it serves wherever a clock is wanted."""

    def __init__(self, start: float = EPOCH) -> None:
        self.now = start
        self.stirred = False
        """Something happened that whoever watches jobs one by one would want to look at; watchers set it back."""
        self._heap: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> Event:
        """Let `action` happen at that time, at once where it is past; of equal times, the first asked for first."""
        event = Event(max(time, self.now), action)
        heapq.heappush(self._heap, (event.time, next(self._order), event))
        return event

    def after(self, seconds: float, action: Callable[[], None]) -> Event:
        """Let `action` happen so many seconds from now."""
        return self.at(self.now + seconds, action)

    def run(self, until: float, *, stir: bool = False) -> None:
        """Let time pass to `until`; with `stir` only to the first event that stirs."""
        while self._heap and self._heap[0][0] <= until:
            time, _, event = heapq.heappop(self._heap)
            if event.action is None:
                continue
            self.now = time
            event.action()
            if stir and self.stirred:
                return
        self.now = max(self.now, until)

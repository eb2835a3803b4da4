"""Lifetimes of guests: preemptions per second that a guest runs, by partition and hour of the day.

Preemptions are modelled as a Poisson process with a gamma prior on its rate. The mean rate is (prior + preemptions)
over (prior + seconds run). A partition starts at `LIFE_S`. Each hour of the day starts at the partition's overall rate,
since people ask for more GPUs by day than by night. The data are the guests of the last `KNOWN_S` seconds in the
database.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from ones_db import GuestRun

LIFE_S = 4 * 3600.0
"""Expected lifetime of a guest in seconds, before any guest was observed."""
PRIOR_EVENTS = 0.25
"""Number of preemptions by which the prior `LIFE_S` is weighted: a few observed ones outweigh it."""
HOUR_EVENTS = 2.0
"""Number of preemptions by which the partition's overall rate is weighted in each hour of the day."""
KNOWN_S = 14 * 86400.0
"""Age in seconds beyond which the end of a guest no longer counts."""
HOUR_S, HOURS = 3600.0, 24


class GuestLives:
    """Preemption rates of guests, estimated by partition and hour of the day."""

    def __init__(self, runs: Iterable[GuestRun] = (), now: float = 0.0) -> None:
        self._taken: Counter[tuple[str, int]] = Counter()
        """Number of preemptions, by partition and hour of the day."""
        self._ran_s: dict[tuple[str, int], float] = defaultdict(float)
        for run in runs:
            end = run.end_time if run.end_time is not None else now
            last = _hour(end)
            for last, seconds in _hours(max(run.start_time, now - KNOWN_S), end):
                self._ran_s[run.partition, last] += seconds
            self._taken[run.partition, last] += run.preempted

    def rate(self, partition: str, now: float) -> float:
        """Return the expected preemptions per second of a guest in this partition at this time."""
        taken = sum(count for (name, _), count in self._taken.items() if name == partition)
        ran_s = sum(seconds for (name, _), seconds in self._ran_s.items() if name == partition)
        mean = (PRIOR_EVENTS + taken) / (PRIOR_EVENTS * LIFE_S + ran_s)
        here = partition, _hour(now)
        return (HOUR_EVENTS + self._taken[here]) / (HOUR_EVENTS / mean + self._ran_s.get(here, 0.0))


def _hour(time: float) -> int:
    return int(time // HOUR_S) % HOURS


def _hours(start: float, end: float) -> Iterator[tuple[int, float]]:
    while start < end:
        until = min((math.floor(start / HOUR_S) + 1) * HOUR_S, end)
        yield _hour(start), until - start
        start = until

"""What a store remembers of the runs it has read, so that it reads each report once.

Nothing here is the truth: it all follows from the database, and forgetting it costs time alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ones_db.records import EpochPoint, JobHistory, NoisePoint

SPEEDS = 5
"""Newest throughput samples kept of each shape and batch (ONES §3.2)."""
NOISES = 8
"""Newest gradient noise scales kept of a job."""
SPARE = 250
"""Jobs remembered beyond as many as were ever asked for at once; those not asked for longest are forgotten first."""


@dataclass
class RunMemory:
    """The reports of one run, up to a number."""

    restart: int
    number: int = 0
    epochs: dict[int, tuple[EpochPoint, int]] = field(default_factory=dict)
    """Each epoch that ended, with the samples used in it."""
    speeds: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    """The newest (samples/s, time) at each global batch."""
    noises: deque[NoisePoint] = field(default_factory=lambda: deque(maxlen=NOISES))

    def add_sample(self, row: Any) -> None:
        """Take in a throughput sample that is newer than those before."""
        if row.seconds > 0:
            kept = self.speeds.setdefault(row.batch, deque(maxlen=SPEEDS))
            kept.append((row.samples / row.seconds, row.time))
        if row.noise is not None:
            self.noises.append(NoisePoint(row.noise, row.time))

    def add_epoch(self, row: Any) -> None:
        """Take in an epoch's end that is newer than those before; it stands for the same epoch done before."""
        point = EpochPoint(row.epoch, row.loss, row.accuracy, row.time, self.restart)
        self.epochs[row.epoch] = (point, row.samples)


@dataclass
class JobMemory:
    """A job's runs, and its history as its rows stood when it was last told."""

    runs: dict[int, RunMemory] = field(default_factory=dict)
    state: Any = None
    history: JobHistory | None = None


class Memory:
    """What one store remembers. Not for several threads at a time."""

    def __init__(self) -> None:
        self._jobs: dict[int, JobMemory] = {}
        self._most = 0
        self.finished: tuple[Any, list[JobHistory]] | None = None
        """What the finished jobs were told to be, and the state of their rows then."""

    def of(self, keys: Sequence[int]) -> dict[int, JobMemory]:
        """What is remembered of these jobs, empty for new ones; makes them the last to be forgotten."""
        asked = {key: self._jobs.pop(key) if key in self._jobs else JobMemory() for key in keys}
        self._jobs.update(asked)
        self._most = max(self._most, len(asked))
        while len(self._jobs) > self._most + SPARE:
            del self._jobs[next(iter(self._jobs))]
        return asked

    def forget(self) -> None:
        """Start anew."""
        self._jobs.clear()
        self.finished = None

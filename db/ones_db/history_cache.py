"""What a store has read of jobs' runs, so that of each job only what is new is read again.

It is never the truth: all follows from the database, and clearing it costs time alone.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ones_db.records import EpochPoint, JobHistory, MembershipRecord, NoisePoint
from ones_db.shape import Shape

SPEEDS = 5
"""Newest throughput samples kept of each shape and batch (ONES §3.2)."""
NOISES = 8
"""Newest gradient noise scales kept of a job."""
SPARE = 250
"""Jobs cached beyond as many as were ever asked for at once; those not asked for longest are forgotten first."""


Row: TypeAlias = Any
"""A row of SQLAlchemy, its columns by name."""


@dataclass
class CachedRun:
    """The reports of one run, up to a number."""

    restart: int
    number: int = 0
    epochs: dict[int, tuple[EpochPoint, int]] = field(default_factory=dict)
    """Each epoch that ended, with the samples used in it."""
    speeds: dict[tuple[Shape | None, int], deque[tuple[float, float]]] = field(default_factory=dict)
    """The newest (samples/s, time) at each size and global batch; None for the size of the run."""
    noises: deque[NoisePoint] = field(default_factory=lambda: deque(maxlen=NOISES))
    members: list[MembershipRecord] = field(default_factory=list)
    """The memberships of a term, in order."""

    def add_sample(self, row: Any) -> None:
        """Take in a throughput sample that is newer than those before. One without samples is of a script that does
        not tell them, and measures no throughput."""
        if row.seconds > 0 and row.samples > 0 and (size := self._size_at(row)) != MIXED:
            kept = self.speeds.setdefault((size, row.batch), deque(maxlen=SPEEDS))
            kept.append((row.samples / row.seconds, row.time))
        if row.noise is not None:
            self.noises.append(NoisePoint(row.noise, row.time))

    def _size_at(self, row: Any) -> Shape | None:
        """At which size a sample was measured: that of the membership then in force, `MIXED` of one in which the
        blocks changed."""
        after = bisect(self.members, row.number, key=lambda member: member.number)
        if not after:
            return None
        member = self.members[after - 1]
        return size_of(member) if row.time - row.seconds >= member.time - MARGIN * row.seconds else MIXED

    def add_epoch(self, row: Any) -> None:
        """Take in an epoch's end that is newer than those before; it stands for the same epoch done before."""
        point = EpochPoint(row.epoch, row.loss, row.accuracy, row.time, self.restart)
        self.epochs[row.epoch] = (point, row.samples)


@dataclass
class CachedJob:
    """A job's runs, and its history as its rows stood when it was last made."""

    runs: dict[int, CachedRun] = field(default_factory=dict)
    state: Any = None
    history: JobHistory | None = None


MIXED = Shape(-1, -1)
MARGIN = 0.1
"""Part of a sample that may lie before a change of blocks: clocks are read a moment apart."""


def size_of(member: MembershipRecord) -> Shape:
    """The size of a membership; one node with all GPUs where nodes give unequally many."""
    report = member.report
    return Shape(report.nodes, report.gpus_per_node) if report.gpus_per_node else Shape(1, report.world)


class HistoryCache:
    """What one store remembers. Not for several threads at a time."""

    def __init__(self) -> None:
        self._jobs: dict[int, CachedJob] = {}
        self._most = 0
        self.finished: tuple[Any, list[JobHistory]] | None = None
        """The histories of the finished jobs, and the state of their rows then."""

    def of(self, keys: Sequence[int]) -> dict[int, CachedJob]:
        """What is cached of these jobs, empty for new ones; makes them the last to be forgotten."""
        asked = {key: self._jobs.pop(key) if key in self._jobs else CachedJob() for key in keys}
        self._jobs.update(asked)
        self._most = max(self._most, len(asked))
        while len(self._jobs) > self._most + SPARE:
            del self._jobs[next(iter(self._jobs))]
        return asked

    def clear(self) -> None:
        """Start anew."""
        self._jobs.clear()
        self.finished = None

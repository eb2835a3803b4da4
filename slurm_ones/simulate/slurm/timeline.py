"""Virtual time, and how long everything takes in a simulated cluster."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

EPOCH = 1_700_000_000.0
"""Unix time at which simulations begin."""


@dataclass
class Event:
    """A scheduled action, which can be cancelled."""

    time: float
    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Drop the action."""
        self.action = None


class Timeline:
    """A clock that goes from event to event. Calling it gives the time, so it serves wherever a clock is wanted."""

    def __init__(self, start: float = EPOCH) -> None:
        self.now = start
        self.changed = False
        """Something happened that whoever watches jobs one by one would want to look at; watchers set it back."""
        self._heap: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> Event:
        """Call `action` at that time, or at once if it is past; actions of equal times run in the order of these
        calls."""
        event = Event(max(time, self.now), action)
        heapq.heappush(self._heap, (event.time, next(self._order), event))
        return event

    def after(self, seconds: float, action: Callable[[], None]) -> Event:
        """Call `action` this many seconds from now."""
        return self.at(self.now + seconds, action)

    def run(self, until: float, *, until_change: bool = False) -> None:
        """Let time pass to `until`; with `until_change` only to the first event that sets `changed`."""
        while self._heap and self._heap[0][0] <= until:
            time, _, event = heapq.heappop(self._heap)
            if event.action is None:
                continue
            self.now = time
            event.action()
            if until_change and self.changed:
                return
        self.now = max(self.now, until)


@dataclass(frozen=True)
class ClusterSettings:
    """Durations in a simulated cluster, in seconds; those of Slurm are Slurm's defaults."""

    requeue_delay_s: float = 121.0
    """A requeued job starts this much later, unless its start is set again."""
    schedule_s: float = 1.0
    """Time from a change to Slurm's main scheduling, which starts jobs in their order up to the first that finds no
    room."""
    backfill_s: float = 30.0
    """Between two rounds of backfill, which starts those behind it that do not delay it."""
    ending_s: float = 1.0
    """A job that ended holds its GPUs until its last processes are gone."""
    min_job_age_s: float = 300.0
    """Slurm forgets a job this long after its end."""
    time_limit_s: float = 0.0
    """Limit of every job; 0 for none. Slurm plans with a year if there is none."""

    report_s: float = 30.0
    """Time between two throughput reports of a job. The wrapper's are 2 s apart, and the companion sees one a tick."""
    first_report_s: float = 30.0
    """Time from a run's first step to its first throughput report."""
    checkpoint_s: float = 600.0
    """Between two checkpoints that a job takes unasked: the wrapper's default."""
    stall_s: float = 0.0
    """Pause of training for such a checkpoint; the published studies count nothing."""
    speed_noise: float = 0.05
    """Standard deviation of the logarithm of a reported throughput."""
    gradient_noise: float = 0.15
    """The same of a reported gradient noise scale."""
    save: float = 0.1
    """Share of a resize's cost that is spent on its checkpoint …"""
    stop: float = 0.1
    """… on ending the old run's processes …"""
    launch: float = 0.5
    """… on starting the new run's ranks, which a first start costs as well …"""
    load: float = 0.3
    """… and on loading the checkpoint."""

"""Virtual time, and how long things take in a simulated cluster."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

EPOCH = 1_700_000_000.0
"""Unix time at which simulations begin."""


@dataclass
class Event:
    """An action at a time, which can be cancelled."""

    time: float
    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Drop the action."""
        self.action = None


class Timeline:
    """A clock that jumps from event to event. Calling the clock returns the time, so it can be used as any `clock`."""

    def __init__(self, start: float = EPOCH) -> None:
        self.now = start
        self.changed = False
        """Set to True by events that change a job. Callers who wait for a change set it to False before."""
        self._heap: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> Event:
        """Call `action` at this time, or at once if it is past. Actions at equal times are called in the order of these
        calls."""
        event = Event(max(time, self.now), action)
        heapq.heappush(self._heap, (event.time, next(self._order), event))
        return event

    def after(self, seconds: float, action: Callable[[], None]) -> Event:
        """Call `action` this many seconds from now."""
        return self.at(self.now + seconds, action)

    def run(self, until: float, *, until_change: bool = False) -> None:
        """Let time pass to `until`. With `until_change`, stop after the first event that sets `changed`."""
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
    """Seconds that things take in a simulated cluster. The defaults are Slurm's own."""

    requeue_delay_s: float = 121.0
    """Time from a requeue to the job's next start. Setting the job's earliest start replaces this delay."""
    schedule_s: float = 1.0
    """Time from a change to the next round of Slurm's main scheduling."""
    backfill_s: float = 30.0
    """Time between two rounds of Slurm's backfill."""
    ending_s: float = 1.0
    """Time from a job's end until its last processes end, and its GPUs are free."""
    min_job_age_s: float = 300.0
    """Time from a job's end until Slurm drops its record."""
    time_limit_s: float = 0.0
    """Time limit of each job; 0 for no limit. Slurm expects a job without a limit to run for a year."""

    report_s: float = 30.0
    """Simulated time between two throughput reports of a job. Real jobs report every 2 s, but the companion needs one a
    tick."""
    first_report_s: float = 30.0
    """Time from a run's first step to its first throughput report."""
    checkpoint_s: float = 600.0
    """Time between two periodic checkpoints of a job. It is the wrapper's default."""
    stall_s: float = 0.0
    """Pause of training for each periodic checkpoint. The published studies assume none."""
    speed_noise: float = 0.05
    """Standard deviation of the logarithm of a reported throughput."""
    gradient_noise: float = 0.15
    """Standard deviation of the logarithm of a reported gradient noise scale."""
    save: float = 0.1
    """Share of a resize's time in which the checkpoint is written."""
    stop: float = 0.1
    """Share of a resize's time in which the old run's processes end."""
    launch: float = 0.5
    """Share of a resize's time in which the new run's ranks start. A job's first start takes as long."""
    load: float = 0.3
    """Share of a resize's time in which the checkpoint is loaded."""

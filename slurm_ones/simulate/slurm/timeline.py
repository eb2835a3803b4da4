"""Virtual time, and the durations of actions in a simulated cluster."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

EPOCH = 1_700_000_000.0
"""Unix time at which simulations begin."""


@dataclass
class Event:
    """Action at a point in time; `cancel` drops it."""

    time: float
    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Drop the action, so that it is not called."""
        self.action = None


class Timeline:
    """Clock that jumps from event to event. Calling it returns the present time."""

    def __init__(self, start: float = EPOCH) -> None:
        self.now = start
        self.changed = False
        """True after an event that changed a job. A caller who waits for a change sets it to False first."""
        self._heap: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> Event:
        """Schedule `action` for this time, or for now if that is past. Actions with equal times are called in the order
        in which they were scheduled."""
        event = Event(max(time, self.now), action)
        heapq.heappush(self._heap, (event.time, next(self._order), event))
        return event

    def after(self, seconds: float, action: Callable[[], None]) -> Event:
        """Schedule `action` in this many seconds."""
        return self.at(self.now + seconds, action)

    def run(self, until: float, *, until_change: bool = False) -> None:
        """Let time pass up to `until`, and call the actions that are due. With `until_change`, stop after the first
        event that sets `changed`."""
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
    """Durations in a simulated cluster, in seconds unless stated otherwise. For Slurm's own settings, the defaults are
    Slurm's."""

    requeue_delay_s: float = 121.0
    """Time from a requeue until the job may start. Setting the job's earliest start replaces this delay."""
    schedule_s: float = 1.0
    """Time from a change in the cluster to the next round of Slurm's main scheduler."""
    backfill_s: float = 30.0
    """Time between two rounds of Slurm's backfill scheduler."""
    ending_s: float = 1.0
    """Time from a job's end until its last processes have ended and its GPUs are free."""
    min_job_age_s: float = 300.0
    """Time from a job's end until Slurm drops its record."""
    time_limit_s: float = 0.0
    """Time limit of a job that requests none; 0 for no limit. Slurm expects a job without a limit to run for a year."""

    report_s: float = 30.0
    """Time between two throughput reports of a job. Real jobs report every 2 s, but one report per tick suffices for
    the companion."""
    first_report_s: float = 30.0
    """Time from a run's first step to its first throughput report."""
    checkpoint_s: float = 600.0
    """Time between two periodic checkpoints of a job. The default is the wrapper's."""
    stall_s: float = 0.0
    """Pause of training for each periodic checkpoint. Published studies assume none."""
    speed_noise: float = 0.05
    """Standard deviation of the logarithm of a reported throughput."""
    gradient_noise: float = 0.15
    """Standard deviation of the logarithm of a reported gradient noise scale."""
    save: float = 0.1
    """Share of a resize's duration in which the checkpoint is written."""
    stop: float = 0.1
    """Share of a resize's duration in which the old run's processes end."""
    launch: float = 0.5
    """Share of a resize's duration in which the new run's ranks start. A job's first start takes the same time."""
    load: float = 0.3
    """Share of a resize's duration in which the checkpoint is loaded."""

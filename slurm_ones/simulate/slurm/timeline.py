"""Virtual time, and the durations of all that happens in a simulated cluster."""

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
    """A clock that jumps from event to event. Calling it returns the time, so it serves as any `clock`."""

    def __init__(self, start: float = EPOCH) -> None:
        self.now = start
        self.changed = False
        """True after an event that watchers of single jobs need to see; watchers set it back."""
        self._heap: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> Event:
        """Call `action` at that time, or at once if past; of equal times in the order of the calls."""
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
    """Durations in a simulated cluster, in seconds; Slurm's own are its defaults."""

    requeue_delay_s: float = 121.0
    """Delay of a requeued job's start, unless its earliest start is set again."""
    schedule_s: float = 1.0
    """Time from a change to Slurm's main scheduling, which starts jobs in order until one finds no room."""
    backfill_s: float = 30.0
    """Time between two rounds of backfill, which starts later jobs that do not delay the first waiting one."""
    ending_s: float = 1.0
    """Time from a job's end until its last processes are gone and its GPUs are free."""
    min_job_age_s: float = 300.0
    """Time from a job's end until Slurm forgets it."""
    time_limit_s: float = 0.0
    """Time limit of each job; 0 for none. Without a limit Slurm plans with a year."""

    report_s: float = 30.0
    """Simulated seconds between a job's throughput reports; really 2 s; the companion uses one report a tick."""
    first_report_s: float = 30.0
    """Time from a run's first step to its first throughput report."""
    checkpoint_s: float = 600.0
    """Time between two periodic checkpoints of a job: the wrapper's default."""
    stall_s: float = 0.0
    """Pause of training for a periodic checkpoint; the published studies count nothing."""
    speed_noise: float = 0.05
    """Standard deviation of the logarithm of a reported throughput."""
    gradient_noise: float = 0.15
    """Standard deviation of the logarithm of a reported gradient noise scale."""
    save: float = 0.1
    """Share of a resize's cost spent on the checkpoint."""
    stop: float = 0.1
    """Share of a resize's cost spent on ending the old run's processes."""
    launch: float = 0.5
    """Share of a resize's cost spent on starting the new run's ranks; a first start costs it too."""
    load: float = 0.3
    """Share of a resize's cost spent on loading the checkpoint."""

"""What a resize needs to know of a job's reports: drained, and back."""

from __future__ import annotations

from collections.abc import Callable

from ones_db import Store
from slurm_ones.observe.observer import Observer
from slurm_ones.slurm.model import Job


class DrainReports:
    """Reads a job's newest reports before it answers, so a resize need not wait for the next tick."""

    def __init__(self, observer: Observer, store: Store, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._store = store
        self._clock = clock

    def drained(self, job: Job, restart: int, order: int) -> float | None:
        """When the checkpoint that answers the order was reported, if it was, stands, and the job still waits."""
        self._observer.collect([job], now=self._clock())
        found = self._store.checkpoint_for_order(job.job_id, restart, order)
        if found is None or not self._observer.checkpoint_stands(job, found.name):
            return None
        # A drained job says nothing more. One that does trains on, whatever the clocks say of its minute.
        _, last = self._store.report_positions([job.job_id]).get((job.job_id, restart), (0, 0))
        if last > found.number:
            return None
        # The job's clock may be ahead of ours.
        return min(found.time, self._clock())

    def restarted(self, job: Job, after_restart: int) -> float | None:
        """Seconds from the last step before the drain to the new run's hello."""
        self._observer.collect([job], now=self._clock())
        return self._store.pause_after(job.job_id, after_restart)

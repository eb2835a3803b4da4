"""Deferrals, which keep pending jobs from starting for a while without a hold.

A deferral sets a job's earliest start to a time soon after now, and is renewed while the schedule parks the job. If the
companion ends, Slurm starts the job once that time has passed. Deferrals are stored, so that a new companion can tell
them from a `--begin` of the owner.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ones_db import Store
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.slurm.client import Refused, SlurmClient, UnknownJob
from slurm_ones.slurm.model import SlurmJob

log = logging.getLogger(__name__)


@dataclass
class Deferrals:
    """Deferrals of pending jobs, set by this companion or an earlier one."""

    client: SlurmClient
    store: Store
    length_s: float
    """Length of a deferral in seconds."""
    clock: Callable[[], float]

    def ours(self, job: SlurmJob | WholeJob) -> bool:
        """Tell whether a companion set the job's earliest start, rather than its owner or Slurm."""
        return _is_ours(job, self.store.deferrals().get(job.job_id))

    def all_ours(self, jobs: Iterable[WholeJob]) -> set[int]:
        """Return the ids of the jobs whose earliest start a companion set (see `ours`)."""
        known = self.store.deferrals()
        return {job.job_id for job in jobs if _is_ours(job, known.get(job.job_id))}

    def defer(self, job: SlurmJob | WholeJob) -> None:
        """Defer the job for `length_s` from now; raises `Refused`."""
        until = float(math.ceil(self.clock() + self.length_s))
        self.store.set_deferral(job.job_id, until)
        self.client.defer(job.job_id, until)

    def release(self, job: SlurmJob | WholeJob) -> None:
        """End the job's deferral if the companion set one; raises `Unreachable`."""
        if (until := self.store.deferrals().get(job.job_id)) is not None:
            self._release(job.job_id, job, until)

    def reconcile(
        self, parked: Collection[int], jobs: Mapping[int, SlurmJob | WholeJob], busy: Collection[int]
    ) -> None:
        """Defer the waiting jobs `parked`, and release all other deferred jobs; raises `Unreachable`.

        `jobs` are all jobs that Slurm knows. Jobs `busy` with a resize are skipped.
        """
        known = self.store.deferrals()
        for job_id in sorted({*parked, *known} - {*busy}):
            job, until = jobs.get(job_id), known.get(job_id)
            if job_id in parked and job is not None and job.pending:
                self._renew(job, _is_ours(job, until))
            elif until is not None:
                self._release(job_id, job, until)

    def release_all(self) -> None:
        """Release all deferred jobs; raises `Unreachable`."""
        jobs: dict[int, SlurmJob | WholeJob] = {}
        unread = set()
        for job_id in self.store.deferrals():
            try:
                jobs[job_id] = self.client.job(job_id)
            except UnknownJob:
                continue
            except Refused as error:
                # The record stays, so that the next companion does not take the deferral for the owner's.
                log.warning("job %d: its deferral could not be ended early: %s", job_id, error)
                unread.add(job_id)
        self.reconcile((), jobs, unread)

    def _renew(self, job: SlurmJob | WholeJob, ours: bool) -> None:
        """Renew a deferral if less than half of it remains. A later start set by the owner or Slurm stays."""
        left = job.eligible_time - self.clock()
        if left > 0 and (not ours or left >= self.length_s / 2):
            return
        try:
            self.defer(job)
        except Refused as error:
            # The job may have started or ended since the snapshot. The next snapshot shows it.
            log.warning("job %d: it could not be kept from starting: %s", job.job_id, error)

    def _release(self, job_id: int, job: SlurmJob | WholeJob | None, until: float) -> None:
        if job is not None and _is_ours(job, until) and until > self.clock():
            try:
                self.client.defer(job_id, self.clock())
            except Refused as error:
                log.warning("job %d: its deferral could not be ended early: %s", job_id, error)
            else:
                log.info("job %d: may start", job_id)
        self.store.set_deferral(job_id, None)


def _is_ours(job: SlurmJob | WholeJob, until: float | None) -> bool:
    return job.pending and job.eligible_time == until

"""Harm by guests: a job that waits too long for what they hold, and a base block that is left to Slurm to take."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.scheduler import Counts, QueuedJob, RunningJob, place
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from tests.faults.plan import GUEST


def is_guest(job: SimulatedJob) -> bool:
    """Tell whether it waits or runs in the queue of guests."""
    return GUEST in (job.qos, *job.partitions)


class HarmWatch:
    """Looks at the first job of the queue again and again: those behind it wait for it."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._waiting: tuple[int, float] = (0, 0.0)
        """The job that waited for guests at the last look, and since when."""

    @property
    def _bound_s(self) -> float:
        """Grace time and SIGKILL, one scheduling pass to preempt and one to start."""
        conf, settings = self._cluster.conf, self._cluster.settings
        parts = self._cluster.nodes.partitions.values()
        grace_s = max(one.grace_s for one in (*conf.qos, *parts) if one.name == GUEST)
        return grace_s + conf.kill_wait_s + settings.backfill_s + 2 * settings.schedule_s

    def look(self) -> Iterator[str]:
        """What is wrong now."""
        now, job_id = self._cluster.timeline.now, self._served_by_guests()
        if job_id != self._waiting[0]:
            self._waiting = (job_id, now)
        elif job_id and now - self._waiting[1] > self._bound_s:
            yield f"job {job_id} has waited {now - self._waiting[1]:.0f} s for what guests hold"
            self._waiting = (job_id, now)

    def _served_by_guests(self) -> int:
        """The first job that waits, if it would run once guests are gone; 0 if there is none."""
        cluster = self._cluster
        running = cluster.running()
        guests = [one for one in running if GUEST in (one.of.qos, one.partition)]
        if not guests:
            return 0
        counts, free = Counts(cluster.conf, running), cluster.nodes.ledger()
        for job in cluster.queue():
            if GUEST in (job.of.qos, job.partition) or counts.refusal(job) or counts.lacks_licenses(job):
                continue
            if place(job, free) is None and place(job, cluster.nodes.empty(job.partition)) is not None:
                return job.job_id if self._fits_without(job, guests) else 0
        return 0

    def _fits_without(self, job: QueuedJob, guests: list[RunningJob]) -> bool:
        then = self._cluster.nodes.ledger()
        for guest in guests:
            then.give(guest.held)
        return place(job, then) is not None


def base_of(records: Collection[SimulatedJob], tasks: Collection[int]) -> int:
    """GPUs of the base blocks among these tasks of a job, as they run, ran last or are to start."""
    base = (job for job in records if not is_guest(job) and {*job.array_tasks} & {*tasks})
    return sum(sum(job.gpus.values()) or job.nodes * job.gpus_per_node for job in base)

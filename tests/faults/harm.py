"""Harm by guests: a job that waits too long for what they hold, and a base block that is left to Slurm to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.nodes import PreemptMode
from slurm_ones.simulate.slurm.scheduler import Counts, QueuedJob, RunningJob, place
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from tests.faults.plan import GUEST


def is_guest(job: SimulatedJob) -> bool:
    """Tell whether it waits or runs in the queue of guests."""
    return GUEST in (job.qos, *job.partitions)


def is_ours(job: SimulatedJob) -> bool:
    """Tell whether it is a guest of a job of blocks, and not somebody else's job in that queue."""
    return job.array is not None and is_guest(job)


def grace_of(cluster: SimulatedCluster) -> float:
    """Grace time of guests."""
    queues = (*cluster.conf.qos, *cluster.nodes.partitions.values())
    return max((one.grace_s for one in queues if one.name == GUEST), default=0.0)


@dataclass
class GuestCount:
    """What became of guests, and of those whom Slurm served by preempting them."""

    starts: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """Preemptions, by what became of the guest."""
    taken_for: int = 0
    """Preemptions of guests that Slurm chose, for a job of no blocks."""
    served: int = 0
    """Such jobs that started after guests were preempted for them."""
    longest_s: float = 0.0
    """Longest time from such a preemption to the start, beyond grace."""


class GuestTally(Faults):
    """Counts as things happen."""

    def __init__(self) -> None:
        self.count = GuestCount()
        self._since: dict[int, float] = {}
        """When guests were first preempted for each job that waits."""

    def begin(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def started(self, job: SimulatedJob) -> None:
        self.count.starts += is_ours(job)
        since = self._since.pop(job.job_id, None)
        if since is not None:
            self.count.served += 1
            beyond_s = self._cluster.timeline.now - since - grace_of(self._cluster)
            self.count.longest_s = max(self.count.longest_s, beyond_s)

    def preempted(self, job: SimulatedJob, mode: PreemptMode, winner: int) -> None:
        if not is_ours(job):
            return
        back = "requeued into a hold" if job.held_by else "requeued"
        self.count.ends["cancelled" if mode != "requeue" else back if job.request.requeue else "lost"] += 1
        if winner and self._cluster.jobs[winner].array is None:
            self.count.taken_for += 1
            self._since.setdefault(winner, self._cluster.timeline.now)

    def exited(self, job: SimulatedJob) -> None:
        """A guest has ended with an exit code after which jobs wait again."""
        if is_ours(job) and job.pending:
            self.count.ends["requeued for its exit code"] += 1


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
        return grace_of(self._cluster) + conf.kill_wait_s + settings.backfill_s + 2 * settings.schedule_s

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
        if not any(GUEST in (job.qos, job.partition) for job in cluster.records.known.values() if job.gpus):
            return 0
        running = cluster.running()
        guests = [one for one in running if GUEST in (one.of.qos, one.partition)]
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

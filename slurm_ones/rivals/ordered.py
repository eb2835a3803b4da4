"""Policies that only order jobs, each with the GPUs and batch that its user asked for: FIFO, SRTF, SRSF, EDF and
Tiresias."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import reason
from slurm_ones.policy.build import allocate_in_order, fits_nowhere, fixed_jobs
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.policy.ledger import Ledger
from slurm_ones.policy.shapes import nodes_of
from slurm_ones.policy.tables import LONGEST, predict, requested_allocation, to_come, within


@dataclass(frozen=True)
class FifoOptions:
    """Options of FIFO."""

    backfill: bool = True
    """True if later jobs may start while an earlier job waits for more GPUs."""


class Fifo:
    """First in, first out, with or without backfill, as Slurm schedules rigid jobs; no running job is ever stopped.

    Backfill is that of Slurm's `sched/backfill` for jobs without time limits: a later job starts as soon as it fits,
    and nothing is reserved for the first job in the queue. GPUs are well used, but large jobs wait long.
    """

    name = "fifo"
    options_type = FifoOptions

    def __init__(self, options: FifoOptions = FifoOptions()) -> None:
        self.options = options

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        fixed = fixed_jobs(cluster, jobs)
        allocations, reasons, parked = {}, {}, set()
        for job in jobs:
            if job.shape is not None:
                allocations[job.job_id] = Allocation(job.shape, job.batch)
                reasons[job.job_id] = fixed.get(job.job_id) or reason("never_interrupted")
        ledger = Ledger.of_cluster(cluster, [job for job in jobs if job.shape is not None])
        blocked = False
        for job in sorted((j for j in jobs if j.shape is None), key=lambda j: (j.submitted, j.job_id)):
            if job.job_id in fixed:
                reasons[job.job_id] = fixed[job.job_id]
                continue
            wanted = requested_allocation(cluster, job)
            if wanted is not None and not blocked and ledger.take(wanted.shape):
                allocations[job.job_id] = wanted
                reasons[job.job_id] = reason("turn", first="jobs submitted earlier")
                continue
            parked.add(job.job_id)
            if wanted is None:
                reasons[job.job_id] = fits_nowhere(job)
            else:
                reasons[job.job_id] = reason("no_room", gpus=wanted.shape.gpus)
                blocked = not self.options.backfill
        return Schedule(allocations, reasons, parked=frozenset(parked))


class Srtf:
    """Shortest remaining time first: an ideal, since it needs the true remaining times.

    It minimises the mean completion time on one machine (Schrage, Operations Research 16, 1968). Tiresias (NSDI 2019)
    was compared with it and with `Srsf`. A simulator provides the true remaining time. On a real cluster it is
    predicted from the job's progress and speed.
    """

    name = "srtf"
    first = "jobs that end soonest"

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        rank = {job.job_id: self._key(cluster, job) for job in jobs}
        # Of equal jobs the running one comes first.
        order = sorted(jobs, key=lambda job: (rank[job.job_id], job.shape is None, job.submitted, job.job_id))
        return allocate_in_order(cluster, jobs, order, self.first)

    def _key(self, cluster: ClusterView, job: JobView) -> float:
        wanted = requested_allocation(cluster, job)
        return LONGEST if wanted is None else self._weigh(wanted, remaining_seconds(cluster, job, wanted))

    def _weigh(self, wanted: Allocation, seconds: float) -> float:
        return seconds


def remaining_seconds(cluster: ClusterView, job: JobView, asked: Allocation) -> float:
    """Return a job's remaining seconds with the requested allocation `asked`: the true number if a simulator provides
    it, else a prediction."""
    if not math.isnan(job.true_remaining_s):
        return min(max(job.true_remaining_s, 0.0), LONGEST)
    gpus = np.array([asked.shape.gpus])
    nodes = np.array([nodes_of(cluster, asked.shape.gpus)])
    goodput = float(predict(job, nodes, gpus, np.array([[asked.batch]]))[1][0, 0])
    return min(to_come(job) / goodput, LONGEST)


class Srsf(Srtf):
    """Shortest remaining service first: jobs in order of remaining time × GPUs."""

    name = "srsf"
    first = "jobs with the fewest remaining GPU-seconds"

    def _weigh(self, wanted: Allocation, seconds: float) -> float:
        return seconds * wanted.shape.gpus


class Edf(Srtf):
    """Earliest deadline first. Each job has the size that its user asked for, and jobs without a deadline come last, in
    order of submission.

    It is optimal on one machine (Liu and Layland, Journal of the ACM 20, 1973). It is the baseline for deadlines: it
    admits every job, never resizes, and promises no deadline.
    """

    name = "edf"
    first = "jobs with earlier deadlines"

    def _key(self, cluster: ClusterView, job: JobView) -> float:
        return LONGEST if job.deadline is None else within(job.deadline, -LONGEST, LONGEST)


@dataclass(frozen=True)
class TiresiasOptions:
    """Options of Tiresias."""

    thresholds: tuple[float, ...] = (16 * 3600.0,)
    """Attained service in GPU-seconds, ascending. At each threshold a job moves one queue down."""

    def __post_init__(self) -> None:
        found = self.thresholds
        if any(not math.isfinite(t) or t <= 0 for t in found) or list(found) != sorted(set(found)):
            raise ValueError(f"thresholds must be positive and ascending, not {found}")


class Tiresias:
    """Tiresias: discretised two-dimensional least attained service (Gu et al., NSDI 2019, §3.2-3.3).

    The policy does not know how long a job will run. A job's attained service is its requested GPUs times the seconds
    that it has run. At each threshold of service the job moves one queue down. Higher queues are served first, each in
    order of submission. Running jobs of lower queues are stopped for jobs of higher ones.

    The settings are those of Pollux's study (OSDI 2021, §5 and its public simulator): two queues, a threshold of 16
    GPU-hours, and no promotion of starved jobs (PROMOTEKNOB off). In that simulator the lower queue is in the order in
    which jobs moved down; here every queue is in order of submission. Placement by a profile of the model is left out,
    since Slurm places jobs.
    """

    name = "tiresias"
    options_type = TiresiasOptions

    def __init__(self, options: TiresiasOptions = TiresiasOptions()) -> None:
        self.options = options

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        order = sorted(jobs, key=lambda job: (self.queue(job), job.submitted, job.job_id))
        return allocate_in_order(cluster, jobs, order, "jobs with the fewest GPU-seconds so far")

    def queue(self, job: JobView) -> int:
        """Return the number of the job's queue. Queue 0 is served first."""
        service = job.running_s * max(job.requested, 1)
        return bisect_right(self.options.thresholds, service) if math.isfinite(service) else 0

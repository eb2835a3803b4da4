"""Shortest remaining time first, and shortest remaining service first: what could be had if the future were known.

The classical optimum for the mean completion time on one machine (Schrage, Operations Research 16, 1968), and its
form for jobs of several GPUs, ordered by remaining time × GPUs: Tiresias (NSDI 2019) calls them SRTF and SRSF and is
held against them. Each job runs at the size and batch it asked for. A simulator tells them the true remaining time;
on a real cluster nobody does, and they go by the job's predicted progress and speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.allocate import serve
from slurm_ones.decide.remaining import LONGEST, remaining_seconds
from slurm_ones.schedule.policy import Allocation, ClusterView, JobView, Schedule
from slurm_ones.schedule.tables import asked


@dataclass(frozen=True)
class Options:
    """Nothing can be set."""


class Srtf:
    """Pre-empts for jobs that will end sooner; those that do not fit are passed over."""

    name = "srtf"

    options_type = Options

    first = "jobs that end soonest"

    def __init__(self, options: Options = Options()) -> None:
        self.options = options

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.schedule.policy.Policy`."""
        rank = {job.job_id: self._key(cluster, job) for job in jobs}
        # Of equal jobs the one that runs goes on.
        order = sorted(jobs, key=lambda job: (rank[job.job_id], job.shape is None, job.submitted, job.job_id))
        return serve(cluster, jobs, order, self.first)

    def _key(self, cluster: ClusterView, job: JobView) -> float:
        wanted = asked(cluster, job)
        return LONGEST if wanted is None else self._weigh(wanted, remaining_seconds(cluster, job, wanted))

    def _weigh(self, wanted: Allocation, seconds: float) -> float:
        return seconds


class Srsf(Srtf):
    """The same by remaining GPU-seconds."""

    name = "srsf"

    first = "jobs with the fewest GPU-seconds to come"

    def _weigh(self, wanted: Allocation, seconds: float) -> float:
        return seconds * wanted.shape.gpus

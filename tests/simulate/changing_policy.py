"""Policies that do what no good one would, for tests of what carries them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_ones.policy.build import place
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.policy.shapes import least_and_most


class ChangingPolicy:
    """Another size and batch for every job at each decision; those that find no room are parked."""

    name = "changing"

    def __init__(self, *, parks: bool = True) -> None:
        self._parks = parks
        self._round = 0

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `policy.contract.Policy`."""
        self._round += 1
        order = sorted(jobs, key=lambda job: (job.job_id + self._round) % 7) if self._parks else jobs
        found = place(cluster, order, {job.job_id: self._size(job) for job in jobs})
        allocations = {}
        for job in jobs:
            if job.job_id in found:
                shape = found[job.job_id]
                least, most = least_and_most(job.limits, shape.gpus)
                batch = job.batch if job.fixed else min(max(least * (1 + self._round % 3), least), most)
                allocations[job.job_id] = Allocation(shape, batch)
            elif job.shape is not None and (job.fixed or not self._parks):
                allocations[job.job_id] = Allocation(job.shape, job.batch)
        parked = {job.job_id for job in jobs if job.job_id not in allocations and not job.fixed}
        return Schedule(allocations, parked=frozenset(parked if self._parks else ()))

    def _size(self, job: JobView) -> int:
        sizes = [n for n in job.limits.gpus if n <= 8]
        return sizes[(self._round + job.job_id) % len(sizes)] if sizes else job.limits.gpus[0]

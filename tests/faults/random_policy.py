"""A policy that gives a companion the most to do, and one that stops it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slurm_ones.policy.build import fixed_jobs, place
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Policy, Schedule
from slurm_ones.policy.shapes import least_and_most


class RandomPolicy:
    """Any valid schedule, at random: another size and batch for most jobs at each decision, and some parked."""

    name = "random"

    def __init__(self, *, modest: bool = False) -> None:
        """`modest`: no job gets more than an equal share, and none is parked, so that there is room for changes."""
        self._modest = modest

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.policy.contract.Policy`."""
        stays = fixed_jobs(cluster, jobs)
        order = [jobs[i] for i in rng.permutation(len(jobs))]
        most = max(cluster.gpus // max(len(jobs), 1), 1) if self._modest else cluster.gpus
        wanted = {job.job_id: self._size(job, job.job_id in stays, most, rng) for job in order}
        found = place(cluster, order, wanted)
        allocations, parked = {}, set()
        for job in jobs:
            if job.job_id in stays:
                if job.shape is not None:
                    allocations[job.job_id] = Allocation(job.shape, job.batch)
            elif job.job_id in found:
                shape = found[job.job_id]
                least, most = least_and_most(job.limits, shape.gpus)
                batch = job.batch if rng.random() < 0.5 else int(least + rng.random() * (most - least))
                allocations[job.job_id] = Allocation(shape, min(max(batch, least), max(most, least)))
            elif job.shape is not None or rng.random() < 0.5:
                parked.add(job.job_id)
        return Schedule(allocations, parked=frozenset(parked))

    def _size(self, job: JobView, stays: bool, most: int, rng: np.random.Generator) -> int:
        """GPUs that it shall have: what it has where it stays, 0 to be parked."""
        if stays or (job.shape is not None and rng.random() < 0.3):
            return job.shape.gpus if job.shape is not None else 0
        sizes = [gpus for gpus in job.limits.gpus if gpus <= most] or job.limits.gpus[:1]
        return int(rng.choice(sizes)) if sizes and (self._modest or rng.random() < 0.9) else 0


class QuietPolicy:
    """Another policy until it is to be quiet; then every job keeps what it has, and none is parked."""

    def __init__(self, policy: Policy, quiet: Callable[[], bool]) -> None:
        self.name = policy.name
        self._policy = policy
        self._quiet = quiet

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.policy.contract.Policy`."""
        if not self._quiet():
            return self._policy.decide(cluster, jobs, now, rng)
        return Schedule({job.job_id: Allocation(job.shape, job.batch) for job in jobs if job.shape is not None})

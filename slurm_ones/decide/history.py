"""What policies that explore sizes step by step remember of a job: the most GPUs and the GPU-seconds it has had."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slurm_ones.schedule.policy import ClusterView, JobView
from slurm_ones.schedule.shapes import shape_of


class History:
    """Kept from decision to decision, by job id."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        self._service: dict[int, float] = {}
        self._seen: dict[int, tuple[float, int]] = {}
        """Running seconds and GPUs at the last look."""

    def update(self, jobs: Sequence[JobView]) -> None:
        """Note what the jobs hold; jobs that are gone are forgotten."""
        self._most = {job.job_id: max(self._most.get(job.job_id, 0), _gpus(job)) for job in jobs}
        service, seen = {}, {}
        for job in jobs:
            running = job.running_s if math.isfinite(job.running_s) else 0.0
            before, gpus = self._seen.get(job.job_id, (0.0, _gpus(job)))
            service[job.job_id] = self._service.get(job.job_id, 0.0) + max(running - before, 0.0) * gpus
            seen[job.job_id] = (running, _gpus(job))
        self._service, self._seen = service, seen

    def bound(self, job: JobView) -> int:
        """Most GPUs it may have now: twice the most so far, one at first.

        Pollux (OSDI 2021 §4.1, prior-driven exploration) and Sia (SOSP 2023 §3.4) grow jobs this way.
        """
        return max(2 * self._most.get(job.job_id, 0), 1)

    def service(self, job: JobView) -> float:
        """GPU-seconds used so far."""
        return self._service.get(job.job_id, 0.0)


def _gpus(job: JobView) -> int:
    return job.shape.gpus if job.shape else 0


def bounded(cluster: ClusterView, job: JobView, bound: int) -> tuple[int, ...]:
    """Its sizes on this cluster up to the bound, the smallest at least."""
    sizes = sorted(job.limits.gpus)
    within = tuple(n for n in sizes if n <= bound and shape_of(cluster, n) is not None)
    return within or tuple(n for n in sizes if shape_of(cluster, n) is not None)[:1]


def restart_factor(job: JobView, now: float) -> float:
    """(T - R·S) / (T + S): what a further re-allocation leaves of its speed, T its age, R its re-allocations so far, S
    the seconds that one costs (Pollux §4.2.2, Sia §3.4)."""
    age = max(now - job.submitted, 0.0) if math.isfinite(now - job.submitted) else 0.0
    cost = max(job.resize_s, 0.0) if math.isfinite(job.resize_s) else 0.0
    return max(age - job.resizes * cost, 0.0) / (age + cost) if age + cost > 0 else 1.0

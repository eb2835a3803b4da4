"""Figures that policies share: remaining work, gains, GPUs explored, restarts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, JobView
from slurm_ones.policy.shapes import shape_of

LONGEST = 1e12
"""Seconds beyond which jobs count as equally long."""


def to_come(job: JobView) -> float:
    """Progress still to come, in samples of the base batch: positive and finite whatever the job reports."""
    beta = job.progress.beta
    return min(max(beta, 1e-3), 1e9) * max(job.dataset, 1) if math.isfinite(beta) else 1e9 * max(job.dataset, 1)


def within(value: float, low: float, high: float) -> float:
    """The value between the bounds; the lower one if it is no number."""
    return min(max(value, low), high) if value == value else low


def expected_gain(job: JobView | None, new: Shape, batch: int | None, kind: str = "") -> float | None:
    """Useful samples/s at the shape and global batch (None: the one in force), over those now. They are on that kind of
    GPU (empty: the one that it has), by what the policy was shown of the job. None if it waits, or that is no finite
    number.
    """
    if job is None or job.shape is None or not new.gpus:
        return None
    before = _useful(job, job.shape, job.batch)
    there = replace(job, model=job.on.get(kind, job.model))
    gain = _useful(there, new, job.batch if batch is None else batch) / before if before > 0 else math.nan
    return gain if math.isfinite(gain) and gain >= 0 else None


def _useful(job: JobView, shape: Shape, batch: int) -> float:
    # No GPU takes more than this: the job lowers such a batch by itself.
    batches = np.array([min(batch, job.limits.at(shape.gpus).most or batch)])
    speed = job.model.throughput(np.array([shape.nodes]), np.array([shape.gpus]), batches)
    return float(speed[0] * job.efficiency.efficiency(batches)[0])


class History:
    """Most GPUs and GPU-seconds that each job has had, by id: memory of policies that explore sizes step by step."""

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
    """Return the job's view with sizes up to the bound, the smallest at least."""
    sizes = sorted(job.limits.gpus)
    within = tuple(n for n in sizes if n <= bound and shape_of(cluster, n) is not None)
    return within or tuple(n for n in sizes if shape_of(cluster, n) is not None)[:1]


def restart_factor(job: JobView, now: float) -> float:
    """(T - R·S) / (T + S): factor of a further re-allocation on its speed. T is its age, R its re-allocations so far, S
    the seconds that one costs (Pollux §4.2.2, Sia §3.4)."""
    age = max(now - job.submitted, 0.0) if math.isfinite(now - job.submitted) else 0.0
    cost = max(job.resize_s, 0.0) if math.isfinite(job.resize_s) else 0.0
    return max(age - job.resizes * cost, 0.0) / (age + cost) if age + cost > 0 else 1.0

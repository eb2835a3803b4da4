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
"""Limit on remaining times in seconds: jobs with longer ones count as equally long."""


def to_come(job: JobView) -> float:
    """Return the remaining progress in samples of the base batch; positive and finite for any report."""
    beta = job.progress.beta
    return min(max(beta, 1e-3), 1e9) * max(job.dataset, 1) if math.isfinite(beta) else 1e9 * max(job.dataset, 1)


def within(value: float, low: float, high: float) -> float:
    """Return the value clamped to the bounds; the lower bound for NaN."""
    return min(max(value, low), high) if value == value else low


def expected_gain(job: JobView | None, new: Shape, batch: int | None, kind: str = "") -> float | None:
    """Return the ratio of the job's goodput at the new shape to its current goodput. `batch` None means the current
    global batch, an empty `kind` the current kind of GPU. None if the job waits or the ratio is not finite."""
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
    """Largest GPU count and GPU-seconds of each job by id: memory of policies that explore step by step."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        self._service: dict[int, float] = {}
        self._seen: dict[int, tuple[float, int]] = {}
        """Running seconds and GPUs at the last update, by job id."""

    def update(self, jobs: Sequence[JobView]) -> None:
        """Record the GPUs that the jobs hold, and forget jobs that are gone."""
        self._most = {job.job_id: max(self._most.get(job.job_id, 0), _gpus(job)) for job in jobs}
        service, seen = {}, {}
        for job in jobs:
            running = job.running_s if math.isfinite(job.running_s) else 0.0
            before, gpus = self._seen.get(job.job_id, (0.0, _gpus(job)))
            service[job.job_id] = self._service.get(job.job_id, 0.0) + max(running - before, 0.0) * gpus
            seen[job.job_id] = (running, _gpus(job))
        self._service, self._seen = service, seen

    def bound(self, job: JobView) -> int:
        """Return the most GPUs that the job may have now: twice its largest count so far, 1 at first.

        Pollux (OSDI 2021 §4.1, prior-driven exploration) and Sia (SOSP 2023 §3.4) grow jobs this way.
        """
        return max(2 * self._most.get(job.job_id, 0), 1)

    def service(self, job: JobView) -> float:
        """Return the GPU-seconds that the job has used so far."""
        return self._service.get(job.job_id, 0.0)


def _gpus(job: JobView) -> int:
    return job.shape.gpus if job.shape else 0


def bounded(cluster: ClusterView, job: JobView, bound: int) -> tuple[int, ...]:
    """Return the job's sizes up to `bound` that have a shape; at least the smallest such size."""
    sizes = sorted(job.limits.gpus)
    within = tuple(n for n in sizes if n <= bound and shape_of(cluster, n) is not None)
    return within or tuple(n for n in sizes if shape_of(cluster, n) is not None)[:1]


def restart_factor(job: JobView, now: float) -> float:
    """Return the factor (T - R·S) / (T + S) on a job's speed if it is re-allocated again (Pollux §4.2.2, Sia §3.4). T
    is its age, R its re-allocations so far, S the seconds per re-allocation."""
    age = max(now - job.submitted, 0.0) if math.isfinite(now - job.submitted) else 0.0
    cost = max(job.resize_s, 0.0) if math.isfinite(job.resize_s) else 0.0
    return max(age - job.resizes * cost, 0.0) / (age + cost) if age + cost > 0 else 1.0

"""R, the most GPUs that a job may have now (ONES §3.3): jobs earn larger sizes by running at the ones they have.

Where sizes are those that Slurm can be asked for, a new job's first limit is its smallest one if that is not the
paper's 1 GPU, and doubling goes at least to the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.policy import Ints, JobView


class SizeLimits:
    """The limits of all jobs, remembered between decisions by job id."""

    def __init__(self, epochs_before_doubling: int, cap_over_request: float) -> None:
        self.epochs_before_doubling = epochs_before_doubling
        self.cap_over_request = cap_over_request
        self._remembered: dict[int, int] = {}

    def update(self, space: Space, jobs: Sequence[JobView]) -> Ints:
        """(J,) today's limit of each job of the space; `jobs` are all jobs, the pinned ones included."""
        total = space.cluster.gpus
        limit = np.array([self._limit(space, j, total) for j in range(len(space.jobs))], dtype=np.int64)
        self._scale_down(space, limit, jobs, total)
        present = {job.job_id for job in jobs}
        self._remembered = {i: n for i, n in self._remembered.items() if i in present}
        self._remembered.update(zip((job.job_id for job in space.jobs), limit.tolist(), strict=True))
        return limit

    def passed_over(self, space: Space, left_out: Collection[int]) -> None:
        """Halve the limit of each stopped job (run before, waiting now) that a schedule leaves out."""
        for j, job in enumerate(space.jobs):
            if job.job_id in left_out and stopped(job):
                self._remembered[job.job_id] = max(self._remembered[job.job_id] // 2, int(space.start[j]))

    def _limit(self, space: Space, j: int, total: int) -> int:
        job, current, start = space.jobs[j], int(space.current[j]), int(space.start[j])
        cap = int(min(total, max(self.cap_over_request * job.requested, start)))
        limit = max(self._remembered.get(job.job_id, 0), current, start)
        if current and current >= limit and job.epochs_since_change >= self.epochs_before_doubling:
            larger = space.tables.sizes[space.tables.allowed[j] & (space.tables.sizes > current)]
            limit = max(2 * current, int(larger[0]) if len(larger) else 0)
        return max(min(limit, cap), current if current else start)

    @staticmethod
    def _scale_down(space: Space, limit: Ints, jobs: Sequence[JobView], total: int) -> None:
        """Cut the largest job to int(2n/(T/median + 1)): it must hold half the cluster or more, and have run longer
        than the median."""
        if not space.running.any():
            return
        j = int(np.argmax(space.current))
        gpus, ran = int(space.current[j]), space.jobs[j].running_s
        median = float(np.median([job.running_s for job in jobs if job.shape is not None]))
        if 2 * gpus >= total and ran > median > 0.0:
            limit[j] = max(int(2 * gpus / (ran / median + 1.0)), int(space.start[j]))


def stopped(job: JobView) -> bool:
    """Whether the job has run and waits again."""
    return job.shape is None and (job.samples > 0 or job.running_s > 0)

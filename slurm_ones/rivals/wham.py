"""WHAM: each GPU goes to the job with the highest Whittle index (Li, Harchol-Balter, Berg, "Mean field optimal Core
Allocation across Malleable jobs", arXiv 2602.01411, 2026).

Our sources are the paper's abstract and summaries. In its model new jobs keep arriving, each with a concave speed s(k)
on k cores and a weight w, and allocations change at no cost. "Whittle Allocation for Malleable jobs" is optimal in the
mean-field limit, whatever the sizes of jobs.

We **derived** the index from Whittle's definition. A job pays w per second and λ per core-second, so a unit of its
progress on k cores costs (w + λ k) / s(k), whatever its remaining work. The index of the step from a to b cores is the
price λ at which a and b cost the same:

    λ = w (s(b) - s(a)) / (b s(a) - a s(b)),    for small steps  w s'(k) / (s(k) - k s'(k)).

The index falls along the concave hull of s. Giving out cores by this index solves the optimisation of BOA (arXiv
2602.01404, known from its abstract and summaries) for one job of each kind: minimise Σ w / s(k) with Σ k / s(k), the
mean number of cores in use, within a budget.

We also derived the order of steps with infinite index, which are every job's first step, and each step of a job of
linear speed. As with a discounted index, they are in descending order of w divided by the least GPU-seconds that the
job still needs. Here all weights are 1, steps that no longer fit are skipped, and a job's speed is its goodput at its
best batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import reason
from slurm_ones.policy.build import build_schedule, fixed_jobs, free_after_fixed, mobile_jobs
from slurm_ones.policy.contract import ClusterView, Floats, Ints, JobView, Schedule
from slurm_ones.policy.tables import Tables, build_tables, to_come


@dataclass(frozen=True)
class Step:
    """Step of a job to the next size on the concave hull of its speed."""

    index: float
    """Whittle index of the step: seconds of waiting saved per GPU-second. It is infinite for a first step, and for a
    job of linear speed."""
    job: int
    """Row of the job in the tables."""
    column: int
    gpus: int
    """Number of GPUs that the step adds."""


class Wham:
    """WHAM (arXiv 2602.01411): GPUs go to the jobs of highest Whittle index, as if new jobs kept arriving."""

    name = "wham"

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        fixed = fixed_jobs(cluster, jobs)
        mobile = mobile_jobs(jobs, fixed)
        tables = build_tables(cluster, mobile, "best")
        columns = allocate(tables, int(free_after_fixed(cluster, jobs, fixed).sum()))
        wanted = {job.job_id: int(tables.sizes[u]) for job, u in zip(mobile, columns, strict=True)}
        return build_schedule(cluster, jobs, fixed, tables, wanted, reason("highest_index"))


def allocate(tables: Tables, gpus: int) -> Ints:
    """Give out the GPUs in order of the index. Return the column (J,) of each job's size, 0 for no GPUs."""
    column: Ints = np.zeros(len(tables.jobs), dtype=np.int64)
    least = _least_gpu_seconds(tables)
    steps = [step for j in range(len(column)) for step in steps_of(j, tables.sizes, tables.goodput[j])]
    refused: set[int] = set()
    # The steps of a job stay in order: their index never rises, and the sort is stable.
    for step in sorted(steps, key=lambda step: (-step.index, least[step.job])):
        if step.gpus > gpus:
            refused.add(step.job)
        elif step.job not in refused:
            column[step.job] = step.column
            gpus -= step.gpus
    return column


def steps_of(job: int, sizes: Ints, goodput: Floats) -> list[Step]:
    """Return the steps of a job along the concave hull of its `goodput` (U,) over the `sizes` (U,), from 0 GPUs on."""
    found: list[Step] = []
    at, gpus, speed, last = 0, 0, 0.0, np.inf
    while True:
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(goodput > speed, (goodput - speed) / (sizes - gpus), -np.inf)
        slope[: at + 1] = -np.inf
        if not np.isfinite(slope).any():
            return found
        # Of several sizes on one line the smallest is taken.
        best = int((slope >= slope.max() * (1.0 - 1e-9)).argmax())
        then, faster = int(sizes[best]), float(goodput[best])
        lost = then * speed - gpus * faster
        # Rounding must not make the index rise.
        last = min(last, (faster - speed) / lost if lost > 1e-9 * then * speed else np.inf)
        found.append(Step(last, job, best, then - gpus))
        at, gpus, speed = best, then, faster


def _least_gpu_seconds(tables: Tables) -> Floats:
    with np.errstate(divide="ignore"):
        cost = np.where(tables.allowed, tables.sizes / np.where(tables.allowed, tables.goodput, 1.0), np.inf)
    work = np.array([to_come(job) for job in tables.jobs])
    least: Floats = cost.min(axis=1, initial=np.inf) * work
    return least

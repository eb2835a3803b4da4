"""Effective elastic scaling: chooses the sizes and batches with the largest total speed-up, by dynamic programming.

Saxena et al., "Effective Elastic Scaling of Deep Learning Workloads", MASCOTS 2020, arXiv 2006.13878. From the paper:

- At each number of GPUs a job uses its best batch. Its scaling factor is its rate at this number, divided by its rate
  on its smallest number of GPUs.
- The sum of scaling factors is maximised, and each admitted job gets at least its smallest number of GPUs. The dynamic
  program over jobs and GPUs is best(j, G) = max over k of best(j - 1, G - k) + factor(j, k).
- Running jobs are never stopped. A new job is admitted if the smallest numbers of all jobs fit together, otherwise it
  waits. All jobs are rescaled every `interval_s` seconds. In between, waiting jobs get free GPUs by the same program.

Differences: the paper assumes equal accuracy for all batches in the user's range, so its rate is the throughput. Here
the rate is the goodput, which accounts for the lower statistical efficiency of larger batches. With throughput the
policy would do worse. A job that keeps its size keeps its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import reason
from slurm_ones.policy.build import build_schedule, fixed_jobs, free_after_fixed
from slurm_ones.policy.contract import ClusterView, Floats, Ints, JobView, Schedule, check_options
from slurm_ones.policy.tables import Tables, build_tables

STICKINESS = 1e-9
"""Relative bonus on the scaling factor of a job's present size, so that the job keeps this size on a tie."""


@dataclass(frozen=True)
class EesOptions:
    """Options of effective elastic scaling."""

    interval_s: float = 0.0
    """Shortest time, in seconds, between two rescalings of running jobs; 0 rescales in every decision. The authors wait
    for minutes. With pauses of half a minute, 0 gives a better mean JCT."""

    def __post_init__(self) -> None:
        check_options(self, {}, {})


class Ees:
    """Effective elastic scaling. It remembers the time of the last rescaling."""

    name = "ees"
    options_type = EesOptions

    def __init__(self, options: EesOptions | None = None) -> None:
        self.options = options or EesOptions()
        self._rescaled: float | None = None

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        fixed = fixed_jobs(cluster, jobs)
        since = None if self._rescaled is None else now - self._rescaled
        if since is not None and 0 <= since < self.options.interval_s:
            unchanged = reason("between_changes", seconds=self.options.interval_s)
            fixed = {**{job.job_id: unchanged for job in jobs if job.shape is not None}, **fixed}
        else:
            self._rescaled = now
        mobile = sorted(
            (job for job in jobs if job.job_id not in fixed),
            key=lambda job: (job.shape is None, job.submitted, job.job_id),
        )
        tables = build_tables(cluster, mobile, "best")
        free = int(free_after_fixed(cluster, jobs, fixed).sum())
        columns, total = allot(tables.sizes, scaling_factors(tables), free)
        wanted = {job.job_id: int(tables.sizes[u]) for job, u in zip(mobile, columns, strict=True)}
        why = reason("best_total", total="the sum of all jobs' speed-ups")
        return build_schedule(cluster, jobs, fixed, tables, wanted, why, total)


def scaling_factors(tables: Tables) -> Floats:
    """Return the scaling factors (J, U): the goodput at each size divided by the goodput at the job's smallest size.
    They are -inf at sizes that are not allowed."""
    least = tables.goodput[np.arange(len(tables.jobs)), tables.allowed.argmax(axis=1)]
    factors = tables.goodput / np.where(least > 0, least, 1.0)[:, None]
    current = np.arange(len(tables.sizes)) == tables.current[:, None]
    return np.where(tables.allowed, factors * (1.0 + STICKINESS * current), -np.inf)


def allot(sizes: Ints, factors: Floats, free: int) -> tuple[Ints, float]:
    """Return the column (J,) of each job's size with the largest sum of factors, and this sum.

    `factors` (J, U) at the `sizes` (U,) are -inf at sizes that the job cannot have. Jobs are admitted in order. A job
    gets column 0 if its smallest size does not fit besides the smallest sizes of the jobs admitted before. The time is
    O(J·U·`free`).
    """
    columns = np.zeros(len(factors), dtype=np.int64)
    admitted, needed = [], 0
    for j, row in enumerate(factors):
        possible = np.flatnonzero(np.isfinite(row))
        if len(possible) and needed + int(sizes[possible[0]]) <= free:
            admitted.append((j, possible))
            needed += int(sizes[possible[0]])
    best = np.zeros(1)  # best[g] with exactly g GPUs in use
    steps = []
    for j, possible in admitted:
        top = min(len(best) - 1 + int(sizes[possible[-1]]), free)
        after, step = np.full(top + 1, -np.inf), np.zeros(top + 1, dtype=np.int16)
        for u in possible:
            low = int(sizes[u])
            until = min(len(best), top + 1 - low)
            if until <= 0:
                break
            there = after[low : low + until]
            with_it = best[:until] + factors[j, u]
            better = with_it > there
            there[better] = with_it[better]
            step[low : low + until][better] = u
        best = after
        steps.append(step)
    left = int(best.argmax())
    total = float(best[left])
    for (j, _), step in zip(reversed(admitted), reversed(steps), strict=True):
        columns[j] = step[left]
        left -= int(sizes[columns[j]])
    return columns, total

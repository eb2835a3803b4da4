"""One decision of Pollux as arrays, and what a candidate is worth.

J jobs in order of attained service, N nodes, K candidates, U sizes. Allocation matrices are kept sparse: of every row
(a job's GPUs on each node) only the nodes it uses. K candidates of J jobs make K · J rows; row k · J + j is job j's in
candidate k. A cluster of N nodes has so few of the J · N elements in use that a generation costs as many steps as the
cluster has GPUs, not GPUs × jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slurm_ones.decide.build import free_after_fixed
from slurm_ones.decide.job_figures import History, bounded, restart_factor
from slurm_ones.schedule.ledger import held_gpus
from slurm_ones.schedule.policy import Bools, ClusterView, Floats, Ints, JobView
from slurm_ones.schedule.tables import Tables, batch_options, build_tables, predict

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


@dataclass(frozen=True)
class Rows:
    """R rows of E elements in all, nodes ascending within a row."""

    starts: Ints
    """(R + 1,) where each row's elements begin."""
    node: Ints
    """(E,)"""
    gpus: Ints
    """(E,) above 0."""

    @cached_property
    def counts(self) -> Ints:
        """(R,) nodes that each row uses."""
        return self.starts[1:] - self.starts[:-1]

    @cached_property
    def row(self) -> Ints:
        """(E,) the row of each element."""
        return np.repeat(np.arange(len(self.starts) - 1), self.counts)

    @cached_property
    def totals(self) -> Ints:
        """(R,) GPUs of each row."""
        sums = running_sum(self.gpus)[self.starts]
        return sums[1:] - sums[:-1]

    def take(self, rows: Ints) -> Rows:
        """The given rows, in that order."""
        counts = self.counts[rows]
        starts = running_sum(counts)
        at = np.repeat(self.starts[rows] - starts[:-1], counts) + np.arange(starts[-1])
        return Rows(starts, self.node[at], self.gpus[at])

    def over(self, other: Rows) -> Rows:
        """These rows, then the other's."""
        return Rows(
            np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]),
            np.concatenate([self.node, other.node]),
            np.concatenate([self.gpus, other.gpus]),
        )

    def among(self, place: Ints, row: Ints, node: Ints, gpus: Ints) -> Rows:
        """These and further elements (F,), ascending by row and node, each before the element at its `place`."""
        new = place + np.arange(len(place))
        old = np.ones(len(self.node) + len(place), dtype=np.bool_)
        old[new] = False
        nodes, amounts = np.empty(len(old), dtype=np.int64), np.empty(len(old), dtype=np.int64)
        nodes[new], amounts[new] = node, gpus
        nodes[old], amounts[old] = self.node, self.gpus
        return Rows(self.starts + running_sum(np.bincount(row, minlength=len(self.starts) - 1)), nodes, amounts)

    def holding(self, gpus: Ints) -> Rows:
        """The same elements with other GPUs (E,); those of 0 are gone."""
        kept = gpus > 0
        if kept.all():
            return Rows(self.starts, self.node, gpus)
        return Rows(running_sum(kept)[self.starts], self.node[kept], gpus[kept])

    @cached_property
    def digest(self) -> npt.NDArray[np.uint64]:
        """(R,) a number for each row, equal for equal rows and for practically no others."""
        mixed = (self.node.astype(np.uint64) << np.uint64(24)) + self.gpus.astype(np.uint64)
        for factor in _MIX:
            mixed = (mixed ^ (mixed >> np.uint64(29))) * factor
        sums = np.zeros(len(mixed) + 1, dtype=np.uint64)
        np.cumsum(mixed, out=sums[1:])
        sums = sums[self.starts]
        return sums[1:] - sums[:-1]


def running_sum(values: npt.NDArray[np.integer[Any] | np.bool_]) -> Ints:
    """(V + 1,) the sum of all values before each place."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def make_rows(count: int, row: Ints, node: Ints, gpus: Ints) -> Rows:
    """`count` rows from elements in any order, no two at one place."""
    width = int(node.max(initial=0)) + 1
    order = np.argsort(row * width + node)
    starts = running_sum(np.bincount(row, minlength=count))
    return Rows(starts, node[order], gpus[order]).holding(gpus[order])


def cap_groups(group: Ints, gpus: Ints, limit: Ints) -> Ints:
    """(E,) what is left of the GPUs when each group takes no more than its `limit`, first come first served.

    Elements of one group lie side by side; `limit` is per element.
    """
    if not len(group):
        return gpus
    before = np.cumsum(gpus) - gpus
    later = np.where(group[1:] != group[:-1], before[1:], 0)
    before[1:] -= np.maximum.accumulate(later)
    return np.minimum(np.maximum(limit - before, 0), gpus)


LEAST_SPEEDUP = 1e-3
"""Added to every speed-up, so that one job without GPUs does not make the power mean 0."""


@dataclass(frozen=True)
class Problem:
    """The jobs that may change, the GPUs left for them, and the speed-up of each job at each size."""

    cluster: ClusterView
    tables: Tables
    """Of the jobs, their limits cut to the sizes they may have now."""
    capacity: Ints
    """(N,) GPUs that fixed jobs leave."""
    crossed: Bools
    """(N,) nodes that a fixed job of several nodes uses: no other such job goes there."""
    home: Rows
    """(J rows) what each job holds now."""
    held: Ints
    """(J,) GPUs in it."""
    snap: Ints
    """(J, G + 1) the largest size up to each number of GPUs that the job may have, else 0."""
    column: Ints
    """(G + 1,) column of a size in the tables; only those of sizes mean anything."""
    together: Floats
    apart: Floats
    """(J, U) speed-up over the fair share on as few nodes as possible, and on several."""
    factor: Floats
    """(J,) what a re-allocation leaves of the speed-up: (T - R·δ) / (T + δ)."""
    power: float
    """Exponent of the mean over jobs."""

    @property
    def jobs(self) -> tuple[JobView, ...]:
        return self.tables.jobs

    def evaluate(self, rows: Rows) -> tuple[Floats, Floats]:
        """Fitness and use of the cluster (K,) of candidates (K · J rows), both better the larger.

        Fitness: the power mean over jobs of speed-ups, each times its factor where the job changes (§4.2.1 and 4.2.2).
        Use: speed-ups over the GPUs of the nodes in use (§4.2.3 uses it to size a cloud; here it keeps candidates
        various, as in the authors' search).
        """
        jobs = len(self.jobs)
        column = self.column[rows.totals].reshape(-1, jobs)
        several = (rows.counts > 1).reshape(-1, jobs)
        at = np.arange(jobs)
        speedup = np.where(several, self.apart[at, column], self.together[at, column])
        changed = rows.digest.reshape(-1, jobs) != self.home.digest
        damped = np.where(changed, speedup * self.factor, speedup) + LEAST_SPEEDUP
        fitness = np.mean(damped**self.power, axis=1) ** (1.0 / self.power)
        return fitness, speedup.sum(axis=1) / np.maximum(self._in_use(rows, len(column)), 1)

    def _in_use(self, rows: Rows, candidates: int) -> Ints:
        """(K,) GPUs of the nodes that a candidate uses."""
        used = np.zeros(candidates * len(self.capacity), dtype=np.bool_)
        used[rows.row // len(self.jobs) * len(self.capacity) + rows.node] = True
        total: Ints = used.reshape(candidates, -1) @ self.capacity
        return total


def build(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    fixed: Collection[int],
    history: History,
    now: float,
    power: float,
) -> Problem:
    """The problem of one decision; jobs named in `fixed` keep what they have."""
    mobile = sorted(
        (job for job in jobs if job.job_id not in fixed),
        key=lambda job: (history.service(job), job.submitted, job.job_id),
    )
    capacity = free_after_fixed(cluster, jobs, fixed)
    spread = {name for job in jobs if job.job_id in fixed and len(job.nodes) > 1 for name in job.nodes}
    crossed = np.array([node.name in spread for node in cluster.nodes], dtype=np.bool_)
    home = make_rows(len(mobile), *held_gpus(cluster, mobile).T)

    fair = -(-cluster.gpus // max(len(jobs), 1))
    bounds = [bounded(cluster, job, history.bound(job)) for job in mobile]
    wider = [replace(job, limits=replace(job.limits, gpus=_with(job, bounds[j], fair))) for j, job in enumerate(mobile)]
    tables = build_tables(cluster, wider, "best")
    most = max(int(tables.sizes[-1]), cluster.gpus_per_node * len(capacity), int(home.totals.max(initial=0)))
    column = np.zeros(most + 1, dtype=np.int64)
    column[tables.sizes] = np.arange(len(tables.sizes))
    explored = tables.sizes <= np.array([max(found, default=0) for found in bounds]).reshape(-1, 1)
    allowed = tables.allowed & (explored | (tables.sizes == home.totals[:, None]))
    sizes = np.zeros((len(mobile), most + 1), dtype=np.int64)
    sizes[:, tables.sizes] = np.where(allowed, tables.sizes, 0)
    base = _fair_goodput(tables, fair)[:, None] * cluster.gpus_per_node
    limited = tuple(replace(job, limits=replace(job.limits, gpus=bounds[j])) for j, job in enumerate(mobile))
    return Problem(
        cluster=cluster,
        tables=replace(tables, jobs=limited, allowed=allowed),
        capacity=capacity,
        crossed=crossed,
        home=home,
        held=home.totals,
        snap=np.maximum.accumulate(sizes, axis=1),
        column=column,
        together=tables.goodput / base,
        apart=_goodput_apart(cluster, tables) / base,
        factor=np.array([restart_factor(job, now) for job in mobile]),
        power=power,
    )


def _with(job: JobView, sizes: tuple[int, ...], fair: int) -> tuple[int, ...]:
    """The sizes and that of its fair share."""
    below = [n for n in job.limits.gpus if n <= fair]
    return tuple(sorted({*sizes, *([max(below)] if below else [])}))


def _fair_goodput(tables: Tables, fair: int) -> Floats:
    """(J,) goodput at the largest size within the fair share, else at the smallest."""
    share = np.where(tables.allowed & (tables.sizes <= fair), tables.sizes, 0).argmax(axis=1)
    column = np.where(share > 0, share, tables.allowed.argmax(axis=1))
    found = tables.goodput[np.arange(len(column)), column]
    result: Floats = np.where(found > 0, found, 1.0)
    return result


def _goodput_apart(cluster: ClusterView, tables: Tables) -> Floats:
    """(J, U) goodput where a job that one node could take is spread over two; elsewhere as in the tables."""
    apart: Floats = tables.goodput.copy()
    if cluster.uniform:
        return apart
    for j, job in enumerate(tables.jobs):
        at = np.flatnonzero(tables.allowed[j] & (tables.sizes > 1) & (tables.sizes <= cluster.gpus_per_node))
        if len(at):
            gpus = tables.sizes[at]
            apart[j, at] = predict(job, np.full_like(gpus, 2), gpus, batch_options(job, gpus, "best"))[1].max(axis=1)
    return apart

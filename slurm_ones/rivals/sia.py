"""Sia: an integer program chooses a configuration for each job by goodput.

Jayaram Subramanya et al., "Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling", SOSP 2023. From the
paper:

- A configuration is a number of GPUs: a power of two on one node, or a number of whole nodes (§3.3).
- A job's goodputs are divided by its smallest goodput. For a running job with T ≥ S, the goodput of a configuration
  other than the present one is multiplied by (T - R·S) / (T + S) (§3.4). T is the job's age, R the number of its
  restarts, S the seconds of one restart.
- The program chooses at most one configuration for each job, within the cluster's GPUs. For p < 0 it minimises the sum
  of goodput^p over the chosen configurations, plus λ for each job without one (§3.4). p = -0.5, λ = 1.1 and the gap of
  1e-4 are the authors' values.
- A job starts on one GPU, and gets at most twice the largest number of GPUs that it has had (§3.4).
- With several kinds of GPU, a configuration is a kind and a number of GPUs of this kind (§3.3).

Differences because of Slurm: a job that keeps its size keeps its nodes, so a solution of the program may not fit on the
nodes. A job that was to grow then stays as it is, and a job that was to start gets fewer GPUs. The number of whole
nodes is a second constraint, since rigid jobs may hold parts of nodes. The solver is HiGHS, not CBC. If a job's limits
allow none of these configurations, its own sizes are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy

from ones_db.reasons import Reason, reason
from slurm_ones.policy.build import build_by_kind, fixed_jobs, mobile_jobs
from slurm_ones.policy.contract import ClusterView, Floats, Ints, JobView, Schedule, check_options
from slurm_ones.policy.ledger import free_by_node
from slurm_ones.policy.tables import History, Tables, bounded, build_tables, restart_factor, side_by_side

SCALE = 1000.0
"""Factor on the costs in the program. With it, HiGHS repeats fewer solves."""
LARGEST_COST = 3000.0
"""Largest cost of a configuration in the program; the authors' value."""
TOTAL = "the sum of all jobs' goodputs, each raised to a power"
BEST = reason("best_total", total=TOTAL)


@dataclass(frozen=True)
class SiaOptions:
    """Settings of Sia; the defaults are the authors', except for `time_limit_s`."""

    power: float = -0.5
    """p, the exponent of the goodputs in the objective: the more negative, the fairer."""
    left_out: float = 1.1
    """λ, the cost of each job without GPUs."""
    gap: float = 1e-4
    """Relative gap to the optimum at which the solver stops."""
    time_limit_s: float = 20.0
    """Seconds after which the solver stops. Its best solution is used, and the jobs' reasons mention its gap."""

    def __post_init__(self) -> None:
        check_options(self, {"power": -100}, {})
        if not self.power < 0:
            raise ValueError(f"power: {self.power!r} must be a number from -100 to below 0")


class Sia:
    """Sia (SOSP 2023). It remembers the largest number of GPUs that each job has had."""

    name = "sia"
    options_type = SiaOptions

    def __init__(self, options: SiaOptions | None = None) -> None:
        self.options = options or SiaOptions()
        self._history = History()

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        self._history.update(jobs)
        fixed = fixed_jobs(cluster, jobs)
        mobile = mobile_jobs(jobs, fixed)
        parts, room, free = [], [], free_by_node(cluster, [job for job in jobs if job.job_id in fixed])
        for kind in cluster.kinds or ("",):
            part = cluster.of_kind(kind)
            views = cluster.views_on(kind, mobile)
            parts.append(build_tables(part, [_limited(part, job, self._history.bound(job)) for job in views], "best"))
            left = free[[node.kind == kind for node in cluster.nodes]] if cluster.nodes else free
            whole = int((left == part.gpus_per_node).sum()) if cluster.uniform else len(left)
            room.append(RoomOfKind(int(left.sum()), whole, part.gpus_per_node))
        tables = side_by_side(mobile, parts)
        solved = solve(tables, _costs(tables, now, self.options.power), room, self.options)
        chosen = zip(mobile, solved.column.tolist(), strict=True)
        wanted = {
            job.job_id: ((*cluster.kinds, "")[int(tables.kind[u])], int(tables.sizes[u])) for job, u in chosen if u
        }
        return build_by_kind(cluster, jobs, fixed, parts, wanted, solved.reason, solved.cost)


def _limited(cluster: ClusterView, job: JobView, bound: int) -> JobView:
    per_node = cluster.gpus_per_node
    sizes = tuple(
        n for n in job.limits.gpus if n > 0 and ((n & (n - 1) == 0 and n < per_node) or n % max(per_node, 1) == 0)
    )
    offered = replace(job, limits=replace(job.limits, gpus=sizes or job.limits.gpus)) if per_node else job
    return replace(offered, limits=replace(offered.limits, gpus=bounded(cluster, offered, bound)))


def _costs(tables: Tables, now: float, power: float) -> Floats:
    """Return the cost (J, U) of each allowed configuration in the program; infinite for all others."""
    costs = np.full(tables.allowed.shape, np.inf)
    for j, job in enumerate(tables.jobs):
        at = np.flatnonzero(tables.allowed[j])
        if not len(at):
            continue
        worth = tables.goodput[j, at] / tables.goodput[j, at].min()
        if job.shape is not None and now - job.submitted >= job.resize_s:
            worth = np.where(at == tables.current[j], worth, worth * restart_factor(job, now))
        with np.errstate(divide="ignore"):
            costs[j, at] = np.minimum(worth**power, LARGEST_COST)
    return costs


@dataclass(frozen=True)
class Solved:
    """Solution of the integer program."""

    column: Ints
    """(J,) column of each job's configuration; 0 for no GPUs."""
    cost: float
    reason: Reason = BEST
    """Reason that is shown for each job: its configuration is optimal, or nearly optimal, or no solution was found."""


class RoomOfKind(NamedTuple):
    """Free GPUs of one kind."""

    gpus: int
    whole: int
    """Number of nodes whose GPUs are all free."""
    per_node: int


def solve(tables: Tables, costs: Floats, room: Sequence[RoomOfKind], options: SiaOptions) -> Solved:
    """Return the configurations of least total cost that fit into the free GPUs of each kind."""
    needs, there = [], []
    for k, (gpus, whole, per_node) in enumerate(room):
        sizes = np.where(tables.kind == k, tables.sizes, 0)
        needs.append(sizes)
        there.append(gpus)
        if whole * per_node < gpus:  # otherwise the number of GPUs is constraint enough
            needs.append(np.where(sizes % per_node == 0, sizes // per_node, 0))
            there.append(whole)
    return _program(tables.current, costs, needs, there, options)


def _program(current: Ints, costs: Floats, needs: Sequence[Ints], there: Sequence[int], options: SiaOptions) -> Solved:
    """Solve the integer program: choose configurations of least total cost.

    `costs` are (J, U). Each array of `needs` (U,) is a constraint: its sum over chosen configurations is at most the
    value in `there`.
    """
    row, column = np.nonzero(np.isfinite(costs))
    jobs, count = len(costs), len(row)
    if not count:
        return Solved(np.zeros(jobs, dtype=np.int64), options.left_out * jobs)
    index = np.arange(count)
    one = scipy.sparse.csr_array((np.ones(count), (row, index)), shape=(jobs, count))
    total = scipy.sparse.csr_array(np.stack([need[column] for need in needs]).astype(np.float64))
    limit = scipy.optimize.LinearConstraint
    found = scipy.optimize.milp(
        (costs[row, column] - options.left_out) * SCALE,
        integrality=np.ones(count, dtype=np.int64),
        bounds=scipy.optimize.Bounds(0, 1),
        constraints=[limit(one, -np.inf, 1), limit(total, -np.inf, there)],
        options={"time_limit": options.time_limit_s, "mip_rel_gap": options.gap},
    )
    result = np.zeros(jobs, dtype=np.int64)
    if found.x is None:
        why = str(found.message).partition(" (")[0]
        return Solved(current, float("nan"), reason("no_solution", message=why))
    chosen = np.flatnonzero(found.x > 0.5)
    result[row[chosen]] = column[chosen]
    cost = float(found.fun) / SCALE + options.left_out * jobs
    if found.status == 0:
        return Solved(result, cost)
    return Solved(result, cost, reason("nearly_best_total", total=TOTAL, percent=100 * float(found.mip_gap)))

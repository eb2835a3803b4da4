"""Pollux: a genetic search for the sizes and batches with the highest goodput over all jobs.

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021. From the paper:

- Goodput = throughput × statistical efficiency, each job with its best batch (§3).
- The fitness is the power mean (p = -1) over jobs of the speed-up relative to the job's fair share (§4.2.1). The
  speed-up of a job that would be re-allocated is multiplied by (T - R·δ) / (T + δ): T is its age, R the number of its
  re-allocations so far, δ the seconds that one takes (§4.2.2).
- A node has at most one job that uses several nodes, because such jobs slow each other down (§4.2.2).
- A job gets at most twice the largest number of GPUs that it has had (§4.1), and one GPU at first.
- The search is over allocation matrices (jobs × nodes), with 100 candidates and 100 generations, starting from the last
  decision's population. A generation consists of tournament, one-point crossover over jobs, three mutations and repair.
- From the authors' public simulator, which gave the paper's results: probabilities, the order of jobs (least attained
  service first) and a second objective for diverse candidates (NSGA-II).

Differences because of Slurm:

- A job that keeps its size keeps its nodes, at no cost. In Pollux every change of nodes is a re-allocation. A schedule
  here has sizes only, and Slurm chooses the nodes.
- If a job must have equally many GPUs on each node, its size is a part of one node or whole nodes.
- A first start counts as a re-allocation, as in Pollux, so the start of a job of age 0 does not raise the fitness. Such
  jobs can start because, among candidates of equal fitness, the one that uses more of the cluster is chosen.
- The matrices are sparse (`Rows`), so a decision takes a fraction of the authors' 1.5 to 3 s.
- Throughput and efficiency come from the caller's models, not from Pollux's own fit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ones_db.reasons import reason
from slurm_ones.policy.build import build_schedule, fixed_jobs, free_after_fixed
from slurm_ones.policy.contract import Bools, ClusterView, Floats, Ints, JobView, Schedule, check_options
from slurm_ones.policy.ledger import held_gpus
from slurm_ones.policy.tables import History, Tables, batch_options, bounded, build_tables, predict, restart_factor

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


@dataclass(frozen=True)
class Rows:
    """Sparse matrix of the GPUs of R jobs (rows) on the nodes (columns). Its E elements, the numbers above 0, are
    ascending by row, then by node."""

    starts: Ints
    """(R + 1,) index of the first element of each row."""
    node: Ints
    """(E,) node of each element."""
    gpus: Ints
    """(E,) GPUs of each element, above 0."""

    @cached_property
    def counts(self) -> Ints:
        """(R,) number of nodes in each row."""
        return self.starts[1:] - self.starts[:-1]

    @cached_property
    def row(self) -> Ints:
        """(E,) row of each element."""
        return np.repeat(np.arange(len(self.starts) - 1), self.counts)

    @cached_property
    def totals(self) -> Ints:
        """(R,) total GPUs of each row."""
        sums = running_sum(self.gpus)[self.starts]
        return sums[1:] - sums[:-1]

    def take(self, rows: Ints) -> Rows:
        """Return the rows with these indices, in this order."""
        counts = self.counts[rows]
        starts = running_sum(counts)
        at = np.repeat(self.starts[rows] - starts[:-1], counts) + np.arange(starts[-1])
        return Rows(starts, self.node[at], self.gpus[at])

    def over(self, other: Rows) -> Rows:
        """Return these rows followed by the rows of `other`."""
        return Rows(
            np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]),
            np.concatenate([self.node, other.node]),
            np.concatenate([self.gpus, other.gpus]),
        )

    def among(self, place: Ints, row: Ints, node: Ints, gpus: Ints) -> Rows:
        """Return the matrix with F more elements, given by `row`, `node` and `gpus` (F,), ascending by row and node.
        New element i is inserted before the present element `place[i]`."""
        new = place + np.arange(len(place))
        old = np.ones(len(self.node) + len(place), dtype=np.bool_)
        old[new] = False
        nodes, amounts = np.empty(len(old), dtype=np.int64), np.empty(len(old), dtype=np.int64)
        nodes[new], amounts[new] = node, gpus
        nodes[old], amounts[old] = self.node, self.gpus
        return Rows(self.starts + running_sum(np.bincount(row, minlength=len(self.starts) - 1)), nodes, amounts)

    def holding(self, gpus: Ints) -> Rows:
        """Return the matrix with the values `gpus` (E,) in its E elements. Elements that are 0 now are removed."""
        kept = gpus > 0
        if kept.all():
            return Rows(self.starts, self.node, gpus)
        return Rows(running_sum(kept)[self.starts], self.node[kept], gpus[kept])

    @cached_property
    def digest(self) -> npt.NDArray[np.uint64]:
        """(R,) hash of each row. Equal rows have equal hashes, and different rows practically never do."""
        mixed = (self.node.astype(np.uint64) << np.uint64(24)) + self.gpus.astype(np.uint64)
        for factor in _MIX:
            mixed = (mixed ^ (mixed >> np.uint64(29))) * factor
        sums = np.zeros(len(mixed) + 1, dtype=np.uint64)
        np.cumsum(mixed, out=sums[1:])
        sums = sums[self.starts]
        return sums[1:] - sums[:-1]


def running_sum(values: npt.NDArray[np.integer[Any] | np.bool_]) -> Ints:
    """Return the cumulative sums (V + 1,) of the values, beginning with 0."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def make_rows(count: int, row: Ints, node: Ints, gpus: Ints) -> Rows:
    """Return `count` rows with these elements, given in any order. No two elements may have the same row and node."""
    width = int(node.max(initial=0)) + 1
    order = np.argsort(row * width + node)
    starts = running_sum(np.bincount(row, minlength=count))
    return Rows(starts, node[order], gpus[order]).holding(gpus[order])


def cap_groups(group: Ints, gpus: Ints, limit: Ints) -> Ints:
    """Return the GPUs (E,) that each element keeps if each group may have at most `limit` GPUs. Earlier elements of a
    group come first.

    Elements of one group must be consecutive. `limit` holds, for each element, the limit of its group.
    """
    if not len(group):
        return gpus
    before = np.cumsum(gpus) - gpus
    later = np.where(group[1:] != group[:-1], before[1:], 0)
    before[1:] -= np.maximum.accumulate(later)
    return np.minimum(np.maximum(limit - before, 0), gpus)


LEAST_SPEEDUP = 1e-3
"""Amount added to each speed-up, so that a speed-up of 0 does not make the power mean 0."""


@dataclass(frozen=True)
class Problem:
    """Input of one decision: the jobs that may be changed, the GPUs that are free for them, and each job's speed-up at
    each size."""

    cluster: ClusterView
    tables: Tables
    """Tables of the jobs, with the sizes that each job may have now."""
    capacity: Ints
    """(N,) GPUs of each node that no fixed job holds."""
    crossed: Bools
    """(N,) True if a fixed job of several nodes uses the node, so that no other such job may."""
    home: Rows
    """J rows: the GPUs that each job holds now."""
    held: Ints
    """(J,) number of GPUs that each job holds now."""
    snap: Ints
    """(J, G + 1) each job's largest size that is at most each number of GPUs; 0 if there is none."""
    column: Ints
    """(G + 1,) column of each number of GPUs in the tables; undefined for a number that is no size."""
    together: Floats
    apart: Floats
    """(J, U) speed-up relative to the fair share if the job is spread over several nodes. `together` is the speed-up on
    as few nodes as possible."""
    factor: Floats
    """(J,) factor on the speed-up of a job that is re-allocated: (T - R·δ) / (T + δ)."""
    power: float
    """Exponent p of the power mean over jobs."""

    @property
    def jobs(self) -> tuple[JobView, ...]:
        return self.tables.jobs

    def evaluate(self, rows: Rows) -> tuple[Floats, Floats]:
        """Return fitness and cluster use (K,) of K candidates, given in K · J rows. For both, larger is better.

        Fitness is the power mean over jobs of the speed-ups, each multiplied by its factor if the job is re-allocated
        (§4.2.1, §4.2.2). Cluster use is the sum of speed-ups divided by the GPUs of the nodes in use. In the paper
        (§4.2.3) it decides the size of a cloud. Here it only keeps candidates diverse, as in the authors' search.
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
        used = np.zeros(candidates * len(self.capacity), dtype=np.bool_)
        used[rows.row // len(self.jobs) * len(self.capacity) + rows.node] = True
        return used.reshape(candidates, -1) @ self.capacity


def build(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    fixed: Collection[int],
    history: History,
    now: float,
    power: float,
) -> Problem:
    """Return the problem of one decision. Jobs in `fixed` keep their GPUs."""
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
    below = [n for n in job.limits.gpus if n <= fair]
    return tuple(sorted({*sizes, *([max(below)] if below else [])}))


def _fair_goodput(tables: Tables, fair: int) -> Floats:
    """Return the goodput (J,) of each job on its fair share: at its largest size within the share, or else at its
    smallest size."""
    share = np.where(tables.allowed & (tables.sizes <= fair), tables.sizes, 0).argmax(axis=1)
    column = np.where(share > 0, share, tables.allowed.argmax(axis=1))
    found = tables.goodput[np.arange(len(column)), column]
    return np.where(found > 0, found, 1.0)


def _goodput_apart(cluster: ClusterView, tables: Tables) -> Floats:
    """Return the goodput (J, U) of each job on two nodes, at sizes that would fit on one node. At other sizes it is
    the goodput in the tables."""
    apart: Floats = tables.goodput.copy()
    if cluster.uniform:
        return apart
    for j, job in enumerate(tables.jobs):
        at = np.flatnonzero(tables.allowed[j] & (tables.sizes > 1) & (tables.sizes <= cluster.gpus_per_node))
        if len(at):
            gpus = tables.sizes[at]
            apart[j, at] = predict(job, np.full_like(gpus, 2), gpus, batch_options(job, gpus, "best"))[1].max(axis=1)
    return apart


CROSSED = 0.9
"""Probability that two parents exchange rows."""
RESET = 0.1
"""Probability that a mutation resets a row to the GPUs that the job holds now."""
THINNED = 0.1
"""Probability that a mutation thins out a row, and probability that each element of such a row is then removed."""


def breed(problem: Problem, rows: Rows, parents: Ints, rng: np.random.Generator) -> Rows:
    """Return two children of each pair of `parents` (P, 2): one-point crossover over jobs, then mutation."""
    jobs = len(problem.jobs)
    point = np.where(rng.random(len(parents)) < CROSSED, rng.integers(jobs, size=len(parents)), 0)
    swapped = np.arange(jobs) < point[:, None]
    one, other = parents[:, :1], parents[:, 1:]
    source = np.concatenate([np.where(swapped, other, one), np.where(swapped, one, other)])
    row = source * jobs + np.arange(jobs)
    home = len(rows.starts) - 1 + np.arange(jobs)
    row = np.where(rng.random(row.shape) < RESET, home, row)
    return _raise(problem, _thin(rows.over(problem.home).take(row.ravel()), rng), rng)


def _thin(rows: Rows, rng: np.random.Generator) -> Rows:
    chosen = rng.random(len(rows.starts) - 1) < THINNED
    gone = np.repeat(chosen, rows.counts) & (rng.random(len(rows.gpus)) < THINNED)
    return rows.holding(np.where(gone, 0, rows.gpus))


def _raise(problem: Problem, rows: Rows, rng: np.random.Generator) -> Rows:
    """Mutate jobs on nodes with free GPUs: a job's GPUs on such a node are raised to a random number, at most the whole
    node."""
    jobs, nodes = len(problem.jobs), len(problem.capacity)
    row = rows.row
    node = row // jobs * nodes + rows.node  # nodes of all candidates, numbered consecutively
    everywhere = (len(rows.starts) - 1) // jobs * nodes
    used = np.bincount(node, weights=rows.gpus, minlength=everywhere)
    free = used < np.tile(problem.capacity, everywhere // max(nodes, 1))
    chance = 1.0 / jobs + (1.0 - 1.0 / jobs) / np.maximum(np.bincount(node, minlength=everywhere), 1)
    here = free[node] & (rng.random(len(node)) < chance[node])
    capacity = problem.capacity[rows.node]
    grown = np.where(here, rng.integers(rows.gpus, np.maximum(capacity, rows.gpus) + 1), rows.gpus)

    roomy = np.flatnonzero(free)
    at = np.repeat(roomy, rng.binomial(jobs, 1.0 / jobs, size=len(roomy)))
    fresh = np.unique((at // nodes * jobs + rng.integers(jobs, size=len(at))) * nodes + at % nodes)
    there = row * nodes + rows.node
    place = np.searchsorted(there, fresh)
    new = np.append(there, -1)[place] != fresh
    fresh, place = fresh[new], place[new]
    gpus = rng.integers(0, problem.capacity[fresh % nodes] + 1)
    new = gpus > 0
    fresh = fresh[new]
    return Rows(rows.starts, rows.node, grown).among(place[new], fresh // nodes, fresh % nodes, gpus[new])


def repair(problem: Problem, rows: Rows, rng: np.random.Generator) -> Rows:
    """Make the candidates feasible: sizes are allowed, no node has too many GPUs in use, and each node has at most one
    job of several nodes.

    Jobs with less attained service keep their GPUs first. A job that keeps its size keeps its nodes, since Slurm does
    not move jobs.
    """
    jobs = len(problem.jobs)
    job = np.arange(len(rows.starts) - 1) % jobs
    unchanged = (rows.totals == problem.held[job]) & (problem.held[job] > 0)
    own = np.arange(len(job))
    rows = rows.over(problem.home).take(np.where(unchanged, len(job) + job, own))
    if problem.cluster.uniform:
        whole = np.repeat((rows.counts > 1) & ~unchanged, rows.counts)
        rows = Rows(rows.starts, rows.node, np.where(whole, problem.cluster.gpus_per_node, rows.gpus))
    order, node = _by_node(problem, rows)
    rows = Rows(rows.starts, rows.node, _uncross(problem, rows, order, node))
    rows = Rows(rows.starts, rows.node, _shrink(problem, rows, rng))
    rows = rows.holding(_fit(problem, rows, order, node))
    if problem.cluster.uniform:
        cut = (rows.totals < problem.held[job]) | ~unchanged
        broken = np.repeat((rows.counts > 1) & cut, rows.counts) & (rows.gpus < problem.cluster.gpus_per_node)
        rows = rows.holding(np.where(broken, 0, rows.gpus))
    return rows.holding(_shrink(problem, rows, rng))


def _by_node(problem: Problem, rows: Rows) -> tuple[Ints, Ints]:
    """Return the order that sorts elements by candidate, node and job, and the group of each sorted element.

    A group is one candidate's elements on one node.
    """
    jobs, nodes = len(problem.jobs), len(problem.capacity)
    node = rows.row // jobs * nodes + rows.node
    order = np.argsort(node * jobs + rows.row % jobs)
    return order, node[order]


def _uncross(problem: Problem, rows: Rows, order: Ints, node: Ints) -> Ints:
    """Return the GPUs (E,) of each element. Of several multi-node jobs on a node, only the first keeps its GPUs there
    (§4.2.2, interference)."""
    several = np.repeat(rows.counts > 1, rows.counts)[order]
    free = np.where(problem.crossed, 0, 1)[rows.node[order]]
    left = cap_groups(node, several.astype(np.int64), free)
    gpus: Ints = rows.gpus.copy()
    gpus[order[several & (left == 0)]] = 0
    return gpus


def _fit(problem: Problem, rows: Rows, order: Ints, node: Ints) -> Ints:
    """Return the GPUs (E,) of each element, reduced so that no node has more GPUs in use than there are."""
    gpus = np.empty_like(rows.gpus)
    gpus[order] = cap_groups(node, rows.gpus[order], problem.capacity[rows.node[order]])
    return gpus


def _shrink(problem: Problem, rows: Rows, rng: np.random.Generator) -> Ints:
    """Return the GPUs (E,) of each element, reduced on random nodes until each job's total is an allowed size."""
    totals = rows.totals
    job = np.arange(len(totals)) % len(problem.jobs)
    target = problem.snap[job, np.minimum(totals, problem.snap.shape[1] - 1)]
    over = np.flatnonzero(np.repeat(target < totals, rows.counts))
    if not len(over):
        return rows.gpus
    row = rows.row[over]
    order = np.argsort(row + rng.random(len(over)))
    gpus: Ints = rows.gpus.copy()
    gpus[over[order]] = cap_groups(row[order], rows.gpus[over[order]], target[row[order]])
    return gpus


@dataclass(frozen=True)
class PolluxOptions:
    """Settings of the search; the defaults are the authors'."""

    population: int = 100
    generations: int = 100
    """Number of generations in each decision."""
    power: float = -1.0
    """Exponent p of the power mean over jobs: the more negative, the fairer."""

    def __post_init__(self) -> None:
        check_options(self, {"population": 2, "power": -100}, {"power": 1})
        if self.power == 0:
            raise ValueError("power: 0 has no mean; it must be a number from -100 to 1, and not 0")


@dataclass(frozen=True)
class Candidates:
    """Population, with the fitness and cluster use of each candidate."""

    rows: Rows
    digest: Ints
    """(K,) hash of each candidate, which is equal for equal candidates."""
    fitness: Floats
    use: Floats
    """(K,) use of the cluster by each candidate."""

    def take(self, chosen: Ints, jobs: int) -> Candidates:
        """Return the candidates with these indices, in this order."""
        rows = self.rows.take((chosen[:, None] * jobs + np.arange(jobs)).ravel())
        return Candidates(rows, self.digest[chosen], self.fitness[chosen], self.use[chosen])

    def over(self, other: Candidates) -> Candidates:
        """Return these candidates, followed by those of `other`."""
        return Candidates(
            self.rows.over(other.rows),
            np.concatenate([self.digest, other.digest]),
            np.concatenate([self.fitness, other.fitness]),
            np.concatenate([self.use, other.use]),
        )


class Pollux:
    """Pollux (OSDI 2021). It remembers its population, and each job's largest number of GPUs and GPU-seconds."""

    name = "pollux"
    options_type = PolluxOptions

    def __init__(self, options: PolluxOptions | None = None) -> None:
        self.options = options or PolluxOptions()
        self._history = History()
        self._rows: Rows | None = None
        self._jobs: dict[int, int] = {}
        self._nodes: tuple[str, ...] = ()

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        self._history.update(jobs)
        fixed = fixed_jobs(cluster, jobs)
        problem = build(cluster, jobs, fixed, self._history, now, self.options.power)
        wanted, score = self._search(problem, rng)
        why = reason("best_total", total="the mean of all jobs' speed-ups")
        return build_schedule(cluster, jobs, fixed, problem.tables, wanted, why, score)

    def _search(self, problem: Problem, rng: np.random.Generator) -> tuple[dict[int, int], float]:
        """Return the GPUs of each job in the best candidate, by job id, and the candidate's fitness."""
        jobs = len(problem.jobs)
        if not jobs or not problem.capacity.any():
            self._rows = None
            return {}, float("nan")
        found = evolve(problem, self._recalled(problem), self.options, rng)
        best = int(np.lexsort((-found.use, -found.fitness))[0])
        totals = found.rows.totals.reshape(-1, jobs)[best].tolist()
        self._rows, self._jobs = found.rows, {job.job_id: j for j, job in enumerate(problem.jobs)}
        self._nodes = tuple(node.name for node in problem.cluster.nodes)
        wanted = {job.job_id: gpus for job, gpus in zip(problem.jobs, totals, strict=True)}
        return wanted, float(found.fitness[best])

    def _recalled(self, problem: Problem) -> Rows:
        """Return the last decision's population, converted to the present jobs and nodes. Its first candidate is the
        present allocation."""
        if self._rows is None:
            return problem.home
        before, jobs = len(self._jobs), len(problem.jobs)
        nothing = len(self._rows.starts) - 1
        source = np.array([self._jobs.get(job.job_id, -1) for job in problem.jobs])
        candidate = np.arange(nothing // before)[:, None] * before
        rows = self._rows.over(Rows(np.zeros(2, dtype=np.int64), problem.home.node[:0], problem.home.gpus[:0]))
        rows = rows.take(np.where(source < 0, nothing, candidate + source).ravel())
        index = {node.name: n for n, node in enumerate(problem.cluster.nodes)}
        node = np.array([index.get(name, -1) for name in self._nodes], dtype=np.int64)[rows.node]
        there = node >= 0
        moved = make_rows(len(candidate) * jobs, rows.row[there], node[there], rows.gpus[there])
        return problem.home.over(moved)


def evolve(problem: Problem, rows: Rows, options: PolluxOptions, rng: np.random.Generator) -> Candidates:
    """Return the population after all generations. The best fitness never falls from one generation to the next."""
    jobs = len(problem.jobs)
    found, rank, gap = _select(_assess(problem, repair(problem, rows, rng)), options.population, jobs)
    for _ in range(options.generations):
        parents = tournament(rank, gap, 2 * (-(-options.population // 2)), rng).reshape(-1, 2)
        children = repair(problem, breed(problem, found.rows, parents, rng), rng)
        found, rank, gap = _select(found.over(_assess(problem, children)), options.population, jobs)
    return found


def _assess(problem: Problem, rows: Rows) -> Candidates:
    jobs = len(problem.jobs)
    factors = np.arange(1, 2 * jobs, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    digest = (rows.digest.reshape(-1, jobs) * factors).sum(axis=1).view(np.int64)
    return Candidates(rows, digest, *problem.evaluate(rows))


def _select(found: Candidates, most: int, jobs: int) -> tuple[Candidates, Ints, Floats]:
    """Return the best `most` different candidates, with the front and the crowding distance of each."""
    first = np.sort(np.unique(found.digest, return_index=True)[1])
    fitness, use = found.fitness[first], found.use[first]
    rank = ranks(fitness, use)
    gap = crowding(rank, fitness, use)
    kept = np.lexsort((-gap, rank))[:most]
    return found.take(first[kept], jobs), rank[kept], gap[kept]


def ranks(first: Floats, second: Floats) -> Ints:
    """Return the front (M,) of each point for two objectives (NSGA-II, Deb et al., IEEE TEC 2002).

    Front 0 has the points that no other point dominates. A point dominates another if it is better in one objective and
    not worse in the other.
    """
    order = np.lexsort((-second, -first))
    result = np.zeros(len(first), dtype=np.int64)
    best: list[float] = []  # by front: minus the largest value of the second aim so far
    before = (np.nan, np.nan)
    rank = 0
    for at, one, two in zip(order.tolist(), first[order].tolist(), second[order].tolist(), strict=True):
        if (one, two) != before:
            rank = bisect_right(best, -two)
            best[rank : rank + 1] = [-two]
            before = (one, two)
        result[at] = rank
    return result


def crowding(rank: Ints, first: Floats, second: Floats) -> Floats:
    """Return the crowding distance (M,) of each point: the distance between its neighbours in the front, divided by the
    length of the front. It is infinite at the ends of a front."""
    order = np.lexsort((-second, first, rank))
    front = rank[order]
    ends = np.flatnonzero(np.concatenate([[True], front[1:] != front[:-1], [True]]))
    size = np.diff(ends)
    gap = np.zeros(len(rank))
    for aim in (first[order], second[order]):
        spread = np.maximum.reduceat(aim, ends[:-1]) - np.minimum.reduceat(aim, ends[:-1])
        between = np.zeros(len(rank))
        between[1:-1] = np.abs(aim[2:] - aim[:-2])
        gap += between / np.repeat(np.where(spread > 0, spread, 1.0), size)
    gap[ends[:-1]] = np.inf
    gap[ends[1:] - 1] = np.inf
    result = np.empty(len(rank))
    result[order] = gap
    return result


def tournament(rank: Ints, gap: Floats, count: int, rng: np.random.Generator) -> Ints:
    """Return the winners (count,) of random pairs of candidates: the one in the better front or, within a front, the
    less crowded one."""
    one, other = rng.integers(len(rank), size=(2, count))
    wins = (rank[one] < rank[other]) | ((rank[one] == rank[other]) & (gap[one] >= gap[other]))
    winners: Ints = np.where(wins, one, other)
    return winners

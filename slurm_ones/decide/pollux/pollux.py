"""The policy: the genetic search from call to call, and the schedule of its best candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import reason
from slurm_ones.decide import evolution
from slurm_ones.decide.build import build_schedule
from slurm_ones.decide.job_figures import History
from slurm_ones.decide.pollux import breeding
from slurm_ones.decide.pollux.problem import Problem, Rows, build, make_rows
from slurm_ones.schedule.placement import fixed_jobs
from slurm_ones.schedule.policy import ClusterView, Floats, Ints, JobView, Schedule


@dataclass(frozen=True)
class Options:
    """Settings of the search; the defaults are its authors'."""

    population: int = 100
    generations: int = 100
    """Per decision."""
    power: float = -1.0
    """Exponent of the mean over jobs: the more negative, the fairer."""

    def __post_init__(self) -> None:
        for name, least in (("population", 2), ("generations", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: {value!r} must be a whole number of at least {least}")
        if not -100 <= self.power <= 1 or self.power == 0:
            raise ValueError(f"power: {self.power!r} must be a number from -100 to 1, and not 0")


@dataclass(frozen=True)
class Candidates:
    """A population and what each of it is worth."""

    rows: Rows
    digest: Ints
    """(K,) equal for equal candidates."""
    fitness: Floats
    use: Floats
    """(K,) each."""

    def take(self, chosen: Ints, jobs: int) -> Candidates:
        """The chosen candidates, in that order."""
        rows = self.rows.take((chosen[:, None] * jobs + np.arange(jobs)).ravel())
        return Candidates(rows, self.digest[chosen], self.fitness[chosen], self.use[chosen])

    def over(self, other: Candidates) -> Candidates:
        """These, then the others."""
        return Candidates(
            self.rows.over(other.rows),
            np.concatenate([self.digest, other.digest]),
            np.concatenate([self.fitness, other.fitness]),
            np.concatenate([self.use, other.use]),
        )


class Pollux:
    """Pollux (OSDI 2021). It remembers its population, and of each job the most GPUs and the GPU-seconds it had."""

    name = "pollux"
    options_type = Options

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self._history = History()
        self._rows: Rows | None = None
        self._jobs: dict[int, int] = {}
        self._nodes: tuple[str, ...] = ()

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.schedule.policy.Policy`."""
        self._history.update(jobs)
        fixed = fixed_jobs(cluster, jobs)
        problem = build(cluster, jobs, fixed, self._history, now, self.options.power)
        wanted, score = self._search(problem, rng)
        why = reason("best_total", total="the mean of all jobs' speed-ups")
        return build_schedule(cluster, jobs, fixed, problem.tables, wanted, why, score)

    def _search(self, problem: Problem, rng: np.random.Generator) -> tuple[dict[int, int], float]:
        """GPUs of each job in the best candidate, and its fitness."""
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
        """The last population with today's jobs and nodes, what is in force at its head."""
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


def evolve(problem: Problem, rows: Rows, options: Options, rng: np.random.Generator) -> Candidates:
    """The population after all generations. The best fitness in it never falls from one to the next."""
    jobs = len(problem.jobs)
    found, rank, gap = _select(_assess(problem, breeding.repair(problem, rows, rng)), options.population, jobs)
    for _ in range(options.generations):
        parents = evolution.tournament(rank, gap, 2 * (-(-options.population // 2)), rng).reshape(-1, 2)
        children = breeding.repair(problem, breeding.breed(problem, found.rows, parents, rng), rng)
        found, rank, gap = _select(found.over(_assess(problem, children)), options.population, jobs)
    return found


def _assess(problem: Problem, rows: Rows) -> Candidates:
    jobs = len(problem.jobs)
    factors = np.arange(1, 2 * jobs, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    digest = (rows.digest.reshape(-1, jobs) * factors).sum(axis=1).view(np.int64)
    return Candidates(rows, digest, *problem.evaluate(rows))


def _select(found: Candidates, most: int, jobs: int) -> tuple[Candidates, Ints, Floats]:
    """The best `most` candidates, each once, their fronts and crowding."""
    first = np.sort(np.unique(found.digest, return_index=True)[1])
    fitness, use = found.fitness[first], found.use[first]
    rank = evolution.ranks(fitness, use)
    gap = evolution.crowding(rank, fitness, use)
    kept = np.lexsort((-gap, rank))[:most]
    return found.take(first[kept], jobs), rank[kept], gap[kept]

"""The policy: generations of candidates from call to call, and what of them is deployed (ONES §3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from slurm_ones.decide.ones_sc21 import genome, operators, score
from slurm_ones.decide.ones_sc21.deploy import deploy
from slurm_ones.decide.ones_sc21.limits import SizeLimits
from slurm_ones.decide.ones_sc21.reasons import explain
from slurm_ones.decide.ones_sc21.space import Space, build
from slurm_ones.schedule.fixed import pinned
from slurm_ones.schedule.policy import Allocation, ClusterView, Ints, JobView, Schedule

_LEAST = {"population": 2, "cap_over_request": 1}


@dataclass(frozen=True)
class Options:
    """Settings of the search; the defaults are the paper's."""

    population: int = 16
    """Candidates kept (K)."""
    generations: int = 30
    """Per decision; the population lives on, so the paper's endless run is many decisions."""
    mutation: float = 0.3
    """Chance of each job to be removed in a mutation."""
    epochs_before_removal: int = 2
    """Epochs a job has done before a mutation may remove it."""
    epochs_before_doubling: int = 2
    """Epochs at its limit after which a job's limit doubles."""
    cap_over_request: float = 4.0
    """A job never gets more than this multiple of the GPUs it asked for."""
    min_epochs_since_change: int = 1
    """A schedule is deployed when every job it changes has done so many epochs since its last change."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), _LEAST.get(field.name, 0)
            whole = isinstance(field.default, int)
            if not isinstance(value, int if whole else (int, float)) or not least <= value < math.inf:
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{field.name}: {value!r} must be {kind} of at least {least}")
        if self.mutation > 1:
            raise ValueError(f"mutation: {self.mutation!r} must be a chance between 0 and 1")


class OnesSc21:
    """ONES as published. It remembers its population and the jobs' limits, both by job id."""

    name = "ones-sc21"
    options_type = Options

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self._limits = SizeLimits(self.options.epochs_before_doubling, self.options.cap_over_request)
        self._known: dict[int, int] = {}
        self._population = np.zeros((self.options.population, 0), dtype=np.int64)
        """(K, jobs of the last decision) GPUs of each job; `_known` has their columns."""

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.schedule.policy.Policy`."""
        space = build(cluster, jobs, pinned(cluster, jobs))
        limit = self._limits.update(space, jobs)
        best, cost = self._search(space, limit, rng)
        settled = self.options.min_epochs_since_change
        chosen = deploy(space, limit, best, settled)

        allocations = {
            job.job_id: Allocation(job.shape, job.batch)
            for job in jobs
            if job.job_id in space.pinned and job.shape is not None
        }
        for j, job in enumerate(space.jobs):
            if chosen[j]:
                allocations[job.job_id] = space.allocation(j, int(chosen[j]))
        parked = frozenset(job.job_id for j, job in enumerate(space.jobs) if not chosen[j] and space.start[j])
        self._limits.passed_over(space, parked)
        return Schedule(allocations, explain(space, jobs, chosen, best, settled), cost, parked)

    def _search(self, space: Space, limit: Ints, rng: np.random.Generator) -> tuple[Ints, float]:
        """Counts (J,) of the best candidate after all generations, and its score."""
        options = self.options
        done = [job.epochs >= options.epochs_before_removal for job in space.jobs]
        removable = np.array(done, dtype=np.bool_)
        rho = score.sample_progress(space, rng)
        counts = operators.refresh(space, self._recalled(space), limit)
        counts = operators.settle(space, counts, limit, operators.fill_order(space, rho))
        costs = score.remaining_utilisation(space, counts, rho)
        for _ in range(options.generations if space.jobs else 0):
            rho = score.sample_progress(space, rng)
            parents = genome.genes(space, counts)
            children = operators.crossover(parents, rng)
            mutants = operators.mutate(parents, removable, options.mutation, rng)
            young = genome.counts(space, np.concatenate([children, mutants]))
            young = operators.settle(space, young, limit, operators.fill_order(space, rho))
            counts = np.concatenate([counts, young])
            costs = score.remaining_utilisation(space, counts, rho)
            keep = np.argsort(costs, kind="stable")[: options.population]
            counts, costs = counts[keep], costs[keep]
        self._population = counts
        self._known = {job.job_id: j for j, job in enumerate(space.jobs)}
        best = int(np.argmin(costs))
        return counts[best], float(costs[best])

    def _recalled(self, space: Space) -> Ints:
        """The remembered population as counts (K, J) of today's jobs; the first is the current allocation."""
        recalled = np.tile(space.current, (self.options.population, 1))
        for j, job in enumerate(space.jobs):
            if job.job_id in self._known:
                recalled[1:, j] = self._population[1:, self._known[job.job_id]]
        return recalled

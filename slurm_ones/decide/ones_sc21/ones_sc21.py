"""The policy: generations of candidates from call to call, what of them is deployed, and why (ONES §3.2-3.3)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.decide.build import fits_nowhere
from slurm_ones.decide.evolution import check_options, uniform_crossover
from slurm_ones.decide.ones_sc21 import generation
from slurm_ones.decide.ones_sc21.space import (
    LEAST_PROGRESS,
    Space,
    build,
    genes,
    gpus_of_jobs,
    remaining_utilisation,
    sample_progress,
)
from slurm_ones.schedule.placement import fixed_jobs
from slurm_ones.schedule.policy import Allocation, ClusterView, Ints, JobView, Schedule


class SizeLimits:
    """R, the most GPUs that a job may have now (ONES §3.3), remembered between decisions by job id: jobs earn larger
    sizes by running at the ones they have.

    Where sizes are those that Slurm can be asked for, a new job's first limit is its smallest one if that is not the
    paper's 1 GPU, and doubling goes at least to the next one.
    """

    def __init__(self, epochs_before_doubling: int, cap_over_request: float) -> None:
        self.epochs_before_doubling = epochs_before_doubling
        self.cap_over_request = cap_over_request
        self._remembered: dict[int, int] = {}

    def update(self, space: Space, jobs: Sequence[JobView]) -> Ints:
        """(J,) today's limit of each job of the space; `jobs` are all jobs, the fixed ones included."""
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
                self._remembered[job.job_id] = max(self._remembered[job.job_id] // 2, int(space.smallest[j]))

    def _limit(self, space: Space, j: int, total: int) -> int:
        job, current, start = space.jobs[j], int(space.current[j]), int(space.smallest[j])
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
            limit[j] = max(int(2 * gpus / (ran / median + 1.0)), int(space.smallest[j]))


def stopped(job: JobView) -> bool:
    """Whether the job has run and waits again."""
    return job.shape is None and (job.samples > 0 or job.running_s > 0)


LEAST = {"population": 2, "cap_over_request": 1}


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
        check_options(self, LEAST)


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
        space = build(cluster, jobs, fixed_jobs(cluster, jobs))
        limit = self._limits.update(space, jobs)
        best, cost = self._search(space, limit, rng)
        settled = self.options.min_epochs_since_change
        chosen = deploy(space, limit, best, settled)

        allocations = {
            job.job_id: Allocation(job.shape, job.batch)
            for job in jobs
            if job.job_id in space.fixed and job.shape is not None
        }
        for j, job in enumerate(space.jobs):
            if chosen[j]:
                allocations[job.job_id] = space.allocation(j, int(chosen[j]))
        parked = frozenset(job.job_id for j, job in enumerate(space.jobs) if not chosen[j] and space.smallest[j])
        self._limits.passed_over(space, parked)
        return Schedule(allocations, explain(space, jobs, chosen, best, settled), cost, parked)

    def _search(self, space: Space, limit: Ints, rng: np.random.Generator) -> tuple[Ints, float]:
        """Counts (J,) of the best candidate after all generations, and its score."""
        options = self.options
        done = [job.epochs >= options.epochs_before_removal for job in space.jobs]
        removable = np.array(done, dtype=np.bool_)
        rho = sample_progress(space, rng)
        counts = generation.refresh(space, self._recalled(space), limit)
        counts = generation.fill_and_place(space, counts, limit, generation.fill_order(space, rho))
        costs = remaining_utilisation(space, counts, rho)
        for _ in range(options.generations if space.jobs else 0):
            rho = sample_progress(space, rng)
            parents = genes(space, counts)
            children = uniform_crossover(parents, rng)
            mutants = generation.mutate(parents, removable, options.mutation, rng)
            young = gpus_of_jobs(space, np.concatenate([children, mutants]))
            young = generation.fill_and_place(space, young, limit, generation.fill_order(space, rho))
            counts = np.concatenate([counts, young])
            costs = remaining_utilisation(space, counts, rho)
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


def deploy(space: Space, limit: Ints, best: Ints, min_epochs: int) -> Ints:
    """The best candidate's counts (J,), when every job that they change has run long enough since its last change.

    Until then running jobs keep what they have, and those who wait start on what is idle, up to their limits (J,).
    """
    settled = np.array([job.epochs_since_change >= min_epochs for job in space.jobs], dtype=np.bool_)
    if (settled | ~space.running | (best == space.current)).all():
        return best
    rho = np.clip(space.alpha / (space.alpha + space.beta), LEAST_PROGRESS, 1.0)
    held = np.where(space.running, space.current, limit)
    kept: Ints = generation.fill_and_place(space, space.current[None], held, generation.fill_order(space, rho))[0]
    return kept


def explain(space: Space, jobs: Sequence[JobView], chosen: Ints, best: Ints, min_epochs: int) -> dict[int, Reason]:
    """The reason of each job, by job id.

    `chosen` and `best` (J,) are the sizes in force and those of the best candidate. Where they differ, a job that the
    best one changes has had its size for less than `min_epochs`.
    """
    reasons = {job.job_id: space.fixed[job.job_id] for job in jobs if job.job_id in space.fixed}
    left_out = [j for j in range(len(space.jobs)) if not space.current[j] and not chosen[j]]
    waiting = len(left_out) + space.waiting_fixed
    for j, job in enumerate(space.jobs):
        before, after = int(space.current[j]), int(chosen[j])
        if not space.smallest[j]:
            found = fits_nowhere(job)
        elif not before and not after:
            found = reason("in_queue", gpus=int(space.smallest[j]), place=left_out.index(j) + 1, waiting=waiting)
        elif before == after and best[j] != before:
            found = reason("changed_lately", gpus=int(best[j]), epochs=min_epochs)
        elif not after:
            found = reason("stopped")
        elif not before and after == space.smallest[j]:
            found = reason("smallest_size")
        else:
            found = reason("least_remaining", speed=float(space.tables.speed[j, space.column[after]]))
        reasons[job.job_id] = found
    return reasons

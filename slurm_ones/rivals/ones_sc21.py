"""ONES as published: an online evolutionary search over the GPUs and the batch of every job (SC21, arXiv 2108.03645).

This is the baseline and must not be improved. It differs from the paper only as a real Slurm requires:

1. A size is a part of a node or whole nodes, since Slurm can allocate only these (`policy.shapes`). A candidate must
   fit on the nodes. Unchanged jobs stay on their nodes, since Slurm does not move them. On a cluster that allows
   different numbers of GPUs on a job's nodes, any number of GPUs is a size, as in the paper.
2. A new job's first limit is 1 GPU, as in the paper, or its smallest size if it cannot run on one.
3. Fixed jobs and their GPUs are not in the search space (`Space`).
4. As long as the best candidate may not be deployed, no running job is changed. Waiting jobs get idle GPUs, in the
   paper's order of filling, because Slurm would start these jobs anyway.
5. The paper's number of samples used is here the job's progress in samples of its base batch (`JobView.samples`).

A job that the deployed candidate leaves out is checkpointed and parked, as in the paper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.ones.candidates import uniform_crossover
from slurm_ones.policy.build import fits_nowhere, fixed_jobs, free_after_fixed, mobile_jobs
from slurm_ones.policy.contract import (
    Allocation,
    Bools,
    ClusterView,
    Floats,
    Ints,
    JobView,
    Schedule,
    check_options,
)
from slurm_ones.policy.ledger import count_nodes, held_gpus, parts_that_fit, take_parts
from slurm_ones.policy.shapes import shape_of
from slurm_ones.policy.tables import Tables, build_tables, within

LARGEST = 1e15
"""Largest number of samples used, and largest α and β, of a job. Larger values are reduced to it."""
LEAST_PROGRESS = 1e-3
"""Smallest random ρ. A ρ near 0 would dominate the scores of a whole generation."""


@dataclass(frozen=True)
class Space:
    """Search space of a decision: the jobs that may be changed or started, in order of arrival, with their sizes."""

    cluster: ClusterView
    tables: Tables
    """Sizes, batches (in proportion to the GPUs, ONES §3.3) and speeds of these jobs."""
    fixed: Mapping[int, Reason]
    """Reason why a job outside the search space keeps its GPUs or waits, by job id."""
    waiting_fixed: int

    free: Ints
    """(N,) GPUs of each node that no fixed job holds."""
    held: Ints
    """(E, 3) rows of job, node and number of GPUs, for all GPUs that jobs of the space hold now."""
    slots: Ints
    """(GPUs,) index of the job that holds each GPU now, in order of nodes; J if the GPU is idle."""
    ordinal: Ints
    """(GPUs,) number of GPUs that the same job holds on earlier positions of `slots`."""
    current: Ints
    """(J,) GPUs that each job holds now; 0 for a waiting job."""
    smallest: Ints
    """(J,) each job's smallest size, possibly its present one; 0 if this cluster has none of its sizes."""
    below: Ints
    """(J, U) each job's largest size up to the size of column U; 0 if there is none."""
    column: Ints
    """(GPUs + 1,) column of the largest size that is at most each number of GPUs."""

    samples: Floats
    """(J,) progress of each job in samples of its base batch."""
    alpha: Floats
    beta: Floats
    """(J,) β of each job's completed fraction ρ, which is distributed as Beta(α, β). `alpha` is α."""

    @property
    def jobs(self) -> tuple[JobView, ...]:
        return self.tables.jobs

    @property
    def running(self) -> Bools:
        """(J,) True for a job that holds GPUs."""
        return self.current > 0

    def largest(self, bound: Ints) -> Ints:
        """Return each job's largest size that is at most `bound` (…, J); 0 if there is none."""
        return self.below[np.arange(len(self.jobs)), self.column[np.minimum(bound, len(self.column) - 1)]]

    def speed(self, counts: Ints) -> Floats:
        """Return the samples/s (…, J) of each job on `counts` GPUs (…, J); 0 on 0 GPUs."""
        return self.tables.speed[np.arange(len(self.jobs)), self.column[counts]]

    def allocation(self, j: int, gpus: int) -> Allocation:
        """Return the allocation of job j with `gpus` GPUs. The job keeps its shape if this is its present number of
        GPUs."""
        job = self.jobs[j]
        kept = job.shape if gpus == self.current[j] else None
        shape = kept or shape_of(self.cluster, gpus)
        assert shape is not None, f"job {job.job_id}: {gpus} GPUs have no shape here"
        return Allocation(shape, int(self.tables.batch[j, self.column[gpus]]))


def build(cluster: ClusterView, jobs: Sequence[JobView], fixed: Mapping[int, Reason]) -> Space:
    """Build the search space of one decision, without the jobs in `fixed`."""
    mobile = mobile_jobs(jobs, fixed)
    tables = build_tables(cluster, mobile, "scaled")
    free, held = free_after_fixed(cluster, jobs, fixed), held_gpus(cluster, mobile)
    on_node = np.zeros((len(mobile), len(free)), dtype=np.int64)
    on_node[held[:, 0], held[:, 1]] = held[:, 2]
    slots = _slots(on_node, free)
    columns = np.arange(len(tables.sizes))
    best = np.maximum.accumulate(np.where(tables.allowed, columns, 0), axis=1)
    return Space(
        cluster=cluster,
        tables=tables,
        fixed=fixed,
        waiting_fixed=sum(job.job_id in fixed and job.shape is None for job in jobs),
        free=free,
        held=held,
        slots=slots,
        ordinal=_ordinal(slots, len(mobile)),
        current=on_node.sum(axis=1),
        smallest=tables.sizes[tables.allowed.argmax(axis=1)],  # column 0 (size 0) if there is none
        below=tables.sizes[best],
        column=np.searchsorted(tables.sizes, np.arange(int(tables.sizes[-1]) + 1), side="right") - 1,
        samples=np.array([within(job.samples, 0.0, LARGEST) for job in mobile]),
        alpha=np.array([within(job.progress.alpha, 0.01, LARGEST) for job in mobile]),
        beta=np.array([within(job.progress.beta, 0.01, LARGEST) for job in mobile]),
    )


def _slots(on_node: Ints, free: Ints) -> Ints:
    jobs, nodes = on_node.shape
    lengths = np.concatenate([on_node.T, (free - on_node.sum(axis=0))[:, None]], axis=1)
    return np.repeat(np.tile(np.arange(jobs + 1), nodes), lengths.ravel())


def _ordinal(slots: Ints, jobs: int) -> Ints:
    order = np.argsort(slots, kind="stable")
    first = np.cumsum(np.bincount(slots, minlength=jobs + 1)) - np.bincount(slots, minlength=jobs + 1)
    ordinal = np.empty(len(slots), dtype=np.int64)
    ordinal[order] = np.arange(len(slots)) - first[slots[order]]
    return ordinal


def genes(space: Space, counts: Ints) -> Ints:
    """Return the genomes (K, GPUs) of candidates with GPU counts (K, J): for each GPU the index of its job, J if idle.

    As few GPUs as possible change their job. A job keeps GPUs that it holds, up to its count. The GPUs that it gains
    are consecutive among the GPUs that no job keeps.
    """
    candidates, jobs = counts.shape
    bound = np.concatenate([counts, np.zeros((candidates, 1), dtype=np.int64)], axis=1)
    kept = space.ordinal < bound[:, space.slots]
    more = np.maximum(counts - space.current, 0)
    idle = len(space.slots) - counts.sum(axis=1, keepdims=True)
    values = np.tile(np.arange(jobs + 1), candidates)
    result = np.where(kept, space.slots, jobs)
    result[~kept] = np.repeat(values, np.concatenate([more, idle], axis=1).ravel())
    return result


def gpus_of_jobs(space: Space, population: Ints) -> Ints:
    """Return the GPU counts (K, J) of a population of genomes (K, GPUs)."""
    candidates, wide = len(population), len(space.jobs) + 1
    flat = population + wide * np.arange(candidates)[:, None]
    return np.bincount(flat.ravel(), minlength=candidates * wide).reshape(candidates, wide)[:, :-1]


def sample_progress(space: Space, rng: np.random.Generator) -> Floats:
    """Draw a ρ (J,) for each job from its Beta distribution."""
    return np.clip(np.nan_to_num(rng.beta(space.alpha, space.beta), nan=0.5), LEAST_PROGRESS, 1.0)


def remaining_utilisation(space: Space, counts: Ints, rho: Floats) -> Floats:
    """Return the score (K,) of each candidate (K, J), its remaining GPU-seconds: Σ_j n_j · Y_j · (1/ρ_j − 1) /
    X_j(n_j).

    Y are the samples used, X the samples/s. Jobs without GPUs and jobs that have not begun cost nothing, so the score
    prefers empty schedules. Only the filling of idle GPUs prevents these.
    """
    speed = space.tables.speed
    per_sample = np.divide(space.tables.sizes, speed, out=np.zeros_like(speed), where=speed > 0)
    work = space.samples * (1.0 / rho - 1.0)
    result: Floats = (work * per_sample[np.arange(len(work)), space.column[counts]]).sum(axis=1)
    return result


def place_counts(space: Space, wanted: Ints) -> tuple[Ints, Ints]:
    """Return GPU counts (K, J) near `wanted` that fit on the nodes, and the number of nodes with 0 to P free GPUs (K, P
    + 1).

    Unchanged jobs keep their nodes. All other jobs are placed on the fullest nodes with enough free GPUs, the largest
    job first. A job that does not fit gets fewer GPUs, possibly 0; if it was to grow, it stays as it is.
    """
    counts, free, cannot_grow = _place(space, wanted)
    wanted, rows, again = wanted.copy(), cannot_grow.any(axis=1), 0
    while rows.any():
        # The failed job's GPUs went to others, which must now do without them. From the second round on nobody grows.
        grows = space.running & (wanted[rows] > space.current)
        wanted[rows] = np.where(cannot_grow[rows] | (grows & (again > 0)), space.current, wanted[rows])
        counts[rows], free[rows], failed = _place(space, wanted[rows])
        cannot_grow[rows] = failed
        rows, again = cannot_grow.any(axis=1), again + 1
    return counts, free


def _place(space: Space, wanted: Ints) -> tuple[Ints, Ints, Bools]:
    """Place jobs as `place_counts` does, but a job that cannot grow may lose GPUs. Also return a mask (K, J) of such
    jobs."""
    per_node = space.cluster.gpus_per_node
    same = wanted == space.current
    job, node, gpus = space.held.T
    free = count_nodes(space.free, node, gpus, same[:, job], per_node)
    counts = np.where(same, wanted, 0)
    moving = np.where(same, 0, wanted)
    grows = ~same & space.running & (wanted > space.current)
    _whole_nodes(space, moving, counts, free, per_node)
    for size in range(min(per_node - 1, int(moving.max(initial=0))), 0, -1):
        these = moving == size
        total = these.sum(axis=1)
        if not total.any():
            continue
        fits = np.minimum(total, parts_that_fit(free, size))
        placed = these & (np.cumsum(these, axis=1) <= fits[:, None])
        counts[placed] = size
        take_parts(free, size, fits)
        short = these & ~placed
        if short.any():
            moving[short] = np.broadcast_to(space.largest(np.full(len(space.jobs), size - 1)), moving.shape)[short]
    return counts, free, grows & (counts <= space.current)


def _whole_nodes(space: Space, moving: Ints, counts: Ints, free: Ints, per_node: int) -> None:
    """Place jobs on whole nodes, the largest first. A job that does not fit gets a smaller size in `moving`."""
    large = (moving >= per_node) & (per_node > 0)
    while large.any():
        order = np.argsort(np.where(large, -moving, 1), axis=1, kind="stable")
        size = np.take_along_axis(np.where(large, moving, 0), order, axis=1)
        placed = (size > 0) & (np.cumsum(size, axis=1) <= free[:, per_node, None] * per_node)
        done = np.zeros_like(large)
        np.put_along_axis(done, order, placed, axis=1)
        counts[done] = moving[done]
        taken = np.where(done, moving, 0).sum(axis=1) // per_node
        free[:, per_node] -= taken
        free[:, 0] += taken
        moving[done] = 0
        large &= ~done
        left = np.maximum(free[:, per_node] * per_node, per_node - 1)[:, None]
        moving[large] = space.largest(np.minimum(moving, left))[large]
        large &= moving >= per_node


def offer_rest(space: Space, counts: Ints, free: Ints, limit: Ints, order: Ints) -> Ints:
    """Return the counts (K, J) after jobs without GPUs were offered the free GPUs, in `order` (J,), each up to its
    `limit` (J,).

    A running job that lost its GPUs does not get its old size back, since other jobs have taken its GPUs.
    """
    counts, free, per_node = counts.copy(), free.copy(), space.cluster.gpus_per_node
    blocks = np.arange(per_node + 1)
    while True:
        most = np.maximum(np.where(free > 0, blocks, 0).max(axis=1, initial=0), free[:, -1] * per_node)
        size = space.largest(np.minimum(limit, most[:, None]))
        size = np.where(space.running & (size == space.current), space.largest(size - 1), size)
        size = np.where(counts == 0, size, 0)
        rows = np.flatnonzero(size.any(axis=1))
        if not len(rows):
            return counts
        job = order[(size[rows][:, order] > 0).argmax(axis=1)]
        counts[rows, job] = size[rows, job]
        for given in np.unique(counts[rows, job]):
            these = rows[counts[rows, job] == given]
            nodes, gpus = max(given // per_node, 1), min(given, per_node)
            left = free[these]
            take_parts(left, gpus, np.full(len(these), nodes))
            free[these] = left


def refresh(space: Space, remembered: Ints, limit: Ints) -> Ints:
    """Return a remembered population's counts (K, J), reduced to the limits (J,), to allowed sizes, and to the
    cluster's GPUs.

    If there are too few GPUs, later jobs get 0. The caller has already removed finished jobs.
    """
    counts = space.largest(np.minimum(remembered, limit))
    fits = np.cumsum(counts, axis=1) <= len(space.slots)
    return np.where(fits, counts, 0)


def mutate(parents: Ints, removable: Bools, chance: float, rng: np.random.Generator) -> Ints:
    """Mutate genomes uniformly: each `removable` job (J,) loses all its GPUs with probability `chance`."""
    jobs = len(removable)
    gone = np.zeros((len(parents), jobs + 1), dtype=np.bool_)  # the last column counts idle GPUs
    gone[:, :jobs] = (rng.random((len(parents), jobs)) < chance) & removable
    return np.where(np.take_along_axis(gone, parents, axis=1), jobs, parents)


def fill_and_place(space: Space, wanted: Ints, limit: Ints, order: Ints) -> Ints:
    """Return counts (K, J) near `wanted`: jobs get idle GPUs (`fill`), are placed on nodes, then get GPUs that remain
    (`offer_rest`)."""
    counts = fill(space, space.largest(np.minimum(wanted, limit)), limit, order)
    if not space.cluster.uniform:
        return counts
    counts, free = place_counts(space, counts)
    return offer_rest(space, counts, free, limit, order)


def fill(space: Space, counts: Ints, limit: Ints, order: Ints) -> Ints:
    """Return the counts (K, J) after jobs got idle GPUs in `order` (J,), each up to its `limit` (J,) (ONES §3.2).

    Each round serves all jobs at once; a job gets what earlier jobs leave. GPUs that do not make up a size are offered
    again in the next round.
    """
    counts = counts.copy()
    while True:
        free = (len(space.slots) - counts.sum(axis=1))[:, None]
        wish = np.maximum(space.largest(np.minimum(limit, counts + free)) - counts, 0)
        if not wish.any():
            return counts
        before = np.zeros_like(wish)
        before[:, order] = np.cumsum(wish[:, order], axis=1) - wish[:, order]
        given = np.clip(free - before, 0, wish)
        counts = np.maximum(counts, space.largest(counts + given))


def fill_order(space: Space, rho: Floats) -> Ints:
    """Return the jobs' indices in the order in which they get idle GPUs: new jobs by arrival, then other jobs, the
    shortest remaining time first.

    `rho` (J,) is the completed fraction of each job in this generation. The remaining time is that at the job's present
    size; for a stopped job, at its smallest size.
    """
    new = (space.samples <= 0) & ~space.running
    speed = np.maximum(space.speed(np.where(space.running, space.current, space.smallest)), 1e-9)
    remaining = space.samples * (1.0 / rho - 1.0) / speed
    return np.lexsort((np.arange(len(speed)), np.where(new, 0.0, remaining), ~new))


class SizeBounds:
    """Limit R on each job's GPUs (ONES §3.3), by job id. A job that has run at its limit for some epochs gets twice the
    limit, or its next larger size if that is more.

    A new job's first limit is 1 GPU as in the paper, or its smallest size if that is larger.
    """

    def __init__(self, epochs_before_doubling: int, cap_over_request: float) -> None:
        self.epochs_before_doubling = epochs_before_doubling
        self.cap_over_request = cap_over_request
        self._remembered: dict[int, int] = {}

    def update(self, space: Space, jobs: Sequence[JobView]) -> Ints:
        """Update the limits, and return the limit (J,) of each job of the space. `jobs` are all jobs, fixed jobs
        included."""
        total = space.cluster.gpus
        limit = np.array([self._limit(space, j, total) for j in range(len(space.jobs))], dtype=np.int64)
        self._scale_down(space, limit, jobs, total)
        present = {job.job_id for job in jobs}
        self._remembered = {i: n for i, n in self._remembered.items() if i in present}
        self._remembered.update(zip((job.job_id for job in space.jobs), limit.tolist(), strict=True))
        return limit

    def passed_over(self, space: Space, left_out: Collection[int]) -> None:
        """Halve the limit of each stopped job to which a schedule gives no GPUs (`left_out`)."""
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
        """Reduce the limit of the largest job, if it holds half of the cluster and has run longer than the median job.

        The limit becomes int(2n / (T / median + 1)), for n GPUs and run time T of the job.
        """
        if not space.running.any():
            return
        j = int(np.argmax(space.current))
        gpus, ran = int(space.current[j]), space.jobs[j].running_s
        median = float(np.median([job.running_s for job in jobs if job.shape is not None]))
        if 2 * gpus >= total and ran > median > 0.0:
            limit[j] = max(int(2 * gpus / (ran / median + 1.0)), int(space.smallest[j]))


def stopped(job: JobView) -> bool:
    """Tell whether the job has run before and now waits."""
    return job.shape is None and (job.samples > 0 or job.running_s > 0)


LEAST = {"population": 2, "cap_over_request": 1}


@dataclass(frozen=True)
class OnesSc21Options:
    """Settings of the search; the defaults are the paper's."""

    population: int = 16
    """Number of candidates kept from each generation (K)."""
    generations: int = 30
    """Number of generations in each decision. The next decision continues with the last population, as in the paper."""
    mutation: float = 0.3
    """Probability that a mutation takes all GPUs from a job."""
    epochs_before_removal: int = 2
    """Number of epochs that a job must have trained before a mutation may take its GPUs."""
    epochs_before_doubling: int = 2
    """Number of epochs that a job must run at its limit before the limit is doubled."""
    cap_over_request: float = 4.0
    """Largest number of GPUs of a job, as a multiple of what its user asked for."""
    min_epochs_since_change: int = 1
    """Number of epochs that a running job must have trained since its last change before a schedule may change it
    again."""

    def __post_init__(self) -> None:
        check_options(self, LEAST, {"mutation": 1})


class OnesSc21:
    """ONES as published. It remembers its population, and the limit of each job."""

    name = "ones-sc21"
    options_type = OnesSc21Options

    def __init__(self, options: OnesSc21Options | None = None) -> None:
        self.options = options or OnesSc21Options()
        self._limits = SizeBounds(self.options.epochs_before_doubling, self.options.cap_over_request)
        self._known: dict[int, int] = {}
        self._population = np.zeros((self.options.population, 0), dtype=np.int64)
        """(K, J) GPUs of each job in each candidate, for the jobs of the last decision. `_known` has a job's column by
        its id."""

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
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
        """Return the GPU counts (J,) of the best candidate after all generations, and its score."""
        options = self.options
        done = [job.epochs >= options.epochs_before_removal for job in space.jobs]
        removable = np.array(done, dtype=np.bool_)
        rho = sample_progress(space, rng)
        counts = refresh(space, self._recalled(space), limit)
        counts = fill_and_place(space, counts, limit, fill_order(space, rho))
        costs = remaining_utilisation(space, counts, rho)
        for _ in range(options.generations if space.jobs else 0):
            rho = sample_progress(space, rng)
            parents = genes(space, counts)
            children = uniform_crossover(parents, rng)
            mutants = mutate(parents, removable, options.mutation, rng)
            young = gpus_of_jobs(space, np.concatenate([children, mutants]))
            young = fill_and_place(space, young, limit, fill_order(space, rho))
            counts = np.concatenate([counts, young])
            costs = remaining_utilisation(space, counts, rho)
            keep = np.argsort(costs, kind="stable")[: options.population]
            counts, costs = counts[keep], costs[keep]
        self._population = counts
        self._known = {job.job_id: j for j, job in enumerate(space.jobs)}
        best = int(np.argmin(costs))
        return counts[best], float(costs[best])

    def _recalled(self, space: Space) -> Ints:
        """Return the remembered population as counts (K, J) of the present jobs. Its first candidate is the present
        allocation."""
        recalled = np.tile(space.current, (self.options.population, 1))
        for j, job in enumerate(space.jobs):
            if job.job_id in self._known:
                recalled[1:, j] = self._population[1:, self._known[job.job_id]]
        return recalled


def deploy(space: Space, limit: Ints, best: Ints, min_epochs: int) -> Ints:
    """Return the counts (J,) to carry out: those of the best candidate, if each running job that it changes has trained
    `min_epochs` epochs since its last change.

    Otherwise running jobs keep their GPUs, and waiting jobs start on idle GPUs, up to their limits (J,).
    """
    settled = np.array([job.epochs_since_change >= min_epochs for job in space.jobs], dtype=np.bool_)
    if (settled | ~space.running | (best == space.current)).all():
        return best
    rho = np.clip(space.alpha / (space.alpha + space.beta), LEAST_PROGRESS, 1.0)
    held = np.where(space.running, space.current, limit)
    kept: Ints = fill_and_place(space, space.current[None], held, fill_order(space, rho))[0]
    return kept


def explain(space: Space, jobs: Sequence[JobView], chosen: Ints, best: Ints, min_epochs: int) -> dict[int, Reason]:
    """Return the reason for each job's allocation, by job id.

    `chosen` (J,) are the counts that are carried out, `best` (J,) those of the best candidate. They differ if the best
    candidate may not be deployed yet.
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

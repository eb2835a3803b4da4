"""Evolutionary search: the worth of each size, generations of candidates, and the best candidate that fits on the
nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.ones.candidates import (
    NodeRoom,
    best_of,
    clearing_price,
    dual_bound,
    fill,
    greedy,
    improve,
    mutate,
    repair,
    uniform_crossover,
)
from slurm_ones.ones.deadlines import Promises
from slurm_ones.ones.sizes import UNKNOWN, Borrowed, Changes, Leaves, Reach
from slurm_ones.ones.terms import Caution, Fairness, Outlook, Priced, Situation, Term, Unplaced
from slurm_ones.ones.worth import Choices, worth_of_progress
from slurm_ones.policy.build import fits_nowhere, fixed_jobs, place
from slurm_ones.policy.contract import (
    Allocation,
    Bools,
    ClusterView,
    Floats,
    Ints,
    JobView,
    Schedule,
    Weighed,
    check_options,
)
from slurm_ones.policy.shapes import shape_of
from slurm_ones.policy.tables import Tables, build_tables, predict_each, within

LEAST = {"population": 2, "leap": 1.0, "horizon_s": 1.0, "horizon_share": 0.01, "fair_bound": 0.0}
MOST = {"mutation": 1.0, "sure": 1.0}


@dataclass(frozen=True)
class OnesOptions:
    """Options of `ones`. The defaults were chosen by the ablation in docs/benchmarks/policies.md."""

    population: int = 16
    """Number of candidates kept (K of ONES)."""
    generations: int = 6
    """Number of generations in each decision. The population is kept from one decision to the next."""
    mutation: float = 0.3
    """Probability that a job of a candidate changes its size. On average at most four jobs of a candidate do."""
    goodput: bool = True
    """True to maximise progress (goodput); False to maximise throughput, as ONES does."""
    completion_prices: bool = True
    """True to value progress by the price of a GPU when the job will end; False to use today's price."""
    expect: bool = True
    """True to use the mean of the remaining work; False to draw it from its distribution at each decision, as
    in ONES."""
    placement: bool = True
    """True to predict speeds on the number of nodes that a size takes; False to predict as on one node."""
    own_batch: bool = True
    """True for the batch of highest goodput at each size; False for a batch in proportion to the GPUs, as in ONES."""
    resize_cost: bool = True
    """True if a change must gain more than its pause costs, within `horizon_s`, `horizon_share` and `tenure`."""
    greedy: bool = True
    """True to put greedy solutions into the population."""
    local_search: bool = True
    """True to improve candidates by small moves after crossover and mutation."""
    caution: float = 0.3
    """Number of standard deviations by which the predicted speed of a size is lowered."""
    leap: float = 16.0
    """Limit of growth, as a multiple of the most GPUs that the job has had. Before its first run the limit is the
    number of GPUs that the user asked for (but see `first_size`)."""
    first_size: bool = True
    """True to let a job start with more GPUs than its user asked for if giving them up costs little. The less certain
    its speed, the fewer it gets."""
    horizon_s: float = 200.0
    """Seconds within which a change must gain more than its pause costs. The time since a job last arrived or ended
    counts instead if it is longer."""
    horizon_share: float = 0.5
    """Limit like `horizon_s`, as a share of the job's predicted remaining time. The shortest limit counts."""
    tenure: float = 1.0
    """Limit like `horizon_s`, as a multiple of the job's mean time at one size. The shortest limit counts."""
    borrowed: bool = True
    """True to take preemptions of guests into account; False to count guests as the job's own GPUs."""
    fair_bound: float = 1.5
    """Bound of a job's predicted JCT, as a multiple of its JCT on a fair share of the cluster. A job beyond this bound
    weighs more. 0 switches the bound off."""
    places: bool = True
    """True if gradient exchange across leaf switches counts as slower. The topology and its taper must be known."""
    deadlines: bool = True
    """True to promise deadlines that can be kept, and to keep them."""
    sure: float = 0.9
    """Quantile of the remaining work that is assumed when a deadline is promised."""
    stand: bool = True
    """True to reuse a decision for up to a minute while nothing changes; False to decide at each tick."""
    preempt: bool = False
    """True if a running job may be parked, that is, given no GPUs for a while."""
    kinds: bool = True
    """True to choose each job's kind of GPU, if there are several; False to treat all GPUs as alike."""

    def __post_init__(self) -> None:
        check_options(self, LEAST, MOST)


LARGEST = 1e15
"""Upper bound on a job's progress (samples), epochs and age (seconds)."""
STEADY = 0.97
"""Fraction of the best goodput that the present batch must reach to be kept."""
UNKNOWN_S = 600.0
"""Remaining time, in seconds, that is assumed for a job of unknown speed."""
ENOUGH = 0.9995
"""Share of the upper bound on total worth at which the search ends."""
ROUNDS = 6
"""Number of rounds of local search for each candidate."""


def terms_of(options: OnesOptions, reach: Reach, leaves: Leaves | None) -> tuple[Term, ...]:
    """Return the objective's rules, in the order in which they apply."""
    found: list[Term] = [reach] if leaves is None else [reach, leaves]
    if options.caution:
        found.append(Caution(options.caution))
    if options.fair_bound:
        found.append(Fairness(options.fair_bound))
    if options.resize_cost:
        found.append(Changes(options.horizon_s, options.horizon_share, options.tenure))
    found.append(Borrowed())
    if options.deadlines:
        found.append(Promises(options.sure))
    return (*found, Unplaced())


class Search:
    """Search over GPUs of one kind. It keeps its population, and the most GPUs that each job has had."""

    def __init__(self, options: OnesOptions) -> None:
        self.options = options
        self._reach = Reach(options.leap, options.first_size, options.horizon_s)
        self._leaves = Leaves() if options.places else None
        self.terms = terms_of(options, self._reach, self._leaves)
        """Rules of the objective."""
        self._population = np.zeros((0, 0), dtype=np.int64)
        """(K, J) GPUs of each job in each candidate of the last decision."""
        self._places: dict[int, int] = {}
        """Column of each job in `_population`, by job id."""
        self.most: Mapping[int, int] = {}
        """Largest number of GPUs that each job has had, by job id."""
        self.since = 0.0
        """Unix time at which a job last arrived or ended."""

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """Return the schedule of these jobs, which are in order of submission."""
        fixed = fixed_jobs(cluster, jobs)
        mobile = [job for job in jobs if job.job_id not in fixed]
        running = [job for job in jobs if job.job_id in fixed and job.shape is not None]
        at, may = self.situation(cluster, mobile, running, now)
        priced = self.priced(at, rng)
        choices = self.choices(priced, may)
        columns = self._search(priced, choices, rng)
        tables = at.tables

        wanted = {job.job_id: job.shape.gpus for job in running if job.shape is not None}
        wanted |= {job.job_id: int(tables.sizes[u]) for job, u in zip(mobile, columns, strict=True)}
        worth = choices.value(columns[None])[0] if mobile else np.zeros(0)
        shapes = _placed(cluster, running, [mobile[j] for j in np.argsort(-worth, kind="stable")], wanted)
        allocations = {job.job_id: Allocation(job.shape, job.batch) for job in running if job.shape is not None}
        column = {int(size): u for u, size in enumerate(tables.sizes)}
        said, reasons = dict[int, Reason](), dict(fixed)
        for term in self.terms:
            said = {**term.reasons(priced, columns), **said}  # if several rules decided, the first gives the reason
        for j, job in enumerate(mobile):
            if job.job_id in shapes:
                shape = shapes[job.job_id]
                allocations[job.job_id] = Allocation(shape, int(tables.batch[j, column[shape.gpus]]))
            got, why = allocations.get(job.job_id), said.get(job.job_id)
            reasons[job.job_id] = _reason(job, tables.goodput[j], column, wanted[job.job_id], got, choices.gpus, why)
        parked = frozenset(job.job_id for job in mobile if job.shape is not None and job.job_id not in allocations)
        weighed = weighed_sizes([cluster], tables, choices)
        promises = {job_id: one for term in self.terms for job_id, one in term.promises().items()}
        gains = _gains(tables, choices, columns)
        return Schedule(allocations, reasons, -float(worth.sum()), parked, weighed, gains, promises=promises)

    def remember(self, jobs: Sequence[JobView], now: float) -> None:
        """Update the most GPUs that each job has had, and the time at which a job last arrived or ended."""
        if {job.job_id for job in jobs} != self.most.keys():
            self.since = now
        self.most = {job.job_id: max(self.most.get(job.job_id, 0), job.shape.gpus if job.shape else 0) for job in jobs}

    def situation(
        self, cluster: ClusterView, mobile: Sequence[JobView], running: Sequence[JobView], now: float
    ) -> tuple[Situation, Bools]:
        """Return the first input of the rules, and a mask (J, U) of the columns that each job may have, column 0
        (waiting) included."""
        views = [self._reach.reachable(job, self.most) for job in mobile]
        if not self.options.placement:
            one_node = dict.fromkeys(range(cluster.gpus + 1), 1)
            views = [replace(job, nodes_at=one_node) for job in views]
        if not self.options.borrowed:
            views = [replace(job, borrows=None) for job in views]
        if self._leaves is not None:
            views = self._leaves.tapered(cluster, views)
        tables = build_tables(cluster, views, "best" if self.options.own_batch else "scaled")
        nodes = NodeRoom(cluster, mobile, running, tables.sizes)
        at = Situation(cluster, running, tables, nodes, self.most, now, now - self.since)
        allowed = tables.allowed
        for term in self.terms:
            allowed = term.mask(at, allowed)
        if allowed is not tables.allowed:
            held = (tables.current > 0)[:, None] & (np.arange(len(tables.sizes)) == tables.current[:, None])
            allowed = allowed | held
            tables = replace(tables, allowed=allowed, goodput=np.where(allowed, tables.goodput, 0.0))
        may = allowed.copy()
        may[:, 0] = (tables.current == 0) | self.options.preempt
        return replace(at, tables=_steady(cluster, tables)), may

    def priced(self, at: Situation, rng: np.random.Generator) -> Priced:
        """Return the third input of the rules: speeds, remaining work, and the worth of a unit of each job's
        progress."""
        options, tables, jobs = self.options, at.tables, at.tables.jobs
        speed = tables.goodput if options.goodput else tables.speed
        for term in self.terms:
            speed = term.speed(at, speed)
        remaining = np.array([self._remaining(job, rng) for job in jobs])
        # A job of unknown speed is assumed to be short, as most are. A guess of its speed may be far off.
        strange = ~(tables.allowed & (tables.uncertainty < UNKNOWN)).any(axis=1)
        remaining = np.where(strange, UNKNOWN_S * speed.max(axis=1, initial=0.0), remaining)
        done = np.array([within(job.samples, 0.0, LARGEST) for job in jobs])
        age = np.array([within(at.now - job.submitted, 0.0, LARGEST) for job in jobs])
        outlook = Outlook(**_fields(at), speed=speed, remaining=remaining, done=done, age_s=age)
        weight = np.ones(len(jobs))
        for term in self.terms:
            weight = term.weight(outlook, weight)
        recursive = options.completion_prices
        unit, ends = worth_of_progress(speed, tables.sizes, remaining, weight, at.nodes.gpus, recursive=recursive)
        return Priced(**_fields(outlook), weight=weight, unit=unit, ends=ends)

    def choices(self, at: Priced, may: Bools) -> Choices:
        """Return the sizes that jobs may have, with the worth of each in this decision."""
        worth = at.unit[:, None] * at.speed
        for term in self.terms:
            worth = term.worth(at, worth)
        return Choices(at.tables.sizes, np.where(may, worth, -np.inf), at.tables.current, at.nodes.gpus)

    def _remaining(self, job: JobView, rng: np.random.Generator) -> float:
        epochs = within(job.progress.beta, 0.01, LARGEST)
        if not self.options.expect:
            alpha = within(job.progress.alpha, 0.01, LARGEST)
            epochs = alpha * (1.0 / max(float(rng.beta(alpha, epochs)), 1e-4) - 1.0)
        return max(job.dataset, 1) * max(epochs, 0.01)

    def _search(self, at: Priced, choices: Choices, rng: np.random.Generator) -> Ints:
        """Return the columns (J,) of the best candidate after all generations."""
        options, jobs = self.options, at.tables.jobs
        kept = fill(choices, choices.current)
        least = greedy(choices)
        seeds = [kept, least, choices.current] if options.greedy else [kept, choices.current]
        population = np.concatenate([np.array(seeds), self._recalled(choices, jobs)])
        population = repair(choices, population, kept, rng)
        population = np.concatenate([population, at.nodes.fitted(choices, population)])
        # Worths are below 0 if a promised deadline is missed.
        dear = 2.0 * float(np.abs(choices.value(least[None])).sum()) / max(choices.gpus, 1)
        penalties = [lost for term in self.terms if (lost := term.penalty(at, choices, dear)) is not None]

        def score(candidates: Ints) -> Floats:
            found: Floats = choices.value(candidates).sum(axis=1)
            for lost in penalties:
                found = found - lost(candidates)
            return found

        population, scores = best_of(population, score(population), options.population)
        enough = ENOUGH * dual_bound(choices, clearing_price(choices)) if options.greedy and len(jobs) else np.inf
        for _ in range(options.generations if len(jobs) else 0):
            if scores[0] >= enough:
                break
            parents = population[np.arange(options.population) % len(population)]
            children = uniform_crossover(parents, rng)
            mutants = mutate(choices, parents, options.mutation, rng)
            born = repair(choices, np.concatenate([children, mutants]), least, rng)
            young = improve(choices, born, ROUNDS if options.local_search else 0)
            young = at.nodes.fitted(choices, young)
            if len(penalties) > 1:  # local search ignores penalties, and may make a candidate worse
                young = np.concatenate([young, born])
            population = np.concatenate([population, young])
            scores = np.concatenate([scores, score(young)])
            population, scores = best_of(population, scores, options.population)
        self._population = choices.sizes[population]
        self._places = {job.job_id: j for j, job in enumerate(jobs)}
        best: Ints = population[0]
        return best

    def _recalled(self, choices: Choices, jobs: Sequence[JobView]) -> Ints:
        """Return the last decision's population (K, J) for the present jobs and sizes. A job gets its present size if
        it may not have its last one."""
        if not self._population.size or not jobs:
            return np.zeros((0, len(jobs)), dtype=np.int64)
        places = np.array([self._places.get(job.job_id, -1) for job in jobs])
        gpus = np.where(places >= 0, self._population[:, places], choices.sizes[choices.current])
        columns = np.maximum(np.searchsorted(choices.sizes, gpus, side="right") - 1, 0)
        rows = np.arange(len(jobs))
        return np.where(np.isfinite(choices.worth[rows, columns]), columns, choices.current)


def _steady(cluster: ClusterView, tables: Tables) -> Tables:
    """Return the tables with each running job's present batch at its present size, if it is nearly as good as the
    best."""
    kept = np.array([job.batch for job in tables.jobs], dtype=np.int64)
    fits = [job.limits.min_batch <= job.batch <= job.limits.max_batch for job in tables.jobs]
    rows = np.arange(len(kept))
    asked = np.flatnonzero((tables.current > 0) & (kept != tables.batch[rows, tables.current]) & np.array(fits, bool))
    at = tables.current[asked]
    jobs = [tables.jobs[j] for j in asked]
    own = np.array([job.held_nodes for job in jobs], dtype=np.int64)
    fast, good = predict_each(jobs, own if cluster.uniform else tables.nodes[at], tables.sizes[at], kept[asked])
    steady = good >= STEADY * tables.goodput[asked, at]
    here = (asked[steady], at[steady])
    batch, speed, goodput = tables.batch.copy(), tables.speed.copy(), tables.goodput.copy()
    batch[here], speed[here], goodput[here] = kept[here[0]], fast[steady], good[steady]
    return replace(tables, batch=batch, speed=speed, goodput=goodput)


def _placed(
    cluster: ClusterView, fixed: Sequence[JobView], mobile: Sequence[JobView], wanted: Mapping[int, int]
) -> dict[int, Shape]:
    """Return the shapes for the `wanted` GPUs of the `mobile` jobs, placed in the given order. A running job keeps its
    shape if its new size fits on no nodes."""
    sizes = dict(wanted)
    while True:
        shapes = place(cluster, [*fixed, *mobile], sizes)
        lost = [
            job
            for job in mobile
            if job.shape is not None
            and sizes[job.job_id] not in (0, job.shape.gpus)
            and (job.job_id not in shapes or shapes[job.job_id].gpus < min(sizes[job.job_id], job.shape.gpus))
        ]
        if not lost:
            return shapes
        sizes |= {job.job_id: job.shape.gpus for job in lost if job.shape is not None}


def _fields(found: Situation) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}


WEIGHED = 3
"""Number of sizes that a schedule lists for each job."""


def weighed_sizes(parts: Sequence[ClusterView], tables: Tables, choices: Choices) -> dict[int, tuple[Weighed, ...]]:
    """Return the sizes of highest worth for each job that may change, best first. `parts` are the nodes of each
    kind."""
    if not tables.jobs:
        return {}
    # Of sizes of equal worth the smaller comes first.
    best = np.argsort(-choices.worth, axis=1, kind="stable")[:, :WEIGHED]
    worth = np.take_along_axis(choices.worth, best, axis=1)
    shapes = [shape_of(parts[k], int(size)) for k, size in zip(tables.kind, tables.sizes, strict=True)]
    kinds = [part.kinds[0] if len(parts) > 1 else "" for part in parts]
    found = {}
    for j, (columns, values) in enumerate(zip(best.tolist(), worth.tolist(), strict=True)):
        named = []
        for u, value in zip(columns, values, strict=True):
            shape = tables.jobs[j].shape if u and u == tables.current[j] else shapes[u]
            got = Allocation(shape, int(tables.batch[j, u]), kinds[tables.kind[u]]) if u and shape is not None else None
            if np.isfinite(value):
                named.append(Weighed(got, value))
        found[tables.jobs[j].job_id] = tuple(named)
    return found


def _gains(tables: Tables, choices: Choices, columns: Ints) -> dict[int, float]:
    """Return the gain in worth for each added GPU, by job id, for jobs that grow by guests (`Schedule.gains`)."""
    found = {}
    for j, (job, u) in enumerate(zip(tables.jobs, columns.tolist(), strict=True)):
        more = int(tables.sizes[u] - tables.sizes[tables.current[j]])
        if job.borrows is not None and more > 0:
            found[job.job_id] = float(choices.worth[j, u] - choices.worth[j, tables.current[j]]) / more
    return found


def _reason(
    job: JobView,
    goodput: Floats,
    column: Mapping[int, int],
    wanted: int,
    got: Allocation | None,
    free: int,
    said: Reason | None,
) -> Reason:
    """Return the reason for the allocation `got`. `goodput` (U,) is 0 at a size that the job may not have, `column` the
    index of each size. `wanted` are its GPUs in the best candidate, `free` the GPUs for jobs that may change, `said` a
    rule's reason."""
    gpus, before = got.shape.gpus if got else 0, job.shape.gpus if job.shape else 0
    if not goodput.any():
        return said or fits_nowhere(job)
    smallest = list(column)[int((goodput > 0).argmax())]
    if gpus != wanted or (got is None and smallest > free):
        return reason("no_room", gpus=wanted or smallest)
    if said is not None:
        return said
    if got is None or not before:
        return reason("least_total_time")
    if gpus == before:
        if got.batch != job.batch:
            return reason("better_batch", batch=got.batch, before=job.batch)
        return reason("no_change_repays", seconds=job.resize_s)
    factor = float(goodput[column[gpus]] / max(goodput[column[before]], 1e-300))
    return reason("trains_faster" if factor > 1 else "gives_up_gpus", factor=factor)

"""The policy: what each size is worth, then generations of candidates, then the best that finds room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurm_ones.decide.evolution import best_of, check_options, uniform_crossover
from slurm_ones.decide.job_figures import within
from slurm_ones.decide.ones import explain, places
from slurm_ones.decide.ones.candidates import Nodes, fill, greedy, improve, mutate, repair
from slurm_ones.decide.ones.worth import Choices, Costs, fair_weights, less_costs, worth_of_progress
from slurm_ones.schedule.placement import fixed_jobs, place
from slurm_ones.schedule.places import Move, choose_nodes, matters
from slurm_ones.schedule.policy import Allocation, ClusterView, Floats, Ints, JobView, Schedule, ThroughputModel
from slurm_ones.schedule.tables import Tables, build_tables, predict_each
from slurm_ones.slurm.model import Shape

LEAST = {"population": 2, "leap": 1.0, "horizon_s": 1.0, "horizon_share": 0.01, "fair_bound": 0.0}


@dataclass(frozen=True)
class Options:
    """The defaults are what we found best on generated workloads; see docs/benchmarks.md for the ablation."""

    population: int = 16
    """Candidates kept (K of ONES)."""
    generations: int = 6
    """Per decision; the population lives on."""
    mutation: float = 0.3
    """Chance of a candidate's job to be tried at another size, for a few jobs of each candidate."""
    goodput: bool = True
    """Weigh progress; False weighs samples, as published."""
    completion_prices: bool = True
    """Worth of progress from the price of a GPU when the job will end; False takes today's price for all jobs."""
    expect: bool = True
    """Remaining work is the mean over the progress model; False draws it anew in each decision, as published."""
    placement: bool = True
    """Predict speed on the nodes that a size takes; False as if all were one node."""
    own_batch: bool = True
    """The batch of highest goodput at each size; False in proportion to the GPUs, as published."""
    resize_cost: bool = True
    """Changes must repay their interruption."""
    greedy: bool = True
    """Seed the population with greedy solutions."""
    local_search: bool = True
    """Improve candidates by small moves after crossover and mutation."""
    caution: float = 0.3
    """A doubtful size counts as slower by this many standard deviations of its predicted speed."""
    leap: float = 16.0
    """A job gets at most this multiple of the most GPUs it has had, and what it asked for if it has not run."""
    first_size: bool = True
    """One that has not run may start with as much more than it asked for where giving up GPUs again costs next to
    nothing, as far as its speed is more than a guess."""
    horizon_s: float = 200.0
    """Seconds that a change is expected to last, or else as long as no job has come or gone, where that is longer: what
    it gains in them must exceed what its interruption costs."""
    horizon_share: float = 0.5
    """It must repay within this share of the job's predicted remaining time as well."""
    tenure: float = 1.0
    """And within this multiple of the time that the job has kept its sizes on average: who was changed often is soon
    changed again."""
    fair_bound: float = 1.5
    """A job whose predicted JCT exceeds this multiple of that alone on its share weighs more; 0 switches it off."""
    places: bool = True
    """Where leaf switches or the speeds of nodes are known, say which nodes."""
    contention: bool = True
    """And weigh what sizes across leaf switches cost their job and each other."""
    preempt: bool = False
    """Running jobs may be taken to zero GPUs for a while."""

    def __post_init__(self) -> None:
        check_options(self, LEAST)


LARGEST = 1e15
"""Samples that no job exceeds."""
STEADY = 0.97
"""A batch in force that reaches this share of the best goodput stays."""
UNKNOWN = 0.95
"""Relative deviation from which on a speed is no more than a guess."""
CHEAP = 0.01
"""Share of the time a change lasts up to which giving up GPUs again costs so little that a first size may be tried."""
UNKNOWN_S = 600.0
"""Seconds that a job of which nothing is known is taken to need."""
ROUNDS = 6
"""Of local search for each candidate."""


class Ones:
    """ONES made better. It remembers its population, and the most GPUs that each job has had, by job id."""

    name = "ones"
    options_type = Options

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self._population = np.zeros((0, 0), dtype=np.int64)
        """(K, J) GPUs of each job in each candidate of the last decision."""
        self._places: dict[int, int] = {}
        """Column there, by job id."""
        self._most: dict[int, int] = {}
        self._last_arrival_or_end = 0.0

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.schedule.policy.Policy`."""
        jobs = sorted(jobs, key=lambda job: (job.submitted, job.job_id))
        fixed = fixed_jobs(cluster, jobs)
        self._remember(jobs, now)
        mobile = [job for job in jobs if job.job_id not in fixed]
        running = [job for job in jobs if job.job_id in fixed and job.shape is not None]
        tables = self._tables(cluster, mobile)
        placed = self.options.places and matters(cluster)
        shares = places.exchange_shares(tables) if placed else np.zeros(tables.speed.shape)
        if placed and self.options.contention:
            tables = places.slower_across(cluster, tables, shares)
        nodes = Nodes(cluster, mobile, running, tables.sizes)
        choices = self._choices(tables, nodes.gpus, now, rng)
        weighs = placed and self.options.contention
        contention = places.Contention.of(cluster, tables, shares) if weighs else None
        columns = self._search(choices, mobile, nodes, contention, rng)

        wanted = {job.job_id: job.shape.gpus for job in running if job.shape is not None}
        wanted |= {job.job_id: int(tables.sizes[u]) for job, u in zip(mobile, columns, strict=True)}
        worth = choices.value(columns[None])[0] if mobile else np.zeros(0)
        shapes = _placed(cluster, running, [mobile[j] for j in np.argsort(-worth, kind="stable")], wanted)
        allocations = {job.job_id: Allocation(job.shape, job.batch) for job in running if job.shape is not None}
        column = {int(size): u for u, size in enumerate(tables.sizes)}
        for j, job in enumerate(mobile):
            if job.job_id in shapes:
                shape = shapes[job.job_id]
                allocations[job.job_id] = Allocation(shape, int(tables.batch[j, column[shape.gpus]]))
        if placed:
            rows = {job.job_id: j for j, job in enumerate(mobile)}
            at = {i: float(shares[j, column[allocations[i].shape.gpus]]) for i, j in rows.items() if i in allocations}
            chosen = choose_nodes(cluster, jobs, fixed, allocations, at, self._moves(mobile, now))
            allocations |= {i: replace(allocations[i], nodes=names) for i, names in chosen.items()}
        parked = frozenset(job.job_id for job in mobile if job.shape is not None and job.job_id not in allocations)
        reasons = explain.reasons(jobs, fixed, tables, wanted, allocations, choices.gpus)
        return Schedule(allocations, reasons, -float(worth.sum()), parked, explain.weighed(cluster, tables, choices))

    def _remember(self, jobs: Sequence[JobView], now: float) -> None:
        if {job.job_id for job in jobs} != self._most.keys():
            self._last_arrival_or_end = now
        self._most = {job.job_id: max(self._most.get(job.job_id, 0), _gpus(job)) for job in jobs}

    def _reachable(self, job: JobView) -> JobView:
        """The job with the sizes that it may grow to from what it has had, its smallest at least."""
        most = self._most[job.job_id]
        bound = self.options.leap * most if most else max(job.requested, 1)
        if not most and self._tries(job):
            bound *= self.options.leap
        counts = job.limits.gpus
        if not counts or counts[-1] <= bound:
            return job
        near = tuple(n for n in counts if n <= max(bound, counts[0]))
        return replace(job, limits=replace(job.limits, gpus=near))

    def _tries(self, job: JobView) -> bool:
        """Whether a first size that turns out too large costs next to nothing."""
        return self.options.first_size and _shrink_s(job) <= CHEAP * self.options.horizon_s

    def _tables(self, cluster: ClusterView, mobile: Sequence[JobView]) -> Tables:
        views = [self._reachable(job) for job in mobile]
        if not self.options.placement:
            views = [replace(job, model=_OneNode(job.model)) for job in views]
        tables = build_tables(cluster, views, "best" if self.options.own_batch else "scaled")
        return _steady(cluster, self._sure_enough(tables))

    def _sure_enough(self, tables: Tables) -> Tables:
        """The tables without sizes beyond what a job that has not run asked for whose speed is no more than a guess."""
        new = [j for j, job in enumerate(tables.jobs) if not self._most[job.job_id] and self._tries(job)]
        if not new:
            return tables
        asked = np.array([max(tables.jobs[j].requested, 1, min(tables.jobs[j].limits.gpus, default=0)) for j in new])
        allowed = tables.allowed.copy()
        allowed[new] &= (tables.sizes <= asked[:, None]) | (tables.uncertainty[new] < UNKNOWN)
        return replace(tables, allowed=allowed, goodput=np.where(allowed, tables.goodput, 0.0))

    def _choices(self, tables: Tables, gpus: int, now: float, rng: np.random.Generator) -> Choices:
        """What each size is worth in this decision."""
        options, jobs = self.options, tables.jobs
        speed = tables.goodput if options.goodput else tables.speed
        sure = speed * np.clip(1.0 - options.caution * tables.uncertainty, 0.05, 1.0)
        running = tables.current > 0
        remaining = np.array([self._remaining(job, rng) for job in jobs])
        # A job of which nothing is known is taken for a short one, as most are: a guess at its speed may be far off.
        strange = ~(tables.allowed & (tables.uncertainty < UNKNOWN)).any(axis=1)
        remaining = np.where(strange, UNKNOWN_S * sure.max(axis=1, initial=0.0), remaining)
        done = np.array([within(job.samples, 0.0, LARGEST) for job in jobs])
        age = np.array([within(now - job.submitted, 0.0, LARGEST) for job in jobs])
        weight = fair_weights(sure, tables.sizes, done, remaining, age, gpus, options.fair_bound)
        worth, ends = worth_of_progress(
            sure, tables.sizes, remaining, weight, gpus, recursive=options.completion_prices
        )
        value = worth[:, None] * sure
        if options.resize_cost:
            value = less_costs(value, tables.current, self._costs(jobs, ends, now))
        may = tables.allowed.copy()
        may[:, 0] = ~running | options.preempt
        return Choices(tables.sizes, np.where(may, value, -np.inf), tables.current, gpus)

    def _costs(self, jobs: Sequence[JobView], ends: Floats, now: float) -> Costs:
        """What changes cost, and how long they last. `ends` (J,) are seconds to each job's end."""
        options = self.options
        grow = np.array([within(job.resize_s, 0.0, LARGEST) for job in jobs])
        shrink = np.array([_shrink_s(job) for job in jobs])
        prepare = np.array([within(job.prepare_s, 0.0, LARGEST) for job in jobs])
        # Where no job came or went for long, none is expected for as long again.
        horizon = max(options.horizon_s, now - self._last_arrival_or_end)
        tenure = np.array([_tenure(job) for job in jobs])
        # Who has run for a short while may be changed again soon; where that costs next to nothing, it is no reason.
        tries = np.array([self._tries(job) for job in jobs], dtype=np.bool_)
        tenure = np.where(tries, np.maximum(tenure, options.horizon_s), tenure)
        lasts = np.minimum(np.minimum(horizon, options.horizon_share * ends), options.tenure * tenure)
        return Costs(grow, shrink, prepare, lasts)

    def _moves(self, mobile: Sequence[JobView], now: float) -> dict[int, Move]:
        """What it costs each running job to move at its size, and for how long it then stays there."""
        horizon = max(self.options.horizon_s, now - self._last_arrival_or_end)
        return {
            job.job_id: Move(within(job.resize_s, 0.0, LARGEST), min(horizon, self.options.tenure * _tenure(job)))
            for job in mobile
            if job.shape is not None and len(job.nodes) > 1
        }

    def _remaining(self, job: JobView, rng: np.random.Generator) -> float:
        """Progress still to come, in samples of the base batch."""
        epochs = within(job.progress.beta, 0.01, LARGEST)
        if not self.options.expect:
            alpha = within(job.progress.alpha, 0.01, LARGEST)
            epochs = alpha * (1.0 / max(float(rng.beta(alpha, epochs)), 1e-4) - 1.0)
        return max(job.dataset, 1) * max(epochs, 0.01)

    def _search(
        self,
        choices: Choices,
        jobs: Sequence[JobView],
        nodes: Nodes,
        contention: places.Contention | None,
        rng: np.random.Generator,
    ) -> Ints:
        """Columns (J,) of the best candidate after all generations."""
        options = self.options
        kept = fill(choices, choices.current)
        least = greedy(choices)
        seeds = [kept, least, choices.current] if options.greedy else [kept, choices.current]
        population = np.concatenate([np.array(seeds), self._recalled(choices, jobs)])
        population = repair(choices, population, kept, rng)
        dear = 2.0 * float(choices.value(least[None]).sum()) / max(choices.gpus, 1)

        def score(candidates: Ints) -> Floats:
            found: Floats = choices.value(candidates).sum(axis=1) - dear * nodes.unplaced(candidates, choices.current)
            return found if contention is None else found - contention.penalty(choices.worth, candidates)

        population, scores = best_of(population, score(population), options.population)
        for _ in range(options.generations if len(jobs) else 0):
            parents = population[np.arange(options.population) % len(population)]
            children = uniform_crossover(parents, rng)
            mutants = mutate(choices, parents, options.mutation, rng)
            young = repair(choices, np.concatenate([children, mutants]), least, rng)
            young = improve(choices, young, ROUNDS if options.local_search else 0)
            population = np.concatenate([population, young])
            scores = np.concatenate([scores, score(young)])
            population, scores = best_of(population, scores, options.population)
        self._population = choices.sizes[population]
        self._places = {job.job_id: j for j, job in enumerate(jobs)}
        best: Ints = population[0]
        return best

    def _recalled(self, choices: Choices, jobs: Sequence[JobView]) -> Ints:
        """The remembered population (K, J) for today's jobs and sizes: cut to what each may have now."""
        if not self._population.size or not jobs:
            return np.zeros((0, len(jobs)), dtype=np.int64)
        places = np.array([self._places.get(job.job_id, -1) for job in jobs])
        gpus = np.where(places >= 0, self._population[:, places], choices.sizes[choices.current])
        columns = np.maximum(np.searchsorted(choices.sizes, gpus, side="right") - 1, 0)
        rows = np.arange(len(jobs))
        found: Ints = np.where(np.isfinite(choices.worth[rows, columns]), columns, choices.current)
        return found


class _OneNode:
    """A model of throughput asked as if every size were in one node."""

    def __init__(self, model: ThroughputModel) -> None:
        self._model = model

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return self._model.throughput(np.ones_like(nodes), gpus, batches)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return self._model.uncertainty(np.ones_like(nodes), gpus, batches)


def _steady(cluster: ClusterView, tables: Tables) -> Tables:
    """The tables with the batch in force at a running job's size, where that is nearly as good as the best: a batch
    that follows every new figure would never settle."""
    kept = np.array([job.batch for job in tables.jobs], dtype=np.int64)
    fits = [job.limits.min_batch <= job.batch <= job.limits.max_batch for job in tables.jobs]
    rows = np.arange(len(kept))
    asked = np.flatnonzero((tables.current > 0) & (kept != tables.batch[rows, tables.current]) & np.array(fits, bool))
    at = tables.current[asked]
    jobs = [tables.jobs[j] for j in asked]
    own = np.array([job.shape.nodes if job.shape else 0 for job in jobs], dtype=np.int64)
    fast, good = predict_each(jobs, own if cluster.uniform else tables.nodes[at], tables.sizes[at], kept[asked])
    steady = good >= STEADY * tables.goodput[asked, at]
    here = (asked[steady], at[steady])
    batch, speed, goodput = tables.batch.copy(), tables.speed.copy(), tables.goodput.copy()
    batch[here], speed[here], goodput[here] = kept[here[0]], fast[steady], good[steady]
    return replace(tables, batch=batch, speed=speed, goodput=goodput)


def _placed(
    cluster: ClusterView, fixed: Sequence[JobView], mobile: Sequence[JobView], wanted: Mapping[int, int]
) -> dict[int, Shape]:
    """Shapes for `wanted` GPUs, `mobile` jobs in order of precedence. A running job that would grow or
    shrink where nodes are too fragmented stays as it is; with every running job as it is there is always room."""
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


def _tenure(job: JobView) -> float:
    """Seconds that the job has kept its sizes on average, also as the last one may end now."""
    return within(job.running_s, 0.0, LARGEST) / max(job.resizes, 1)


def _shrink_s(job: JobView) -> float:
    """Seconds that giving up GPUs interrupts the job."""
    return within(job.resize_s if job.shrink_s is None else job.shrink_s, 0.0, LARGEST)


def _gpus(job: JobView) -> int:
    return job.shape.gpus if job.shape else 0

"""GPUs of several kinds: first a kind is chosen for each job, then a search is made within each kind.

worth.py needs one price for all GPUs. So a GPU of any kind counts as a number of GPUs of the first kind. This number is
the ratio of their prices when all jobs compete (`assign`); at first it is the ratio of the median job's speeds. The
method is exact as long as this ratio does not change.

A job changes its kind only if this repays the usual costs of a change. If the search within the new kind gives it too
few GPUs, it keeps its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.ones.candidates import NodeRoom
from slurm_ones.ones.deadlines import pause_s, reserve_s, work_of
from slurm_ones.ones.search import Search, weighed_sizes
from slurm_ones.ones.worth import Choices
from slurm_ones.policy.build import fixed_jobs
from slurm_ones.policy.contract import Allocation, Bools, ClusterView, Floats, Ints, JobView, Schedule
from slurm_ones.policy.ledger import free_of_kind
from slurm_ones.policy.tables import Tables, side_by_side

SWEEPS, HALVINGS = 4, 18
"""Largest number of sweeps; each sets the price of one kind of GPU after another. Number of bisections that find one
price."""
STEPS = 100
"""Largest number of steps and trades by which one solution is improved."""
OFFERS = 6
"""Number of columns that each job offers to take in a trade."""
TRIED, CELLS = 16, 20_000
"""Largest number of offers that are tried, the cheapest first; fewer with many jobs, so that at most `CELLS` cells of
`worth` are visited."""
LEAST = 1e-9
"""Smallest gain that counts, as a fraction of the total worth."""


def assign(worth: Floats, sizes: Ints, kind: Ints, gpus: Ints, current: Ints) -> tuple[Ints, Floats]:
    """Return columns (J,) of high total worth, and the price (K,) of a GPU of each kind.

    `worth` (J, U) is -inf at a column that the job may not have. Column u takes `sizes[u]` GPUs of the kind `kind[u]`;
    in column 0 the job waits. `gpus` (K,) is the number of GPUs of each kind. The present columns `current` (J,) must
    fit; the result is worth at least as much.
    """
    used = np.zeros((len(sizes), len(gpus)), dtype=np.int64)
    used[np.arange(1, len(sizes)), kind[1:]] = sizes[1:]
    if not len(worth):
        return np.zeros(0, dtype=np.int64), np.zeros(len(gpus))
    prices = _prices(worth, used, gpus)
    fitted = _fitted(worth, used, gpus, prices, current)
    rows = np.arange(len(worth))
    better = fitted is not None and float(worth[rows, fitted].sum()) > float(worth[rows, current].sum())
    start = fitted if fitted is not None and better else current
    return improved(worth, used, gpus, start, prices), prices


def _prices(worth: Floats, used: Ints, gpus: Ints) -> Floats:
    """Return the prices (K,) at which jobs want about as many GPUs of each kind as exist."""
    finite = np.where(np.isfinite(worth), worth, 0.0)
    most = float((finite[:, 1:] / np.maximum(used.sum(axis=1)[1:], 1)).max(initial=0.0))
    prices = np.zeros(len(gpus))
    for _ in range(SWEEPS):
        before = prices.copy()
        for k in range(len(gpus)):
            low, high = 0.0, 2.0 * most
            prices[k] = 0.0
            if _wanted(worth, used, prices)[k] <= gpus[k]:
                continue
            for _ in range(HALVINGS):
                prices[k] = (low + high) / 2
                if _wanted(worth, used, prices)[k] > gpus[k]:
                    low = prices[k]
                else:
                    high = prices[k]
            prices[k] = high
        if np.allclose(prices, before, rtol=1e-3):
            break
    return prices


def _wanted(worth: Floats, used: Ints, prices: Floats) -> Ints:
    found: Ints = used[(worth - used @ prices).argmax(axis=1)].sum(axis=0)
    return found


def _fitted(worth: Floats, used: Ints, gpus: Ints, prices: Floats, current: Ints) -> Ints | None:
    """Return for each job the column with the highest worth minus price, out of the columns that still fit. Running
    jobs choose first, then the jobs that lose most by waiting. Return None if a running job would get no GPUs."""
    left = gpus.copy()
    net = worth - used @ prices
    order = np.lexsort((-(net.max(axis=1) - np.maximum(net[:, 0], -1e300)), current == 0))
    columns = np.zeros(len(worth), dtype=np.int64)
    for j in order.tolist():
        possible = np.where((used <= left).all(axis=1), net[j], -np.inf)
        u = int(possible.argmax())
        if not np.isfinite(possible[u]):
            return None
        columns[j] = u
        left -= used[u]
    return columns


def improved(worth: Floats, used: Ints, gpus: Ints, columns: Ints, prices: Floats) -> Ints:
    """Return the columns (J,) after steps and trades that each raise the total worth. In a step one job changes its
    column. In a trade a second job also gives up GPUs, or its kind."""
    columns = columns.copy()
    rows = np.arange(len(columns))
    net = worth - used @ prices
    offers = np.argsort(-net, axis=1, kind="stable")[:, :OFFERS]
    held = worth[rows, columns]
    least = LEAST * max(float(np.abs(held[np.isfinite(held)]).sum()), 1e-300)
    for _ in range(STEPS):
        left = gpus - used[columns].sum(axis=0)
        mine = used[columns]
        gain = worth - np.where(np.isfinite(held), held, 0.0)[:, None]
        step = np.where(_fits(used, left + mine), gain, -np.inf)
        j, u = divmod(int(step.argmax()), len(used))
        if step[j, u] > least:
            columns[j], held[j] = u, worth[j, u]
            continue
        trade = _trade(worth, used, left, columns, gain, net, offers)
        if trade is None or trade[0] <= least:
            break
        _, i, a, j, u = trade
        columns[i], columns[j] = a, u
        held[i], held[j] = worth[i, a], worth[j, u]
    return columns


def _fits(used: Ints, room: Ints) -> Bools:
    found: Bools = np.all(used <= room[..., None, :], axis=-1)
    return found


def _trade(
    worth: Floats, used: Ints, left: Ints, columns: Ints, gain: Floats, net: Floats, offers: Ints
) -> tuple[float, int, int, int, int] | None:
    """Return the best trade as (gain, i, column of i, j, column of j); None if there is none. Job i moves, and job j
    takes GPUs that i gave up."""
    rows = np.arange(len(columns))
    lost = net[rows, columns][:, None] - net[rows[:, None], offers]
    lost = np.where(offers == columns[:, None], np.inf, lost)
    asked = np.argsort(lost, axis=None, kind="stable")[: min(TRIED, CELLS // worth.size)]
    best: tuple[float, int, int, int, int] | None = None
    for at in asked.tolist():
        i, o = divmod(at, offers.shape[1])
        a = int(offers[i, o])
        if not np.isfinite(lost[i, o]) or not np.isfinite(worth[i, a]):
            continue
        room = left + used[columns[i]] - used[a]
        both = np.where(_fits(used, room + used[columns]), gain, -np.inf)
        both[i] = -np.inf
        j, u = divmod(int(both.argmax()), len(used))
        total = float(both[j, u]) + float(gain[i, a])
        if np.isfinite(total) and (best is None or total > best[0]):
            best = total, i, a, j, u
    return best


ROUNDS = 3
"""Largest number of attempts to assign kinds; after a failure of the last one, all jobs keep their kind."""
DEAREST = 30.0
"""Largest price of a GPU of any kind, as a multiple of the first kind's; the smallest is the inverse."""


@dataclass(frozen=True)
class _Decision:
    """Input of one decision; `jobs` are in order of submission."""

    cluster: ClusterView
    jobs: Sequence[JobView]
    fixed: Mapping[int, Reason]
    held: Mapping[int, tuple[str, ...]]
    """Kinds of the GPUs that each job holds now, by job id."""
    now: float
    rng: np.random.Generator


@dataclass(frozen=True)
class _Try:
    """One attempt at assigning jobs to kinds."""

    columns: Ints
    """(J,) column of each job."""
    kinds: Mapping[int, str]
    """Kind of GPU for which each job is scheduled, by job id."""
    spread: Set[int]
    """Ids of jobs that no search schedules: they have GPUs of several kinds, or GPUs outside this cluster."""


@dataclass(frozen=True)
class _Wanted:
    """Kind and size of each job that may change, for the highest total worth over all kinds."""

    jobs: Sequence[JobView]
    tables: Tables
    choices: Choices
    columns: Ints
    """(J,) column of each job; 0 if it waits."""
    prices: Floats
    """(K,) price of a GPU of each kind."""


class ByKind:
    """Search over several kinds of GPU: one search for each kind, with prices relative to the first kind."""

    def __init__(self, search: Search) -> None:
        """Create the search. `search` computes the worth over all kinds; the searches within a kind have its
        options."""
        self._search = search
        self._sure = search.options.sure
        self._within: dict[str, Search] = {}
        self._equivalents: dict[str, float] = {}
        self._promised_on: dict[int, str] = {}
        """Kind of GPU on which each deadline was promised, by job id."""

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """Return the schedule of these jobs, which are in order of submission."""
        held = {job.job_id: cluster.kinds_held(job) for job in jobs}
        of = _Decision(cluster, jobs, fixed_jobs(cluster, jobs), held, now, rng)
        wanted = self._wanted(of)
        columns, current = wanted.columns.copy(), wanted.tables.current
        for attempt in range(ROUNDS + 1):
            tried = self._tried(of, wanted, columns)
            found = {kind: self._within_kind(of, kind, wanted, tried) for kind in cluster.kinds}
            back = self._back(of, wanted, tried, found)
            if not back:
                break
            if attempt == ROUNDS - 1:
                back = list(range(len(wanted.jobs)))
            columns[back] = current[back]
        return self._joined(of, wanted, tried, found)

    def _wanted(self, of: _Decision) -> _Wanted:
        """Return a kind and a size for each job, for the highest total worth, without regard to room on the nodes."""
        cluster, found = of.cluster, []
        jobs = [job for job in of.jobs if job.job_id not in of.fixed]
        fixed = [job for job in of.jobs if job.job_id in of.fixed]
        for kind in cluster.kinds:
            runs = [bool(of.held[job.job_id]) and _slowest(job, of.held[job.job_id]) == kind for job in jobs]
            views = [job.on_kind(kind, runs=there) for job, there in zip(jobs, runs, strict=True)]
            # Nodes and deadlines are handled by the search within the kind.
            views = [replace(view, nodes={}, smaller=None, joins=False, nodes_at=None, deadline=None) for view in views]
            found.append(self._search.situation(cluster.of_kind(kind), views, [], of.now))
        # The pause for giving up GPUs is handled by the search within a kind.
        tables = side_by_side(
            [replace(job, shrink_s=None, deadline=None) for job in jobs], [at.tables for at, _ in found]
        )
        waits = np.logical_and.reduce([mine[:, 0] for _, mine in found])
        may = np.concatenate([waits[:, None], *(mine[:, 1:] for _, mine in found)], axis=1)
        there = free_of_kind(cluster, fixed)
        self._equivalents = self._known(cluster, tables)
        each = np.array([self._equivalents[kind] for kind in cluster.kinds])
        costs = np.where(tables.kind >= 0, each[tables.kind], 0.0) * tables.sizes
        nodes = NodeRoom(cluster, jobs, [job for job in fixed if job.shape is not None], tables.sizes)
        nodes.gpus = round(float(each @ there))
        at = replace(found[0][0], cluster=cluster, tables=replace(tables, sizes=costs), nodes=nodes)
        priced = self._search.priced(at, of.rng)
        choices = self._search.choices(priced, may & self._in_time(of, jobs, tables, priced.speed))
        columns, prices = assign(choices.worth, tables.sizes, tables.kind, there, tables.current)
        self._learn(cluster, prices)
        return _Wanted(jobs, tables, choices, columns, prices)

    def _in_time(self, of: _Decision, jobs: Sequence[JobView], tables: Tables, speed: Floats) -> Bools:
        """Return the columns (J, U) that deadlines allow; a job's present column is always allowed.

        A job with a promise keeps its kind of GPU or, if it waits, the promise's. Any other waiting job with a deadline
        may use the kinds on which it could end in time, or every kind if there are none.
        """
        found, kinds = np.ones(speed.shape, dtype=np.bool_), of.cluster.kinds
        for j, job in enumerate(jobs):
            if job.deadline is None or not job.deadline > of.now or (job.shape is not None and not job.promised):
                continue
            due_s, held = job.deadline - of.now, of.held[job.job_id]
            left_s = due_s - reserve_s(due_s, pause_s(job)) - pause_s(job)
            ends = speed[j] * left_s >= work_of(job, self._sure)
            on = {kinds[k] for k in set(tables.kind[1:][ends[1:]].tolist())}
            if job.promised and (len(held) == 1 or self._promised_on.get(job.job_id) in kinds):
                on = {held[0] if len(held) == 1 else self._promised_on[job.job_id]}
            if on:
                found[j] = np.isin(tables.kind, [-1, *(k for k, kind in enumerate(kinds) if kind in on)])
                found[j, tables.current[j]] = True
        return found

    def _known(self, cluster: ClusterView, tables: Tables) -> dict[str, float]:
        if self._equivalents.keys() >= set(cluster.kinds):
            return self._equivalents
        return dict(zip(cluster.kinds, _relative_speeds(tables, len(cluster.kinds)).tolist(), strict=True))

    def _learn(self, cluster: ClusterView, prices: Floats) -> None:
        """Move the relative price of each kind half way, in logarithms, to the ratio of `prices`; no change if a price
        is 0."""
        if (prices <= 0).any():
            return
        ratio = np.clip(prices / prices[0], 1.0 / DEAREST, DEAREST)
        for kind, new in zip(cluster.kinds, ratio.tolist(), strict=True):
            self._equivalents[kind] = float(np.sqrt(self._equivalents[kind] * new))

    def _tried(self, of: _Decision, wanted: _Wanted, columns: Ints) -> _Try:
        """Return the attempt in which each job is scheduled on the kind of its column. A waiting job is on the kind
        with the largest gain."""
        kind, tables, kinds = wanted.tables.kind, wanted.tables, of.cluster.kinds
        net = wanted.choices.worth - np.where(kind >= 0, wanted.prices[kind], 0.0) * tables.sizes
        best = net[:, 1:].argmax(axis=1) + 1 if net.shape[1] > 1 else np.zeros(len(net), dtype=np.int64)
        at = np.where(columns > 0, columns, best).tolist()
        on = {job.job_id: kinds[max(int(kind[u]), 0)] for job, u in zip(wanted.jobs, at, strict=True)}
        on |= {job_id: (*of.held[job_id], *kinds)[0] for job_id in of.fixed}
        stays = np.flatnonzero(columns == tables.current).tolist()
        spread = {wanted.jobs[j].job_id for j in stays if len(of.held[wanted.jobs[j].job_id]) > 1}
        keep = [job.job_id for job in of.jobs if job.job_id in of.fixed and job.shape is not None]
        return _Try(columns.copy(), on, spread | {job_id for job_id in keep if len(of.held[job_id]) != 1})

    def _within_kind(self, of: _Decision, kind: str, wanted: _Wanted, tried: _Try) -> Schedule:
        """Return the schedule of the jobs of one kind. A job that changes to this kind counts as waiting."""
        row = {job.job_id: j for j, job in enumerate(wanted.jobs)}
        mine = []
        for job in of.jobs:
            if job.job_id in tried.spread or tried.kinds[job.job_id] != kind:
                continue
            # A job that runs on a kind that it does not accept stays as it is, unless it leaves this kind.
            view = job.on_kind(kind, runs=tuple(of.held[job.job_id]) == (kind,))
            if job.shape is not None and view.shape is None:
                gpus = int(wanted.tables.sizes[tried.columns[row[job.job_id]]])
                view = replace(view, requested=max(job.requested, gpus))
            mine.append(view)
        part = of.cluster.of_kind(kind).without([job for job in of.jobs if job.job_id in tried.spread])
        if kind not in self._within:
            self._within[kind] = Search(self._search.options)
        within = self._within[kind]
        within.most, within.since = self._search.most, self._search.since
        return within.decide(part, mine, of.now, of.rng)

    def _back(self, of: _Decision, wanted: _Wanted, tried: _Try, found: Mapping[str, Schedule]) -> list[int]:
        """Return the rows of the running jobs that gain nothing by another kind, at the size that they get on it."""
        tables, worth, back = wanted.tables, wanted.choices.worth, []
        for j, job in enumerate(wanted.jobs):
            kind, now = tried.kinds[job.job_id], int(tables.current[j])
            if job.shape is None or tried.columns[j] == now or tuple(of.held[job.job_id]) == (kind,):
                continue
            got = found[kind].allocations.get(job.job_id)
            if got is None:
                back.append(j)
                continue
            at = (tables.kind == of.cluster.kinds.index(kind)) & (tables.sizes == got.shape.gpus)
            less = got.shape.gpus < tables.sizes[tried.columns[j]]
            if less and float(np.where(at, worth[j], -np.inf).max()) <= worth[j, now]:
                back.append(j)
        return back

    def _joined(self, of: _Decision, wanted: _Wanted, tried: _Try, found: Mapping[str, Schedule]) -> Schedule:
        allocations: dict[int, Allocation] = {}
        reasons: dict[int, Reason] = {}
        for kind, schedule in found.items():
            allocations |= {id_: replace(got, kind=kind) for id_, got in schedule.allocations.items()}
            reasons |= schedule.reasons
        for job in of.jobs:
            if job.job_id in tried.spread and job.shape is not None:
                allocations[job.job_id] = Allocation(job.shape, job.batch)
                reasons[job.job_id] = of.fixed.get(job.job_id) or reason(
                    "several_kinds", kinds=", ".join(of.held[job.job_id])
                )
        reasons |= self._changes(of, wanted, tried, allocations)
        allocations = {job.job_id: allocations[job.job_id] for job in of.jobs if job.job_id in allocations}
        reasons = {job.job_id: reasons[job.job_id] for job in of.jobs}
        parts = [of.cluster.of_kind(kind) for kind in of.cluster.kinds]
        weighed = weighed_sizes(parts, wanted.tables, wanted.choices)
        parked = frozenset().union(*(schedule.parked for schedule in found.values()))
        score = sum(schedule.score for schedule in found.values())
        promises = {id_: one for schedule in found.values() for id_, one in schedule.promises.items()}
        given = {job.job_id for job in of.jobs if job.promised} | {id_ for id_, one in promises.items() if one.given}
        self._promised_on = {id_: tried.kinds[id_] for id_ in given if id_ not in tried.spread}
        gains = {id_: gain for schedule in found.values() for id_, gain in schedule.gains.items()}
        return Schedule(allocations, reasons, score, parked, weighed, gains, promises=promises)

    def _changes(
        self, of: _Decision, wanted: _Wanted, tried: _Try, allocations: Mapping[int, Allocation]
    ) -> dict[int, Reason]:
        """Return the reason of each job that changes its kind."""
        tables, found = wanted.tables, {}
        for j, job in enumerate(wanted.jobs):
            kind, got = tried.kinds[job.job_id], allocations.get(job.job_id)
            if job.shape is None or got is None or job.job_id in tried.spread or tuple(of.held[job.job_id]) == (kind,):
                continue
            at = (tables.kind == of.cluster.kinds.index(kind)) & (tables.sizes == got.shape.gpus)
            speed = float(np.where(at, tables.goodput[j], 0.0).max())
            factor = speed / max(float(tables.goodput[j, tables.current[j]]), 1e-300)
            before = ", ".join(of.held[job.job_id])
            faster = reason("faster_kind", kind=kind, before=before, factor=factor)
            found[job.job_id] = faster if factor > 1 else reason("leaves_kind", kind=kind, before=before, factor=factor)
        return found


def _slowest(job: JobView, kinds: Sequence[str]) -> str:
    if len(kinds) < 2 or not job.on or job.shape is None:
        return kinds[0]
    at = np.array([job.shape.nodes]), np.array([job.shape.gpus]), np.array([job.batch])
    known = [kind for kind in kinds if kind in job.on] or list(kinds)
    return min(known, key=lambda kind: float(job.on.get(kind, job.model).throughput(*at)[0]))


def _relative_speeds(tables: Tables, count: int) -> Floats:
    """Return the speed (K,) of a GPU of each kind relative to the first kind: the median over jobs that can use both; 1
    without any."""
    each = np.where(tables.allowed, tables.goodput / np.maximum(tables.sizes, 1), 0.0)
    best = np.stack([each[:, tables.kind == k].max(axis=1, initial=0.0) for k in range(count)])
    found = np.ones(count)
    for k in range(1, count):
        both = (best[0] > 0) & (best[k] > 0)
        found[k] = float(np.median(best[k, both] / best[0, both])) if both.any() else 1.0
    return found

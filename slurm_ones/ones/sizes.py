"""Rules of the objective about sizes: growth limits, costs of changes, loss of guests, leaf switches.

**First size.** A first size beyond the request may turn out too large, with a chance of about the relative deviation σ
of its predicted speed. Then the job gives up GPUs again, at a pause of p seconds. The guard against unsteady figures
allows that four pauses later (`rules.job_rules`). So trying costs σ · 5p of the time H for which a size is expected to
last. The size counts as 1 − σ · 5p / H of its worth. Well-known curves lose nothing, and short pauses leave most sizes
open. Uncertain sizes with long pauses must promise much more. A guessed speed promises nothing.

**Costs of a change.** In a pause the job waits and its new GPUs are held. That costs (w + λn) a second, w the weight of
the job's waiting and λ the price of a GPU. At the job's best size n, w + λn equals the worth v g(n) of training at n.
So a pause costs the worth of the new size. A change from n to m that lasts L seconds, p of them a pause, brings v g(m)
(L − p) − v g(n) L.

**Guests.** A job's GPUs beyond its own are borrowed, in guests that Slurm preempts for others. So a change lasts at
most as long as a guest is expected to. With k guests, each lost at a rate r at a cost of c seconds, a size counts as 1
− k r c of its worth. That is nearly 1 if the other blocks train on from memory, and 0 if a loss costs as much training
as a guest lives.

**Leaf switches.** The share of gradient exchange in a step follows from a job's model: the step on several nodes, less
that of one GPU with the same local batch. On more than one leaf switch the exchange takes `taper` times as long. Then a
larger batch, with a smaller share, may be best. The number of jobs on a link is unknown before they are placed. If a
candidate's jobs across leaf switches use E ends of links, of L leaf switches, about E / L jobs share each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.ones.terms import Penalty, Priced, Situation, Term
from slurm_ones.ones.worth import Choices
from slurm_ones.policy.contract import Bools, ClusterView, Floats, Ints, JobView, ThroughputModel
from slurm_ones.policy.tables import SLOWEST, Tables, ask_together, speeds_of_one, within

LARGEST_S = 1e15
UNKNOWN = 0.95
"""Relative standard deviation at which a predicted speed counts as a guess."""
PAUSES = 5.0
"""Cost of a too large first size, in pauses: one pause, and a dwell time of four."""


@dataclass(frozen=True)
class Reach(Term):
    """Limit of a job to `leap` times the most GPUs that it has had, or to its request before its first run. With
    `first_size` it may start larger, if its speed is known and giving up GPUs again is cheap."""

    leap: float
    first_size: bool
    horizon_s: float
    """Seconds for which a size is expected to last."""

    def reachable(self, job: JobView, most: Mapping[int, int]) -> JobView:
        """Return the view with only the sizes within reach; the smallest size always stays."""
        if job.deadline is not None:
            return job  # what it needs to end in time is weighed against others, by what is known of its speed
        had = most[job.job_id]
        bound = self.leap * had if had else max(job.requested, 1)
        if not had and self.first_size:
            bound *= self.leap
        counts = job.limits.gpus
        if not counts or counts[-1] <= bound:
            return job
        near = tuple(n for n in counts if n <= max(bound, counts[0]))
        return replace(job, limits=replace(job.limits, gpus=near))

    def mask(self, at: Situation, allowed: Bools) -> Bools:
        """Exclude sizes beyond the request of a job that has not run if their speed is only a guess."""
        new, beyond = self._beyond(at)
        if not new:
            return allowed
        allowed = allowed.copy()
        allowed[new] &= ~beyond | (at.tables.uncertainty[new] < UNKNOWN)
        return allowed

    def worth(self, at: Priced, worth: Floats) -> Floats:
        """Subtract the expected cost of trying a first size beyond the request."""
        new, beyond = self._beyond(at)
        if not new:
            return worth
        pause = np.array([shrink_s(at.tables.jobs[j]) for j in new])[:, None]
        lost = np.minimum(at.tables.uncertainty[new] * PAUSES * pause / self.horizon_s, 1.0)
        worth = worth.copy()
        worth[new] *= np.where(beyond, 1.0 - lost, 1.0)
        return worth

    def _beyond(self, at: Situation) -> tuple[list[int], Bools]:
        """Return the rows (R) of jobs that have not run, and which columns (R, U) exceed their requests."""
        jobs = at.tables.jobs
        new = [j for j, job in enumerate(jobs) if not at.most[job.job_id]]
        asked = np.array([max(jobs[j].requested, 1, min(jobs[j].limits.gpus, default=0)) for j in new])
        return new, at.tables.sizes > asked[:, None]


def shrink_s(job: JobView) -> float:
    """Return the seconds for which giving up GPUs interrupts the job."""
    return within(job.resize_s if job.shrink_s is None else job.shrink_s, 0.0, LARGEST_S)


CHEAP = 0.01
"""Share of a change's lifetime up to which the pause for giving up GPUs again counts as cheap."""


@dataclass(frozen=True)
class ChangeCosts:
    """Costs of changing each job to each size, in seconds (J, U)."""

    ready_s: Floats
    """Seconds for which gained GPUs are held before the change, while the job trains on at its old size."""
    pause_s: Floats
    """Seconds for which training pauses in the change."""
    lasts_s: Floats
    """Expected lifetime of the change in seconds, preparation and pause included."""


@dataclass(frozen=True)
class Changes(Term):
    """Requirement that a change repays its pause within `horizon_s`, a share of what is left, and `tenure`."""

    horizon_s: float
    horizon_share: float
    tenure: float

    def worth(self, at: Priced, worth: Floats) -> Floats:
        return less_costs(worth, at.tables.current, self.costs(at))

    def costs(self, at: Priced) -> ChangeCosts:
        """Return the costs and expected lifetimes of all changes; no lifetime exceeds the job's end at that size."""
        jobs, current = at.tables.jobs, at.tables.current
        grow = np.array([within(job.resize_s, 0.0, LARGEST_S) for job in jobs])
        shrink = np.array([shrink_s(job) for job in jobs])
        prepare = np.array([within(job.prepare_s, 0.0, LARGEST_S) for job in jobs])
        ready, pause = seconds_of(len(at.tables.sizes), current, grow, shrink, prepare)
        # Where no job came or went for long, none is expected for as long again.
        horizon = max(self.horizon_s, at.quiet_s)
        tenure = np.array([_tenure(job) for job in jobs])
        # Who has run for a short while may be changed again soon; where that costs next to nothing, it is no reason.
        tenure = np.where(shrink <= CHEAP * self.horizon_s, np.maximum(tenure, self.horizon_s), tenure)
        old = at.speed[np.arange(len(jobs)), current][:, None]
        left = np.maximum(at.remaining[:, None] - old * ready, 0.0)
        with np.errstate(divide="ignore"):
            ends = ready + pause + left * np.where(at.speed > 0, 1.0 / at.speed, 0.0)
        lasts = np.minimum(np.minimum(horizon, self.horizon_share * ends), self.tenure * tenure[:, None])
        borrowed = guests_at(at.tables)
        if borrowed is not None:
            lasts = np.minimum(lasts, borrowed.life_s)
        return ChangeCosts(ready, pause, lasts)


def seconds_of(sizes: int, current: Ints, grow: Floats, shrink: Floats, prepare: Floats) -> tuple[Floats, Floats]:
    """Return (J, U) seconds until a change's added GPUs are ready, and (J, U) seconds of its pause.

    `sizes` is the number of columns, `current` (J,) the present ones. `grow`, `shrink` and `prepare` (J,) are seconds.
    """
    grows = np.arange(sizes) > current[:, None]
    return np.where(grows, prepare[:, None], 0.0), np.where(grows, grow[:, None], shrink[:, None])


def less_costs(worth: Floats, current: Ints, costs: ChangeCosts) -> Floats:
    """Return (J, U) the mean worth of each size over its lifetime, from the worth (J, U) of training at that size.

    A growing job trains at its old size until the new GPUs are ready. After the pause it trains at the new size for the
    rest of the change's lifetime. So the pause costs training. The preparation costs the use of the new GPUs by other
    jobs. A change counts at least until it begins: one that would be undone before is worth less than no change.
    Waiting jobs pay nothing, since they start at any size.
    """
    held = current[:, None]
    begins = costs.ready_s + costs.pause_s
    lasts = np.maximum(np.maximum(costs.lasts_s, begins), 1e-9)
    old = worth[np.arange(len(worth)), current][:, None]
    changed = worth * (1.0 - begins / lasts) + old * costs.ready_s / lasts
    return np.where((held > 0) & (np.arange(worth.shape[1]) != held), changed, worth)


def _tenure(job: JobView) -> float:
    """Return the mean seconds for which the job has kept a size, as if the present size ended now."""
    return within(job.running_s, 0.0, LARGEST_S) / max(job.resizes, 1)


class Guests(NamedTuple):
    """Guests' lifetimes and losses, by job and size (J, U)."""

    life_s: Floats
    """Expected seconds until one of the size's guests is preempted; infinite without guests."""
    lost: Floats
    """Share of the job's training time that preemptions of guests cost."""


def guests_at(tables: Tables) -> Guests | None:
    """Return the guests' lifetimes and losses at each size; None if no job borrows."""
    rows = [j for j, job in enumerate(tables.jobs) if job.borrows is not None]
    if not rows:
        return None
    told = [job.borrows for job in tables.jobs if job.borrows is not None]
    own, each, rate, loss_s = np.array(told, dtype=np.float64).T[:, :, None]
    count = np.ceil(np.maximum(tables.sizes - own, 0.0) / np.maximum(each, 1.0))
    life_s, lost = np.full(tables.speed.shape, np.inf), np.zeros(tables.speed.shape)
    life_s[rows] = np.where((count > 0) & (rate > 0), 1.0 / np.maximum(rate, 1e-12), np.inf)
    lost[rows] = np.minimum(count * rate * loss_s, 1.0)
    return Guests(life_s, lost)


class Borrowed(Term):
    """Discount for guests: each size loses the share of time that preemptions of its guests cost."""

    def worth(self, at: Priced, worth: Floats) -> Floats:
        borrowed = guests_at(at.tables)
        return worth if borrowed is None else worth * (1.0 - borrowed.lost)


class Leaves(Term):
    """Leaf switches in the objective: slower exchange across them, and contention for their links."""

    def tapered(self, cluster: ClusterView, jobs: Sequence[JobView]) -> list[JobView]:
        """Return the jobs with models that predict slower exchange at sizes across leaf switches."""
        if not _known(cluster):
            return list(jobs)
        below = max(below_each(cluster).values())
        return [replace(job, model=Tapered(job.model, below, cluster.taper)) for job in jobs]

    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty | None:
        cluster, needed = at.cluster, leaves_needed(at.cluster, at.tables.sizes)
        if not _known(cluster) or not (needed > 1).any():
            return None
        ends = np.where(needed > 1, needed / len({node.leaf for node in cluster.nodes}), 0.0)
        lost = np.where(needed > 1, exchange_shares(at.tables), 0.0)
        value = np.where(np.isfinite(choices.worth), np.maximum(choices.worth, 0.0), 0.0)
        rows = np.arange(len(value))

        def meeting(candidates: Ints) -> Floats:
            meets = np.maximum(ends[candidates].sum(axis=1) - 1.0, 0.0)
            if not meets.any():
                return np.zeros(len(candidates))
            each = lost[rows, candidates] * meets[:, None]
            found: Floats = (value[rows, candidates] * each / (1.0 + each)).sum(axis=1)
            return found

        return meeting

    def reasons(self, at: Priced, columns: Ints) -> Mapping[int, Reason]:
        """Return reasons for jobs whose next larger size is not worth its GPUs only because it crosses leaf switches.
        Free GPUs count as worth nothing, others at least as much as any job's last GPU brings."""
        if not _known(at.cluster):
            return {}
        sizes, needed, taper = at.tables.sizes, leaves_needed(at.cluster, at.tables.sizes), at.cluster.taper
        across = np.where(needed > 1, 1.0 - exchange_shares(at.tables) * (taper - 1.0) / taper, 1.0)
        rows = np.arange(len(columns))
        held, free = at.speed[rows, columns], at.nodes.gpus - int(sizes[columns].sum())
        last = []
        for j in np.flatnonzero(columns).tolist():
            before = _next(at.tables.allowed[j, : columns[j]][::-1])
            u = columns[j] - 1 - before if before is not None else 0
            less = at.speed[j, u] if u else 0.0
            last.append(at.unit[j] * (held[j] - less) / (sizes[columns[j]] - sizes[u]))
        found = {}
        for j in np.flatnonzero(columns).tolist():
            above = _next(at.tables.allowed[j, columns[j] + 1 :])
            if above is None or needed[v := columns[j] + 1 + above] <= needed[columns[j]]:
                continue
            more = int(sizes[v] - sizes[columns[j]])
            price = 0.0 if more <= free else min(last)
            slower, faster = at.speed[j, v], at.speed[j, v] / across[j, v]
            if at.unit[j] * (slower - held[j]) / more <= price < at.unit[j] * (faster - held[j]) / more:
                found[at.tables.jobs[j].job_id] = reason(
                    "within_switches",
                    gpus=int(sizes[columns[j]]),
                    switches=int(needed[columns[j]]),
                    more=int(sizes[v]),
                    taper=at.cluster.taper,
                )
        return found


class Tapered:
    """Throughput model whose exchange takes `taper` times as long beyond one leaf switch (`below` GPUs)."""

    def __init__(self, model: ThroughputModel, below: int, taper: float) -> None:
        self._model, self._below, self._taper = model, below, taper

    @classmethod
    def together(cls, models: Sequence[Tapered]) -> Tapered:
        """Return one model that predicts for several jobs of one cluster at once."""
        return cls(ask_together([one._model for one in models]), models[0]._below, models[0]._taper)

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        speed = np.asarray(self._model.throughput(nodes, gpus, batches), dtype=np.float64)
        far = (gpus > self._below) & (nodes > 1)
        if not far.any():
            return speed
        local, one = np.maximum(batches // np.maximum(gpus, 1), 1), np.ones_like(gpus)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = batches / speed
            exchange = np.maximum(step - local / self._model.throughput(one, one, local), 0.0)
            return np.where(far, batches / (step + (self._taper - 1.0) * exchange), speed)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return self._model.uncertainty(nodes, gpus, batches)


def _known(cluster: ClusterView) -> bool:
    """Tell whether the network is known and tapered, with one kind of GPU on all nodes."""
    return cluster.taper > 1 and len({node.leaf for node in cluster.nodes}) > 1 and len(cluster.kinds) <= 1


def _next(there: Bools) -> int | None:
    found = np.flatnonzero(there)
    return int(found[0]) if len(found) else None


def exchange_shares(tables: Tables) -> Floats:
    """Return (J, U) the share of a step that is gradient exchange; 0 at sizes of one node."""
    several = tables.allowed & (tables.nodes > 1)
    columns = np.flatnonzero(several.any(axis=0))
    shares = np.zeros(tables.speed.shape)
    if not len(columns):
        return shares
    batch, gpus = tables.batch[:, columns], tables.sizes[columns]
    local = np.maximum(batch // gpus, 1)
    alone = local / speeds_of_one(tables.jobs, local)
    step = batch / np.maximum(tables.speed[:, columns], SLOWEST)
    shares[:, columns] = np.clip(1.0 - alone / np.maximum(step, 1e-12), 0.0, 1.0)
    return np.where(several, shares, 0.0)


def below_each(cluster: ClusterView) -> Counter[str]:
    """Return the GPUs below each leaf switch, by its name."""
    found: Counter[str] = Counter()
    for node in cluster.nodes:
        found[node.leaf] += node.gpus
    return found


def leaves_needed(cluster: ClusterView, sizes: Ints) -> Ints:
    """Return (U,) the fewest leaf switches with enough GPUs for each size."""
    most = np.cumsum(sorted(below_each(cluster).values(), reverse=True))
    found: Ints = np.searchsorted(most, sizes) + 1
    return np.minimum(found, len(most))

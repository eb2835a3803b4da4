"""Rules of the objective about sizes: limits of growth, costs of changes, loss of guests, leaf switches.

**First size.** A first size beyond the request is too large with a probability of about σ, the relative standard
deviation of its predicted speed. Then the job gives up GPUs again, with a pause of p seconds, but only after a dwell
time of 4p (`rules.job_rules`). So the size counts with 1 − σ · 5p / H of its worth, where H is the time for which a
size is expected to last. A size whose speed is a guess is excluded.

**Costs of a change.** In a pause the job waits while its new GPUs are held. This costs (w + λn) per second: w is the
weight of the job's waiting, λ the price of a GPU, n the number of GPUs. At the job's best size n, w + λn equals v g(n),
the worth of training at n. So a pause costs the worth of training at the new size. A change from n to m that lasts L
seconds, p of them a pause, gains v g(m) (L − p) − v g(n) L.

**Guests.** GPUs beyond the request are borrowed, in guests that Slurm preempts for other jobs. So a change is expected
to last no longer than a guest. If each of k guests is lost at a rate r, and a loss costs c seconds, a size counts with
1 − k r c of its worth, at least 0.

**Leaf switches.** A job's model predicts the time of gradient exchange in a step: a step on several nodes, less a step
on one GPU with the same local batch. Across leaf switches the exchange takes `taper` times as long, which may make
another batch best. If a candidate's jobs on several leaf switches use E switches in total, of L, about E / L jobs share
each switch's link.
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
"""Relative standard deviation from which a predicted speed counts as a guess."""
PAUSES = 5.0
"""Cost of a first size that is too large, in pauses: one for the resize, four for the dwell time."""


@dataclass(frozen=True)
class Reach(Term):
    """Rule that limits a job to `leap` times the most GPUs it has had, and to its request before its first run. With
    `first_size` it may start larger, if its speed is known and giving up GPUs costs little."""

    leap: float
    first_size: bool
    horizon_s: float
    """Seconds for which a size is expected to last."""

    def reachable(self, job: JobView, most: Mapping[int, int]) -> JobView:
        """Return the job with only the sizes within the limit of growth. Its smallest size always remains."""
        if job.deadline is not None:
            return job  # its need for the deadline is weighed against other jobs
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
        """Exclude first sizes beyond the request if the job's speed there is only a guess."""
        new, beyond = self._beyond(at)
        if not new:
            return allowed
        allowed = allowed.copy()
        allowed[new] &= ~beyond | (at.tables.uncertainty[new] < UNKNOWN)
        return allowed

    def worth(self, at: Priced, worth: Floats) -> Floats:
        """Reduce the worth of first sizes beyond the request by the expected cost of trying them."""
        new, beyond = self._beyond(at)
        if not new:
            return worth
        pause = np.array([shrink_s(at.tables.jobs[j]) for j in new])[:, None]
        lost = np.minimum(at.tables.uncertainty[new] * PAUSES * pause / self.horizon_s, 1.0)
        worth = worth.copy()
        worth[new] *= np.where(beyond, 1.0 - lost, 1.0)
        return worth

    def _beyond(self, at: Situation) -> tuple[list[int], Bools]:
        """Return the rows (R,) of jobs that have not run, and a mask (R, U) of their columns beyond the request."""
        jobs = at.tables.jobs
        new = [j for j, job in enumerate(jobs) if not at.most[job.job_id]]
        asked = np.array([max(jobs[j].requested, 1, min(jobs[j].limits.gpus, default=0)) for j in new])
        return new, at.tables.sizes > asked[:, None]


def shrink_s(job: JobView) -> float:
    """Return the pause of training, in seconds, when the job gives up GPUs."""
    return within(job.resize_s if job.shrink_s is None else job.shrink_s, 0.0, LARGEST_S)


CHEAP = 0.01
"""Share of the horizon up to which the pause for giving up GPUs counts as cheap."""


@dataclass(frozen=True)
class ChangeCosts:
    """Costs of changing each job to each size; arrays (J, U) in seconds."""

    ready_s: Floats
    """Seconds for which the gained GPUs are held while the job still trains at its old size."""
    pause_s: Floats
    """Seconds for which training pauses."""
    lasts_s: Floats
    """Seconds for which the change is expected to last, including preparation and pause."""


@dataclass(frozen=True)
class Changes(Term):
    """Rule that a change must repay its pause within the shortest of three times. They are `horizon_s`, `horizon_share`
    × the job's remaining time, and `tenure` × its mean time at one size."""

    horizon_s: float
    horizon_share: float
    tenure: float

    def worth(self, at: Priced, worth: Floats) -> Floats:
        return less_costs(worth, at.tables.current, self.costs(at))

    def costs(self, at: Priced) -> ChangeCosts:
        """Return the costs of all changes, and the time for which each is expected to last, at most until the job's
        end."""
        jobs, current = at.tables.jobs, at.tables.current
        grow = np.array([within(job.resize_s, 0.0, LARGEST_S) for job in jobs])
        shrink = np.array([shrink_s(job) for job in jobs])
        prepare = np.array([within(job.prepare_s, 0.0, LARGEST_S) for job in jobs])
        ready, pause = seconds_of(len(at.tables.sizes), current, grow, shrink, prepare)
        # If no job has come or gone for some time, none is expected for as long again.
        horizon = max(self.horizon_s, at.quiet_s)
        # The mean time for which each job has kept a size. Its present size counts as if it ended now.
        tenure = np.array([within(job.running_s, 0.0, LARGEST_S) / max(job.resizes, 1) for job in jobs])
        # A job that has run for a short time may soon be changed again. If changing back costs next to nothing, this
        # does not matter.
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
    """Return two (J, U) arrays: seconds until the added GPUs are ready, and seconds of pause.

    `sizes` is the number of columns, `current` (J,) each job's present column. `grow` and `shrink` (J,) are each job's
    pauses in seconds, `prepare` (J,) the seconds until added GPUs are ready.
    """
    grows = np.arange(sizes) > current[:, None]
    return np.where(grows, prepare[:, None], 0.0), np.where(grows, grow[:, None], shrink[:, None])


def less_costs(worth: Floats, current: Ints, costs: ChangeCosts) -> Floats:
    """Return the mean worth (J, U) of each size over the time that the change to it lasts. `worth` (J, U) is the worth
    of training at each size.

    A growing job trains at its old size until the new GPUs are ready, then pauses, then trains at the new size. A
    change is assumed to last at least for its own preparation and pause. A waiting job pays nothing.
    """
    held = current[:, None]
    begins = costs.ready_s + costs.pause_s
    lasts = np.maximum(np.maximum(costs.lasts_s, begins), 1e-9)
    old = worth[np.arange(len(worth)), current][:, None]
    changed = worth * (1.0 - begins / lasts) + old * costs.ready_s / lasts
    return np.where((held > 0) & (np.arange(worth.shape[1]) != held), changed, worth)


class Guests(NamedTuple):
    """Expected life of guests at each size, and the training time that their loss costs."""

    life_s: Floats
    """(J, U) expected life of a guest, in seconds; infinite at sizes without guests."""
    lost: Floats
    """(J, U) fraction of the job's training time that preemptions of guests cost."""


def guests_at(tables: Tables) -> Guests | None:
    """Return the life and loss of guests at each size; None if no job grows by guests."""
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
    """Rule that reduces the worth of each size by the training time that preemptions of its guests cost."""

    def worth(self, at: Priced, worth: Floats) -> Floats:
        borrowed = guests_at(at.tables)
        return worth if borrowed is None else worth * (1.0 - borrowed.lost)


class Leaves(Term):
    """Rule about leaf switches: gradient exchange across them is slower, and jobs share their links."""

    def tapered(self, cluster: ClusterView, jobs: Sequence[JobView]) -> list[JobView]:
        """Return the jobs with models that predict slower gradient exchange at sizes that cross leaf switches."""
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
        """Return a reason for each job that would take its next larger size if that did not cross leaf switches.

        Within one switch, that size would be worth its additional GPUs. Their price is 0 if they are free, else the
        smallest gain that any job has from its last GPU.
        """
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
    """Throughput model in which gradient exchange takes `taper` times as long on more GPUs than one leaf switch has
    (`below`)."""

    def __init__(self, model: ThroughputModel, below: int, taper: float) -> None:
        self._model, self._below, self._taper = model, below, taper

    @classmethod
    def together(cls, models: Sequence[Tapered]) -> Tapered:
        """Combine the models of several jobs on one cluster into one model."""
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
    """Tell whether leaf switches count: the topology and its taper are known, and all GPUs are of one kind."""
    return cluster.taper > 1 and len({node.leaf for node in cluster.nodes}) > 1 and len(cluster.kinds) <= 1


def _next(there: Bools) -> int | None:
    found = np.flatnonzero(there)
    return int(found[0]) if len(found) else None


def exchange_shares(tables: Tables) -> Floats:
    """Return the fraction (J, U) of a step that is gradient exchange; 0 at sizes that fit one node."""
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
    """Return the number of GPUs below each leaf switch, by the switch's name."""
    found: Counter[str] = Counter()
    for node in cluster.nodes:
        found[node.leaf] += node.gpus
    return found


def leaves_needed(cluster: ClusterView, sizes: Ints) -> Ints:
    """Return the fewest leaf switches (U,) that have enough GPUs for each size."""
    most = np.cumsum(sorted(below_each(cluster).values(), reverse=True))
    found: Ints = np.searchsorted(most, sizes) + 1
    return np.minimum(found, len(most))

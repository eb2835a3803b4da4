"""True speed of a job: progress/s on each number of GPUs of each kind, in each part of its training.

A job on GPUs of several kinds trains at the speed of the slowest kind (`Training`), on at least two nodes. One of its
GPUs is of this kind and one of a faster kind. All further GPUs are counted as the cheapest that are at least as fast as
the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from slurm_ones.policy.contract import Bools, Floats, Ints
from slurm_ones.simulate.spec import rounded
from slurm_ones.simulate.training.application import POWER, Application, Submission, on_kind
from slurm_ones.simulate.workloads.profiles import Workload

Key = tuple[str, float, int, int]
"""Key of a curve: application, share of its epochs that is trained, GPUs, batch. For elastic jobs GPUs and batch are
0."""
BLOCK = 1.004
"""Largest ratio of two batches that are treated as one, with the better speed and the better efficiency of the two."""


class Pool(NamedTuple):
    """All nodes with GPUs of one kind."""

    nodes: int
    per_node: int
    """GPUs of the largest node."""
    gpus: int
    kind: str = ""

    @staticmethod
    def of(nodes: int, per_node: int, kind: str = "") -> Pool:
        return Pool(nodes, per_node, nodes * per_node, kind)


def pools_of(parts: Sequence[tuple[int, int, str]]) -> tuple[Pool, ...]:
    """Return a pool for each kind in `parts`, groups of (nodes, GPUs per node, kind); the slowest kind comes first."""
    found: dict[str, Pool] = {}
    for nodes, per_node, kind in parts:
        before = found.get(kind, Pool(0, 0, 0, kind))
        more = before.gpus + nodes * per_node
        found[kind] = Pool(before.nodes + nodes, max(before.per_node, per_node), more, kind)
    return tuple(sorted(found.values(), key=lambda pool: POWER.get(pool.kind, 1.0)))


def key_of(submission: Submission, app: Application) -> Key:
    """Return the key of a job's curve. Jobs with equal keys share a curve."""
    if submission.elastic:
        return submission.application, submission.epochs, 0, 0
    batch = min(max(submission.batch, app.min_batch or app.base_batch), app.max_batch)
    return submission.application, submission.epochs, submission.gpus, batch


@dataclass(frozen=True)
class Curve:
    """Upper bound on progress/s of the jobs with one key, in each part of the training at each size."""

    work: Floats
    """Progress in each part (parts,), in samples of the base batch."""
    sizes: Floats | Ints
    """Total GPUs of each size (sizes,), ascending for each kind. After `counted`: in GPUs of the fastest kind."""
    kind: Ints
    """Slowest kind of GPU at each size (sizes,), as an index into the cluster's kinds, slowest first."""
    mixed: Bools
    """True for sizes with GPUs of a faster kind too (sizes,)."""
    rate: Floats
    """Progress/s in each part at each size (parts, sizes), at the best placement and batch."""

    @property
    def alone_s(self) -> float:
        """Training time in seconds if each part is trained at the fastest size."""
        return float((self.work / self.rate.max(axis=1)).sum())

    def counted(self, weights: Floats, there: Ints) -> Curve:
        """Return the curve with each GPU of kind k counted as `weights[k]` GPUs. The cluster has `there[k]` GPUs of
        this kind."""
        count = self.sizes * weights[self.kind]
        for k in range(len(there) - 1):
            here = self.mixed & (self.kind == k)
            # One of the slowest kind, one of another, and whatever is cheapest.
            cheapest = np.sort(np.repeat(weights[k:], there[k:]))
            bill = weights[k] + weights[k + 1 :].min() + np.append(0.0, np.cumsum(cheapest))
            count[here] = bill[self.sizes[here].astype(int) - 2]
        return replace(self, sizes=count)


def curves_of(workload: Workload, pools: Sequence[Pool], parts: int) -> dict[Key, Curve]:
    """Return the curves of a workload's jobs, by key."""
    asked: dict[Key, int] = {}
    for submission in workload.submissions:
        key = key_of(submission, workload.applications[submission.application])
        asked[key] = max(asked.get(key, 1), submission.gpus)
    return {
        key: curve(workload.applications[key[0]], key[1], asked[key], pools, parts, key[2], key[3]) for key in asked
    }


def curve(
    app: Application, epochs: float, asked: int, pools: Sequence[Pool], parts: int, gpus: int = 0, batch: int = 0
) -> Curve:
    """Return the curve of an application, divided into about `parts` parts. `epochs` is the trained share of its
    epochs.

    `asked` is the largest number of GPUs that a user requests; it is allowed even above the application's `max_gpus`.
    With `gpus` and `batch` the job is rigid: it uses only this batch, and this number of GPUs, exactly or rounded up to
    be equal on all nodes.
    """
    batches = np.array([batch]) if batch else _batches(app)
    total = _end(app, epochs, batches)
    ends = np.append(app.ends[app.ends < total * (1 - 1e-12)], total)
    columns: list[tuple[Ints, Ints, Bools, Floats]] = []
    for k, pool in enumerate(pools):
        here = on_kind(app, pool.kind)
        others = pools[k + 1 :]
        for mixed in (False, True) if others else (False,):
            room = _together(pools[k:]) if mixed else pool
            sizes = np.unique([gpus, rounded(gpus, pool.per_node)]) if gpus else _sizes(app, asked, room)
            sizes = sizes[(sizes <= room.gpus) & (sizes > mixed)]
            rate = _rates(here, sizes, batches, ends, room, 2 if mixed else 1)
            columns.append((sizes, np.full(len(sizes), k), np.full(len(sizes), mixed), rate))
    sizes, kind, mix, rate = (np.concatenate(each, axis=-1) for each in zip(*columns, strict=True))
    return _divided(ends, Curve(np.zeros(0), sizes, kind, mix, rate), parts)


def _together(pools: Sequence[Pool]) -> Pool:
    most = max(pool.per_node for pool in pools)
    return Pool(sum(pool.nodes for pool in pools), most, sum(pool.gpus for pool in pools), pools[0].kind)


def _rates(app: Application, sizes: Ints, batches: Ints, ends: Floats, pool: Pool, least: int) -> Floats:
    """Return the highest progress/s in each epoch at each size (epochs, sizes), on at least `least` nodes."""
    blocks = _blocks(batches)
    starts = np.concatenate([[0.0], ends[:-1]])
    efficiency = np.array([np.maximum.reduceat(app.efficiency(at, batches), blocks) for at in starts * (1 + 1e-12)])
    before = _best(app, sizes, batches, blocks, efficiency, pool, least)
    if app.later is not None and app.by is not None and app.by.from_share < 1.0:
        after = _best(app.later, sizes, batches, blocks, efficiency, pool, least)
        change = app.by.from_share * app.total
        before = np.where((starts >= change)[:, None], after, before)
        before = np.where(((starts < change) & (ends > change))[:, None], np.maximum(before, after), before)
    return before


def _divided(ends: Floats, found: Curve, parts: int) -> Curve:
    """Divide a curve into `parts` parts that take equal time at the fastest size. A part of several epochs has the
    highest of their rates."""
    seconds = np.append(0.0, np.cumsum(np.diff(ends, prepend=0.0) / found.rate.max(axis=1)))
    cuts = np.interp(np.linspace(0.0, seconds[-1], parts + 1), seconds, np.append(0.0, ends))
    if len(ends) <= parts:
        cuts = np.union1d(cuts, ends)
        cuts = np.append(cuts[:-1][np.diff(cuts) > ends[-1] * 1e-9], ends[-1])
    first = np.minimum(np.searchsorted(ends, cuts[:-1] * (1 + 1e-9), side="right"), len(ends) - 1)
    last = np.searchsorted(ends, cuts[1:] * (1 - 1e-9), side="right")
    best = np.array([found.rate[a : max(b, a) + 1].max(axis=0) for a, b in zip(first, last, strict=True)])
    return replace(found, work=np.diff(cuts), rate=best)


def hull(sizes: Floats | Ints, rates: Floats) -> list[int]:
    """Return the indices of the sizes on the concave hull of `rates`, which has a rate for each ascending size.

    A job that divides its time between two neighbouring sizes of the hull is at least as fast as at any size in
    between.
    """
    found: list[int] = []
    size, rate, top = 0.0, 0.0, float(rates.max(initial=0.0))
    while rate < top:
        later = np.flatnonzero(rates > rate)
        each = (sizes[later] - size) / (rates[later] - rate)
        best = int(later[len(each) - 1 - each[::-1].argmin()])
        found.append(best)
        size, rate = float(sizes[best]), float(rates[best])
    return found


def _sizes(app: Application, asked: int, pool: Pool) -> Ints:
    """Return the numbers of GPUs that a job can use: its strategy's sizes, or any number without a strategy."""
    gpus, per_node = pool.gpus, pool.per_node
    if app.by is not None:
        rows = app.by.limits(min(app.max_gpus, gpus), app.max_local_batch).sizes
        found = [row.gpus for row in rows if row.gpus <= gpus]
        return np.array(found or [app.by.degree])
    # What is asked for is rounded up to whole nodes, or to as many GPUs of each.
    wanted = -(-asked // per_node) * per_node if asked > per_node else asked
    return np.arange(1, min(max(app.max_gpus, wanted), gpus) + 1)


def _batches(app: Application) -> Ints:
    low = app.min_batch or app.base_batch
    if app.by is not None:
        low = max(low // 2, 1)
    return np.arange(low, max(app.max_batch, low) + 1)


def _blocks(batches: Ints) -> Ints:
    count = max(math.ceil(math.log((batches[-1] + 1) / batches[0]) / math.log(BLOCK)), 2)
    edges = np.unique(np.ceil(np.geomspace(batches[0], batches[-1] + 1, count)).astype(np.int64))
    return np.unique(np.searchsorted(batches, edges[edges <= batches[-1]]))


def _best(
    app: Application, sizes: Ints, batches: Ints, blocks: Ints, efficiency: Floats, pool: Pool, least: int
) -> Floats:
    """Return upper bounds on the progress/s in each epoch at each size (epochs, sizes), on at least `least` nodes."""
    found = np.empty((len(efficiency), len(sizes)))
    for column, gpus in enumerate(sizes.tolist()):
        # No batch is smaller than the replicas that share it.
        usable: Bools = batches >= (gpus if app.by is None else gpus // app.by.degree)
        speed = np.zeros(len(batches))
        some = batches[usable] if usable.any() else batches[-1:]
        where = usable if usable.any() else np.arange(len(batches)) == len(batches) - 1
        places = placements(app, gpus, pool.nodes, pool.per_node, least)
        speed[where] = np.max([app.placed_speeds(place, some) for place in places], axis=0)
        found[:, column] = (efficiency * np.maximum.reduceat(speed, blocks)).max(axis=1)
    return np.maximum(found, 1e-12)


def placements(app: Application, gpus: int, nodes: int, per_node: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield the placements (GPUs on each node) to compare, on at least `least` nodes.

    GPUs on the nodes differ by at most one, or the nodes are full, or the application's profile has the placement.
    """
    known = getattr(app.speed, "placements", None)
    fewest = max(-(-gpus // per_node), least)
    for count in range(fewest, min(gpus, nodes, 2 if known is None else gpus) + 1):
        yield tuple(gpus // count + (i < gpus % count) for i in range(count))
    if fewest > 2 and known is None:
        yield tuple(min(per_node, gpus - i * per_node) for i in range(fewest))
    for placement in known or ():
        if sum(placement) == gpus and least <= len(placement) <= nodes and max(placement) <= per_node:
            yield placement


def _end(app: Application, epochs: float, batches: Ints) -> float:
    """Return the least progress at which the job can be done, in samples of the base batch.

    It is less than all epochs for two reasons. The companion may round off half a sample of each epoch. Early stopping
    ends a training if the metric has risen too little over `patience` epochs, here assumed at the least efficient
    batch.
    """
    total = app.total * epochs - 0.5 * len(app.ends)
    if not app.patience:
        return max(total, 1.0)
    worth = min(float(app.efficiency(at, batches).min()) for at in np.concatenate([[0.0], app.ends[:-1]]))
    back = app.patience * app.dataset * worth
    grid = np.linspace(back, total, 512)
    flat = [p for p in grid if app.gained(max(p - back, 0.0), p) <= app.least_gain * (1.0 + 1e-6)]
    # The condition may hold a little before the first grid point at which it was seen.
    return max(min(flat[0] - (grid[1] - grid[0]), total) if flat else total, 1.0)


@dataclass(frozen=True)
class Work:
    """Jobs of a workload: for each job, the index of its curve in `curves`, and its submission time in seconds."""

    curves: Sequence[Curve]
    curve: Ints
    submitted: Floats
    there: Ints
    """Number of GPUs of each kind (kinds,)."""
    gpus: float = 0.0
    """Sum of the weights of the cluster's GPUs; 0 before `counted`."""

    @property
    def alone_s(self) -> Floats:
        """Seconds that each job trains if it has the whole cluster (jobs,)."""
        each = np.array([curve.alone_s for curve in self.curves])
        return each[self.curve]

    def counted(self, weights: Floats) -> Work:
        """Return the same jobs with each GPU of kind k counted as `weights[k]` GPUs."""
        curves = [curve.counted(weights, self.there) for curve in self.curves]
        return replace(self, curves=curves, gpus=float(weights @ self.there))


def work_of(workload: Workload, pools: Sequence[Pool], parts: int) -> Work:
    """Return the jobs of a workload with their curves, each divided into about `parts` parts."""
    curves = curves_of(workload, pools, parts)
    rows = {key: row for row, key in enumerate(curves)}
    jobs = workload.submissions
    curve = np.array([rows[key_of(job, workload.applications[job.application])] for job in jobs])
    there = np.array([pool.gpus for pool in pools])
    return Work(tuple(curves.values()), curve, np.array([job.time for job in jobs]), there)

"""What a job can truly do: progress a second on each number of GPUs, in each part of its training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from slurm_ones.schedule.policy import Bools, Floats, Ints
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.workloads.workload import Workload

Key = tuple[str, float, int, int]
"""Application, share of its epochs, and of a rigid job its GPUs and its batch (0 and 0 of an elastic one)."""
BLOCK = 1.004
"""Batches up to this factor apart are weighed together: the best speed of one with the best efficiency of one."""


@dataclass(frozen=True)
class Curve:
    """Progress a second of one kind of job in each of K parts of its training: never less than the truth."""

    work: Floats
    """(K,) progress in each part, in samples of the base batch."""
    sizes: Ints
    """(N,) GPUs, ascending, without 0."""
    rate: Floats
    """(K, N) progress/s in each part at its best placement and batch."""

    @property
    def alone_s(self) -> float:
        """Seconds it takes with every GPU that it can use."""
        return float((self.work / self.rate.max(axis=1)).sum())

    @property
    def total(self) -> float:
        """Progress at which it is done."""
        return float(self.work.sum())


def key_of(submission: Submission, app: Application) -> Key:
    """Jobs of one key have one curve."""
    if submission.elastic:
        return submission.application, submission.epochs, 0, 0
    batch = min(max(submission.batch, app.min_batch or app.base_batch), app.max_batch)
    return submission.application, submission.epochs, submission.gpus, batch


def curves_of(workload: Workload, nodes: int, per_node: int, parts: int) -> dict[Key, Curve]:
    """The curve of each kind of job in a workload, on equal nodes."""
    asked: dict[Key, int] = {}
    for submission in workload.submissions:
        key = key_of(submission, workload.applications[submission.application])
        asked[key] = max(asked.get(key, 1), submission.gpus)
    return {
        key: curve(workload.applications[key[0]], key[1], asked[key], nodes, per_node, parts, key[2], key[3])
        for key in asked
    }


def curve(
    app: Application, epochs: float, asked: int, nodes: int, per_node: int, parts: int, gpus: int = 0, batch: int = 0
) -> Curve:
    """The curve of an application over that share of its epochs, in `parts` parts.

    `asked` is the most that a user asks for, which runs even where the application is not meant to be run so large. A
    rigid job has so many `gpus`, as they are or rounded up, and that `batch` alone.
    """
    sizes = np.unique([gpus, _rounded(gpus, per_node)]) if gpus else _sizes(app, asked, nodes, per_node)
    batches = np.array([batch]) if batch else _batches(app)
    total = _end(app, epochs, batches)
    ends = np.append(app.ends[app.ends < total * (1 - 1e-12)], total)
    blocks = _blocks(batches)
    efficiency = np.array(
        [
            np.maximum.reduceat(app.efficiency(at, batches), blocks)
            for at in np.concatenate([[0.0], ends[:-1]]) * (1 + 1e-12)
        ]
    )
    before = _best(app, sizes, batches, blocks, efficiency, nodes, per_node)
    if app.later is not None and app.by is not None and app.by.from_share < 1.0:
        after = _best(app.later, sizes, batches, blocks, efficiency, nodes, per_node)
        change = app.by.from_share * app.total
        starts = np.concatenate([[0.0], ends[:-1]])
        before = np.where((starts >= change)[:, None], after, before)
        before = np.where(((starts < change) & (ends > change))[:, None], np.maximum(before, after), before)
    return _divided(ends, sizes, before, parts)


def _divided(ends: Floats, sizes: Ints, rate: Floats, parts: int) -> Curve:
    """K parts that take equally long at the highest rate; a part in several epochs has the best rates of them."""
    fastest = rate.max(axis=1)
    low, high = 0.0, float((np.diff(ends, prepend=0.0) / fastest).sum()) / parts
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (low, middle) if _cuts(ends, fastest, middle, parts)[-1] >= ends[-1] else (middle, high)
    # The last part then takes no less than the others.
    cuts = np.minimum(np.append(0.0, _cuts(ends, fastest, low, parts)), ends[-1])
    cuts[-1] = ends[-1]
    first = np.minimum(np.searchsorted(ends, cuts[:-1] * (1 + 1e-9), side="right"), len(ends) - 1)
    last = np.searchsorted(ends, cuts[1:] * (1 - 1e-9), side="right")
    best = np.array([rate[a : max(b, a) + 1].max(axis=0) for a, b in zip(first, last, strict=True)])
    return Curve(np.diff(cuts), sizes, best)


def _cuts(ends: Floats, fastest: Floats, seconds: float, parts: int) -> list[float]:
    """Where parts end that take so many seconds each, at the highest of the rates within a part."""
    found, done, row = [], 0.0, 0
    for _ in range(parts):
        best, begun = fastest[row], done
        while row < len(ends) - 1 and (ends[row] - begun) < best * seconds:
            row += 1
            best = max(best, fastest[row])
        # In the last epoch that it reaches, no further than its seconds allow and no less than to its beginning.
        done = max(begun + best * seconds, ends[row - 1] if row else 0.0)
        while row < len(ends) - 1 and done >= ends[row]:
            row += 1
        found.append(float(done))
    return found


def _sizes(app: Application, asked: int, nodes: int, per_node: int) -> Ints:
    """Every number of GPUs that it may have: those that its strategy knows, else all of them."""
    gpus = nodes * per_node
    if app.by is not None:
        rows = app.by.limits(min(app.max_gpus, gpus), app.max_local_batch).sizes
        found = [row.gpus for row in rows if row.gpus <= gpus]
        return np.array(found or [app.by.degree])
    # What is asked for is rounded up to whole nodes, or to as many GPUs of each.
    wanted = -(-asked // per_node) * per_node if asked > per_node else asked
    return np.arange(1, min(max(app.max_gpus, wanted), gpus) + 1)


def _rounded(gpus: int, per_node: int) -> int:
    """As many GPUs as a rigid job holds on a Slurm that gives it equally many on each node (`world.asked_shape`)."""
    nodes = -(-gpus // per_node)
    return -(-gpus // nodes) * nodes


def _batches(app: Application) -> Ints:
    """Every global batch that it takes; a strategy may round one down to its quantum."""
    low = app.min_batch or app.base_batch
    if app.by is not None:
        low = max(low // 2, 1)
    return np.arange(low, max(app.max_batch, low) + 1)


def _blocks(batches: Ints) -> Ints:
    """Where each block of batches begins."""
    edges = np.unique(np.ceil(np.geomspace(batches[0], batches[-1] + 1, _count(batches))).astype(np.int64))
    return np.unique(np.searchsorted(batches, edges[edges <= batches[-1]]))


def _count(batches: Ints) -> int:
    return max(math.ceil(math.log((batches[-1] + 1) / batches[0]) / math.log(BLOCK)), 2)


def _best(
    app: Application, sizes: Ints, batches: Ints, blocks: Ints, efficiency: Floats, nodes: int, per_node: int
) -> Floats:
    """(E, N) the most progress/s in each epoch at each size, at least."""
    found = np.empty((len(efficiency), len(sizes)))
    for column, gpus in enumerate(sizes.tolist()):
        # No batch is smaller than the replicas that share it.
        usable: Bools = batches >= (gpus if app.by is None else gpus // app.by.degree)
        speed = np.zeros(len(batches))
        some = batches[usable] if usable.any() else batches[-1:]
        where = usable if usable.any() else np.arange(len(batches)) == len(batches) - 1
        speed[where] = np.max([app.placed_speeds(p, some) for p in placements(app, gpus, nodes, per_node)], axis=0)
        found[:, column] = (efficiency * np.maximum.reduceat(speed, blocks)).max(axis=1)
    return np.maximum(found, 1e-12)


def placements(app: Application, gpus: int, nodes: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """GPUs on each node in every way that can make a difference: how many nodes, and each placement of a profile."""
    known = getattr(app.speed, "placements", None)
    for count in range(-(-gpus // per_node), min(gpus, nodes, 2 if known is None else gpus) + 1):
        yield tuple(gpus // count + (i < gpus % count) for i in range(count))
    if -(-gpus // per_node) > 2 and known is None:
        yield tuple(min(per_node, gpus - i * per_node) for i in range(-(-gpus // per_node)))
    for placement in known or ():
        if sum(placement) == gpus and len(placement) <= nodes and max(placement) <= per_node:
            yield placement


def _end(app: Application, epochs: float, batches: Ints) -> float:
    """Least progress at which it can be done.

    The companion's simulated jobs may lose half a sample an epoch to rounding. Patience ends a training where the
    metric has not risen enough over so many passes, and a pass brings the least where the batch is worth least.
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

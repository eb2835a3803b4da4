"""Whether candidates can be placed on the nodes, for many candidates at once, and what shrinks where they cannot.

Nodes are alike for all jobs that are not where they were, so what counts is how many nodes have how many free GPUs,
(K, P + 1) for nodes of P GPUs: as `decide.room.Room`, for a whole population. Jobs of one size are placed together, so
the cost grows with sizes × P and not with nodes.
"""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.policy import Ints
from slurm_ones.schedule.tables import Bools


def free_nodes(space: Space, same: Bools) -> Ints:
    """(K, P + 1) nodes with each number of free GPUs beside the unchanged jobs `same` (K, J)."""
    per_node = space.cluster.gpus_per_node
    free = (space.capacity - same.astype(np.float64) @ space.home).astype(np.int64)
    flat = free + (per_node + 1) * np.arange(len(same))[:, None]
    result: Ints = np.bincount(flat.ravel(), minlength=len(same) * (per_node + 1)).reshape(len(same), per_node + 1)
    return result


def place(space: Space, wanted: Ints) -> tuple[Ints, Ints]:
    """Counts (K, J) that can be placed and the free nodes (K, P + 1) then, from wanted ones.

    Unchanged jobs are in place; the others are placed largest first on the fullest nodes they fit on, and shrink where
    there is no room, possibly to 0. A running job that was to grow and cannot stays as it is.
    """
    counts, free, thwarted = _place(space, wanted)
    wanted, rows, again = wanted.copy(), thwarted.any(axis=1), 0
    while rows.any():
        # Its GPUs went to others: they must do without them. After the second time nobody grows there.
        grows = space.running & (wanted[rows] > space.current)
        wanted[rows] = np.where(thwarted[rows] | (grows & (again > 0)), space.current, wanted[rows])
        counts[rows], free[rows], failed = _place(space, wanted[rows])
        thwarted[rows] = failed
        rows, again = thwarted.any(axis=1), again + 1
    return counts, free


def _place(space: Space, wanted: Ints) -> tuple[Ints, Ints, Bools]:
    """As `place`, where jobs that were to grow may shrink; they are the third (K, J)."""
    per_node = space.cluster.gpus_per_node
    same = wanted == space.current
    free = free_nodes(space, same)
    counts = np.where(same, wanted, 0)
    moving = np.where(same, 0, wanted)
    grows = ~same & space.running & (wanted > space.current)
    _whole_nodes(space, moving, counts, free, per_node)
    for size in range(min(per_node - 1, int(moving.max(initial=0))), 0, -1):
        these = moving == size
        total = these.sum(axis=1)
        if not total.any():
            continue
        fits = np.minimum(total, _room(free, size))
        placed = these & (np.cumsum(these, axis=1) <= fits[:, None])
        counts[placed] = size
        take(free, size, fits)
        short = these & ~placed
        if short.any():
            moving[short] = np.broadcast_to(space.largest(np.full(len(space.jobs), size - 1)), moving.shape)[short]
    return counts, free, grows & (counts <= space.current)


def _whole_nodes(space: Space, moving: Ints, counts: Ints, free: Ints, per_node: int) -> None:
    """Place jobs of one node or more, largest first; those that do not fit shrink, in `moving`, below a node if need
    be."""
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


def _room(free: Ints, size: int) -> Ints:
    """(K,) how many jobs of that size, smaller than a node, the free nodes take."""
    result: Ints = free @ (np.arange(free.shape[1]) // size)
    return result


def take(free: Ints, size: int, jobs: Ints) -> None:
    """Take room for `jobs` (K,) jobs of a size up to a node's from the free nodes (K, P + 1), the fullest first."""
    left = jobs.copy()
    for gpus in range(size, free.shape[1]):
        each = gpus // size
        full = np.minimum(left // each, free[:, gpus])
        rest = np.where(full < free[:, gpus], left - full * each, 0)
        part = rest > 0
        free[:, gpus] -= full + part
        free[:, gpus - each * size] += full
        rows = np.flatnonzero(part)
        free[rows, gpus - rest[rows] * size] += 1
        left -= full * each + rest


def start(space: Space, counts: Ints, free: Ints, limit: Ints, order: Ints) -> Ints:
    """Counts (K, J) with what is left on the free nodes offered to those who have nothing, in `order` (J,), each up to
    its `limit` (J,). A running job's old size is not among the offers: its GPUs went to others."""
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
            take(left, gpus, np.full(len(these), nodes))
            free[these] = left

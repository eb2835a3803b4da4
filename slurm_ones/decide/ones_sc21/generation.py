"""The steps of a generation (ONES §3.2), each over a whole population at once, and what of it can be placed.

No step gives a GPU to two jobs, exceeds a limit, or leaves a size that Slurm cannot be asked for. Jobs of one size are
placed together (`schedule.ledger`), so the cost grows with sizes × GPUs of a node and not with nodes.
"""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.ledger import count_nodes, parts_that_fit, take_parts
from slurm_ones.schedule.policy import Bools, Floats, Ints


def place_counts(space: Space, wanted: Ints) -> tuple[Ints, Ints]:
    """Counts (K, J) that can be placed and the free nodes (K, P + 1) then, from wanted ones.

    Unchanged jobs are in place; the others are placed largest first on the fullest nodes they fit on, and shrink where
    there is no room, possibly to 0. A running job that was to grow and cannot stays as it is.
    """
    counts, free, cannot_grow = _place(space, wanted)
    wanted, rows, again = wanted.copy(), cannot_grow.any(axis=1), 0
    while rows.any():
        # Its GPUs went to others: they must do without them. After the second time nobody grows there.
        grows = space.running & (wanted[rows] > space.current)
        wanted[rows] = np.where(cannot_grow[rows] | (grows & (again > 0)), space.current, wanted[rows])
        counts[rows], free[rows], failed = _place(space, wanted[rows])
        cannot_grow[rows] = failed
        rows, again = cannot_grow.any(axis=1), again + 1
    return counts, free


def _place(space: Space, wanted: Ints) -> tuple[Ints, Ints, Bools]:
    """As `place_counts`, where jobs that were to grow may shrink; they are the third (K, J)."""
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


def offer_rest(space: Space, counts: Ints, free: Ints, limit: Ints, order: Ints) -> Ints:
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
            take_parts(left, gpus, np.full(len(these), nodes))
            free[these] = left


def refresh(space: Space, remembered: Ints, limit: Ints) -> Ints:
    """Counts (K, J) of an older population for today's jobs: cut to the limits (J,) and to valid sizes, and then, the
    last jobs first, to the GPUs that there are.

    Finished jobs are dropped before, by the caller's mapping of job ids.
    """
    counts = space.largest(np.minimum(remembered, limit))
    fits = np.cumsum(counts, axis=1) <= len(space.slots)
    return np.where(fits, counts, 0)


def mutate(parents: Ints, removable: Bools, chance: float, rng: np.random.Generator) -> Ints:
    """Uniform mutation: each job that is `removable` (J,) leaves all its GPUs with this chance."""
    jobs = len(removable)
    gone = np.zeros((len(parents), jobs + 1), dtype=np.bool_)  # the last column is the idle GPUs'
    gone[:, :jobs] = (rng.random((len(parents), jobs)) < chance) & removable
    return np.where(np.take_along_axis(gone, parents, axis=1), jobs, parents)


def fill_and_place(space: Space, wanted: Ints, limit: Ints, order: Ints) -> Ints:
    """Counts (K, J) from wanted ones: idle GPUs filled, everything placed, and what is left over filled again."""
    counts = fill(space, space.largest(np.minimum(wanted, limit)), limit, order)
    if not space.cluster.uniform:
        return counts
    counts, free = place_counts(space, counts)
    return offer_rest(space, counts, free, limit, order)


def fill(space: Space, counts: Ints, limit: Ints, order: Ints) -> Ints:
    """Counts (K, J) with idle GPUs given to the jobs in `order` (J,), each up to its `limit` (J,) (ONES §3.2).

    All at once: each job gets what those before it leave. GPUs that make no whole size are offered again.
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
    """Who is offered idle GPUs first: new jobs first come first served, then started jobs by remaining time.

    Remaining time at the current size, or at the smallest for a stopped job, with the progress `rho` (J,) of this
    generation.
    """
    new = (space.samples <= 0) & ~space.running
    speed = np.maximum(space.speed(np.where(space.running, space.current, space.smallest)), 1e-9)
    remaining = space.samples * (1.0 / rho - 1.0) / speed
    return np.lexsort((np.arange(len(speed)), np.where(new, 0.0, remaining), ~new))

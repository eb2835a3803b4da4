"""The steps of a generation (ONES §3.2), each over a whole population at once.

The paper fills and then reorders. Here reordering comes first: a free GPU is of use only where a whole shape
fits, so filling must know the nodes. No operator gives a GPU to two jobs, exceeds a limit, leaves a shape
that Slurm cannot be asked for, or takes a running job below its smallest size.
"""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.genome import IDLE
from slurm_ones.decide.ones_sc21.placement import pack, seat
from slurm_ones.decide.ones_sc21.space import Bools, Space
from slurm_ones.decide.policy import Floats, Ints


def refresh(space: Space, remembered: Ints, limit: Ints) -> Ints:
    """Counts (K, J) of an older population for today's jobs: cut to the limits (J,) and to valid sizes.

    Finished jobs are dropped before, by the caller's mapping of job ids.
    """
    return space.snap(remembered, limit)


def crossover(parents: Ints, rng: np.random.Generator) -> Ints:
    """Uniform crossover: K/2 pairs of parents (K, slots) swap each gene with chance 0.5; two children
    each."""
    half = len(parents) // 2
    order = rng.permutation(len(parents))
    mother, father = parents[order[:half]], parents[order[half : 2 * half]]
    swap = rng.random(mother.shape) < 0.5
    return np.concatenate([np.where(swap, father, mother), np.where(swap, mother, father)])


def mutate(parents: Ints, removable: Bools, chance: float, rng: np.random.Generator) -> Ints:
    """Uniform mutation: each job that is `removable` (J,) leaves all its slots with this chance.

    A running job then gets its smallest size back in `reorder`.
    """
    gone = (rng.random((len(parents), len(removable))) < chance) & removable
    gone = np.concatenate([gone, np.zeros((len(parents), 1), dtype=np.bool_)], axis=1)  # column of IDLE
    return np.where(np.take_along_axis(gone, parents, axis=1), IDLE, parents)


def reorder(space: Space, wanted: Ints) -> Ints:
    """A grid (K, J, N) for wanted sizes (K, J): placeable, changing as few occupied GPUs as possible.

    What does not fit is shrunk. A candidate in which a running job finds no place at all is packed again with
    every running job's smallest size kept on its own nodes; if that fails too, it becomes the current
    allocation.
    """
    grid = pack(space, wanted, shelter=False)
    bad = (grid.sum(axis=2) < space.floor).any(axis=1)
    if bad.any():
        again = pack(space, wanted[bad], shelter=True)
        again[(again.sum(axis=2) < space.floor).any(axis=1)] = space.home
        grid[bad] = again
    return grid


def fill(space: Space, grid: Ints, limit: Ints, order: Ints) -> Ints:
    """The grid with idle GPUs offered to the jobs in `order` (job indices), each up to its `limit` (J,).

    Costs one `seat` per job that can still grow.
    """
    grid = grid.copy()
    free = space.capacity - grid.sum(axis=1)
    counts = grid.sum(axis=2)
    for j in order:
        row = np.flatnonzero((counts[:, j] < limit[j]) & (free.max(axis=1, initial=0) > 0))
        if not len(row):
            continue
        room = free[row] + grid[row, j]
        size, take = seat(space, room, np.full(len(row), j), np.full(len(row), limit[j]))
        grows = size > counts[row, j]
        row, take = row[grows], take[grows]
        free[row] = room[grows] - take
        grid[row, j] = take
    return grid


def fill_order(space: Space, rho: Floats) -> Ints:
    """Who is offered idle GPUs first: new jobs first come first served, then started jobs by remaining time.

    Remaining time at the current size, or at the smallest for a stopped job, with the progress `rho` (J,) of
    this generation.
    """
    new = space.samples <= 0
    size = np.where(space.running, space.current, space.start)
    goodput = np.maximum(space.goodput[np.arange(len(size)), space.column[size]], 1e-9)
    remaining = space.samples * (1.0 / rho - 1.0) / goodput
    return np.lexsort((np.arange(len(size)), np.where(new, 0.0, remaining), ~(new & ~space.running)))

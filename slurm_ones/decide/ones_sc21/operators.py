"""The steps of a generation (ONES §3.2), each over a whole population at once.

No operator gives a GPU to two jobs, exceeds a limit, or leaves a size that Slurm cannot be asked for.
"""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.placement import place, start
from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.policy import Floats, Ints
from slurm_ones.schedule.tables import Bools


def refresh(space: Space, remembered: Ints, limit: Ints) -> Ints:
    """Counts (K, J) of an older population for today's jobs: cut to the limits (J,) and to valid sizes, and then, the
    last jobs first, to the GPUs that there are.

    Finished jobs are dropped before, by the caller's mapping of job ids.
    """
    counts = space.largest(np.minimum(remembered, limit))
    fits = np.cumsum(counts, axis=1) <= len(space.slots)
    return np.where(fits, counts, 0)


def crossover(parents: Ints, rng: np.random.Generator) -> Ints:
    """Uniform crossover: K/2 pairs of parents (K, GPUs) swap each gene with chance 0.5; two children each."""
    half = len(parents) // 2
    order = rng.permutation(len(parents))
    mother, father = parents[order[:half]], parents[order[half : 2 * half]]
    swap = rng.random(mother.shape) < 0.5
    return np.concatenate([np.where(swap, father, mother), np.where(swap, mother, father)])


def mutate(parents: Ints, removable: Bools, chance: float, rng: np.random.Generator) -> Ints:
    """Uniform mutation: each job that is `removable` (J,) leaves all its GPUs with this chance."""
    jobs = len(removable)
    gone = np.zeros((len(parents), jobs + 1), dtype=np.bool_)  # the last column is the idle GPUs'
    gone[:, :jobs] = (rng.random((len(parents), jobs)) < chance) & removable
    return np.where(np.take_along_axis(gone, parents, axis=1), jobs, parents)


def settle(space: Space, wanted: Ints, limit: Ints, order: Ints) -> Ints:
    """Counts (K, J) from wanted ones: idle GPUs filled, everything placed, and what is left over filled again."""
    counts = fill(space, space.largest(np.minimum(wanted, limit)), limit, order)
    if not space.cluster.uniform:
        return counts
    counts, free = place(space, counts)
    return start(space, counts, free, limit, order)


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
    speed = np.maximum(space.speed(np.where(space.running, space.current, space.start)), 1e-9)
    remaining = space.samples * (1.0 / rho - 1.0) / speed
    return np.lexsort((np.arange(len(speed)), np.where(new, 0.0, remaining), ~new))

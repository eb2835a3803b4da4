"""The steps of a generation (ONES §3.2), each over a whole population of columns (K, J) at once.

A candidate says for each job which size it gets. Slots of one node are alike and Slurm chooses the nodes, so the gene
is the job's size and not a slot's job. No operator exceeds the GPUs or gives a job a size that it may not have.
"""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones.worth import Choices
from slurm_ones.schedule.policy import Floats, Ints


def crossover(parents: Ints, rng: np.random.Generator) -> Ints:
    """Uniform crossover: K/2 pairs of parents (K, J) swap each gene with chance 0.5; two children each."""
    half = len(parents) // 2
    order = rng.permutation(len(parents))
    mother, father = parents[order[:half]], parents[order[half : 2 * half]]
    swap = rng.random(mother.shape) < 0.5
    return np.concatenate([np.where(swap, father, mother), np.where(swap, mother, father)])


def mutate(choices: Choices, parents: Ints, chance: float, rng: np.random.Generator) -> Ints:
    """Each candidate (K, J) with some jobs one size up or down; each job with `chance`, about four jobs at most."""
    count, jobs = parents.shape
    rate = min(chance, 4.0 / max(jobs, 1))
    rows = np.arange(jobs)
    moved = np.where(rng.random((count, jobs)) < 0.5, choices.up[rows, parents], choices.down[rows, parents])
    return np.where(rng.random((count, jobs)) < rate, moved, parents)


def repair(choices: Choices, candidates: Ints, least: Ints, rng: np.random.Generator) -> Ints:
    """Candidates (K, J) that need no more GPUs than there are.

    Where one needs more, jobs in random order go back to what the feasible solution `least` (J,) gives them, if that is
    less, until it fits.
    """
    excess = choices.sizes[candidates] - choices.sizes[least]
    over = choices.sizes[candidates].sum(axis=1) - choices.gpus
    if not (over > 0).any():
        return candidates
    order = rng.permuted(np.tile(np.arange(candidates.shape[1]), (len(candidates), 1)), axis=1)
    give = np.take_along_axis(np.maximum(excess, 0), order, axis=1)
    given = np.cumsum(give, axis=1)
    needed = (given - give < over[:, None]) & (give > 0)
    back = np.zeros(candidates.shape, dtype=np.bool_)
    np.put_along_axis(back, order, needed, axis=1)
    return np.where(back, least, candidates)


def improve(choices: Choices, candidates: Ints, rounds: int) -> Ints:
    """Candidates (K, J) after local search: in each round one job grows by a size where GPUs are left for it, or else
    where another gives up a size, if that gains."""
    candidates = candidates.copy()
    if not candidates.size:
        return candidates
    rows, every = np.arange(candidates.shape[1]), np.arange(len(candidates))
    tables = choices.more, choices.less, choices.gain, choices.loss
    more, less, gain, loss = now = [table[rows, candidates] for table in tables]
    left = choices.gpus - choices.sizes[candidates].sum(axis=1)
    for _ in range(rounds):
        with np.errstate(invalid="ignore", divide="ignore"):
            growth = np.where((more <= left[:, None]) & (gain > 0), gain / more, -np.inf)
        grows = growth.argmax(axis=1)
        free = np.isfinite(growth[every, grows])
        giver = (loss / np.maximum(less, 1)).argmin(axis=1)
        freed = left + less[every, giver]
        traded = np.where(more <= freed[:, None], gain, -np.inf)
        traded[every, giver] = -np.inf
        taker = traded.argmax(axis=1)
        trade = ~free & (traded[every, taker] > loss[every, giver] + 1e-12)
        if not (free | trade).any():
            break
        up = np.where(free, grows, taker)
        at = [(every[free | trade], up[free | trade], choices.up), (every[trade], giver[trade], choices.down)]
        for k, j, step in at:
            candidates[k, j] = step[j, candidates[k, j]]
            for table, shown in zip(tables, now, strict=True):
                shown[k, j] = table[j, candidates[k, j]]
        left = choices.gpus - choices.sizes[candidates].sum(axis=1)
    return candidates


def best_of(candidates: Ints, score: Floats, count: int) -> tuple[Ints, Floats]:
    """The `count` different candidates of highest score, best first; equal ones count once."""
    kept: dict[bytes, int] = {}
    for k in np.argsort(-score, kind="stable"):
        if len(kept) < count:
            kept.setdefault(candidates[k].tobytes(), int(k))
    chosen = list(kept.values())
    return candidates[chosen], score[chosen]

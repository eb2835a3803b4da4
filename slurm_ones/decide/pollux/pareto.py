"""Two aims at once: ranks and crowding of NSGA-II (Deb et al., IEEE TEC 2002), which Pollux's authors search with."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from slurm_ones.schedule.policy import Floats, Ints


def ranks(first: Floats, second: Floats) -> Ints:
    """(M,) front of each point, 0 for those that no other beats in one aim without losing in the other."""
    order = np.lexsort((-second, -first))
    result = np.zeros(len(first), dtype=np.int64)
    best: list[float] = []  # of each front, the negative of the most in the second aim so far
    before = (np.nan, np.nan)
    rank = 0
    for at, one, two in zip(order.tolist(), first[order].tolist(), second[order].tolist(), strict=True):
        if (one, two) != before:
            rank = bisect_right(best, -two)
            best[rank : rank + 1] = [-two]
            before = (one, two)
        result[at] = rank
    return result


def crowding(rank: Ints, first: Floats, second: Floats) -> Floats:
    """(M,) how far apart a point's neighbours in its front are, in shares of the front; infinite at its ends."""
    order = np.lexsort((-second, first, rank))
    front = rank[order]
    ends = np.flatnonzero(np.concatenate([[True], front[1:] != front[:-1], [True]]))
    size = np.diff(ends)
    gap = np.zeros(len(rank))
    for aim in (first[order], second[order]):
        spread = np.maximum.reduceat(aim, ends[:-1]) - np.minimum.reduceat(aim, ends[:-1])
        between = np.zeros(len(rank))
        between[1:-1] = np.abs(aim[2:] - aim[:-2])
        gap += between / np.repeat(np.where(spread > 0, spread, 1.0), size)
    gap[ends[:-1]] = np.inf
    gap[ends[1:] - 1] = np.inf
    result = np.empty(len(rank))
    result[order] = gap
    return result


def tournament(rank: Ints, gap: Floats, count: int, rng: np.random.Generator) -> Ints:
    """(count,) winners of pairs drawn by chance: the better front, then the less crowded."""
    one, other = rng.integers(len(rank), size=(2, count))
    wins = (rank[one] < rank[other]) | ((rank[one] == rank[other]) & (gap[one] >= gap[other]))
    winners: Ints = np.where(wins, one, other)
    return winners

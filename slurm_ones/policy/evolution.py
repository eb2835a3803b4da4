"""What evolutionary searches share, whatever a candidate is: crossover, selection, the check of their settings.

By one score, the best different candidates are kept; by two aims, NSGA-II's ranks and crowding (Deb et al., IEEE TEC
2002), which Pollux's authors search with.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from slurm_ones.policy.contract import Bools, Floats, Ints


def check_options(options: Any, least: Mapping[str, float]) -> None:
    """Raise ValueError naming a setting that is not of its default's kind, or below what is `least` for it (else 0)."""
    for field in fields(options):
        value, low = getattr(options, field.name), least.get(field.name, 0)
        if isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{field.name}: {value!r} must be true or false")
            continue
        if isinstance(field.default, str):
            if not isinstance(value, str):
                raise ValueError(f"{field.name}: {value!r} must be a text")
            continue
        whole = isinstance(field.default, int)
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not low <= value < math.inf:
            raise ValueError(f"{field.name}: {value!r} must be {'a whole' if whole else 'a'} number of at least {low}")
    if options.mutation > 1:
        raise ValueError(f"mutation: {options.mutation!r} must be a chance between 0 and 1")


def cross(mothers: Ints, fathers: Ints, swapped: Bools) -> Ints:
    """Two children of each pair (P, G): the genes `swapped` (P, G) of one parent with the other's, and the reverse."""
    return np.concatenate([np.where(swapped, fathers, mothers), np.where(swapped, mothers, fathers)])


def uniform_crossover(parents: Ints, rng: np.random.Generator) -> Ints:
    """K/2 pairs of parents (K, G) drawn by chance swap each gene with chance 0.5 (ONES §3.2)."""
    half = len(parents) // 2
    order = rng.permutation(len(parents))
    mothers, fathers = parents[order[:half]], parents[order[half : 2 * half]]
    return cross(mothers, fathers, rng.random(mothers.shape) < 0.5)


def best_of(candidates: Ints, score: Floats, count: int) -> tuple[Ints, Floats]:
    """The `count` different candidates (K, G) of highest score, best first; equal ones count once."""
    kept: dict[bytes, int] = {}
    for k in np.argsort(-score, kind="stable"):
        if len(kept) < count:
            kept.setdefault(candidates[k].tobytes(), int(k))
    chosen = list(kept.values())
    return candidates[chosen], score[chosen]


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

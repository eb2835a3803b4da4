"""Uneven shares: division of a step's samples over ranks of different speed.

Ranks exchange gradients once a step, so that a step takes as long as its slowest rank. With shares in proportion to
speed, all ranks finish at the same time. (Ma et al., "Adaptive Elastic Training for Sparse Deep Learning on
Heterogeneous Multi-GPU Servers", arXiv:2110.07029, also adapt each GPU's batch to its speed.) The gradient stays the
exact mean over the step's samples, since the exchange weights each rank's gradient with its number of samples
(exchange.py).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Shares:
    """Rule that divides the samples of each step over the ranks; equal on all ranks."""

    speeds: tuple[float, ...]
    """Speed of each rank, above 0, in any unit."""
    most: tuple[int, ...]

    def samples(self, total: int, passes: int) -> tuple[int, ...]:
        """Return each rank's samples in a step of `total` samples, in at most `passes` passes.

        The slowest rank finishes as early as possible: each further sample goes to the rank that would finish it first
        (method of highest averages). Each rank gets at least one sample if possible; rank 0 always does. Raises
        ValueError if `total` samples do not fit.
        """
        return _divided(self.speeds, self.most, total, passes)


@lru_cache(maxsize=64)
def _divided(speeds: tuple[float, ...], most: tuple[int, ...], total: int, passes: int) -> tuple[int, ...]:
    world = len(speeds)
    if total <= world:
        return tuple(int(rank < total) for rank in range(world))
    caps = [each * passes for each in most]
    if sum(caps) < total:
        raise ValueError(f"{world} ranks hold {sum(caps)} samples in {passes} passes, and the step has {total}")
    # In the end no rank gets less than this, so only the rest is dealt one by one.
    whole = sum(speeds)
    counts = [max(1, min(cap, int((total - world) * speed / whole))) for cap, speed in zip(caps, speeds, strict=True)]
    waiting = [((counts[rank] + 1) / speeds[rank], rank) for rank in range(world) if counts[rank] < caps[rank]]
    heapq.heapify(waiting)
    for _ in range(total - sum(counts)):
        rank = waiting[0][1]
        counts[rank] += 1
        if counts[rank] < caps[rank]:
            heapq.heapreplace(waiting, ((counts[rank] + 1) / speeds[rank], rank))
        else:
            heapq.heappop(waiting)
    return tuple(counts)

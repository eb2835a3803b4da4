"""Uneven shares: how a step's samples are divided over ranks of different speed.

Ranks exchange gradients once a step, so a step takes as long as its slowest rank. Shares in proportion to speed let all
ranks end together. (Ma et al., "Adaptive Elastic Training for Sparse Deep Learning on Heterogeneous Multi-GPU Servers",
arXiv:2110.07029, adapt the batch of each GPU to its speed, too.) The gradient stays the exact mean over the step's
samples, since the exchange weighs each rank's gradient by its samples (exchange.py).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Shares:
    """Division of the samples of each step; the same on all ranks."""

    speeds: tuple[float, ...]
    """Speed of each rank, above 0; only their ratios count."""
    most: tuple[int, ...]

    def samples(self, total: int, passes: int) -> tuple[int, ...]:
        """Return each rank's samples in a step of `total` samples, in at most `passes` passes.

        The slowest rank ends as early as possible: each next sample goes to the rank that would finish it first (method
        of highest averages). Each rank gets at least one sample while there are enough; rank 0 always does. Raises
        ValueError if the ranks cannot hold `total`.
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

"""Ranks of one replica in a circle: each sends to the next rank and receives from the rank before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

FORWARD, BACK = 0, 1
"""Tags of messages: blocks that travel to be read, and sums that travel to be completed."""


class Circle:
    """This rank's place among `size` consecutive ranks, beginning with rank `first` of the default group. A circle has
    no group of its own: the default group changes in a job of blocks, and messages then go to its new ranks."""

    def __init__(self, rank: int = 0, size: int = 1, first: int = 0) -> None:
        self.rank, self.size, self._first = rank, size, first
        self.sent_bytes = 0
        """Bytes of payload that this rank has sent."""

    def source(self, step: int) -> int:
        """Return the rank, within the circle, whose block this rank has after `step` shifts."""
        return (self.rank - step) % self.size

    def shift(self, tensor: torch.Tensor, tag: int = FORWARD) -> Callable[[], torch.Tensor]:
        """Begin to send `tensor` to the next rank; return a function that awaits the previous rank's tensor. `tensor`
        must be contiguous, and stay unchanged until that function has returned. Collective over the circle."""
        arriving = torch.empty_like(tensor)
        following = self._first + (self.rank + 1) % self.size
        before = self._first + (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, following, tag=tag),
                dist.P2POp(dist.irecv, arriving, before, tag=tag),
            ]
        )
        self.sent_bytes += tensor.nbytes
        return partial(_arrived, works, arriving, tensor)

    def around(self, mine: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the blocks of all ranks, this rank's first, while the next block is under way. Collective."""
        here = mine.contiguous()
        for step in range(self.size):
            coming = self.shift(here) if step < self.size - 1 else None
            yield here
            if coming is not None:
                here = coming()

    def sum_to_owners(self, part: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return the sum over all ranks of their `part(this rank)`; `part(owner)` is this rank's part for an owner.

        The sum for an owner begins at the rank after the owner and ends with the owner, so each rank sends `size - 1`
        parts. The tensor that `part` returns is overwritten. Collective over the circle.
        """
        total = part(self.source(1))
        for step in range(2, self.size + 1):
            coming = self.shift(total, BACK)
            mine = part(self.source(step))
            total = mine.add_(coming())
        return total


def _arrived(works: Sequence[dist.Work], arriving: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """Wait for the previous rank's tensor and return it; until then `sent` must stay referenced."""
    for work in works:
        work.wait()
    return arriving

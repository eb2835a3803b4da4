"""The ranks of one replica in a circle: each sends to the next rank and receives from the previous one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

FORWARD, BACK = 0, 1
"""Message tags: of blocks that other ranks read, and of sums to which other ranks add."""


class Circle:
    """Position of this rank among `size` consecutive ranks of the default group, beginning with rank `first`. A circle
    has no process group of its own: messages use the default group, which changes in a job of blocks."""

    def __init__(self, rank: int = 0, size: int = 1, first: int = 0) -> None:
        self.rank, self.size, self._first = rank, size, first
        self.sent_bytes = 0
        """Bytes of payload that this rank has sent."""

    def source(self, step: int) -> int:
        """Return the rank within the circle whose block this rank has after `step` shifts."""
        return (self.rank - step) % self.size

    def shift(self, tensor: torch.Tensor, tag: int = FORWARD) -> Callable[[], torch.Tensor]:
        """Start sending `tensor` to the next rank. Return a function that waits for the previous rank's tensor and
        returns it. `tensor` must be contiguous, and must not change until then. Collective over the circle."""
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
        """Yield the blocks of all ranks, this rank's first. The next block is sent while the caller uses the present
        one. Collective over the circle."""
        here = mine.contiguous()
        for step in range(self.size):
            coming = self.shift(here) if step < self.size - 1 else None
            yield here
            if coming is not None:
                here = coming()

    def sum_to_owners(self, part: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return the sum over all ranks of their `part(owner)`, with this rank as the owner. `part(owner)` returns a
        rank's contribution to the sum for `owner`.

        Each sum begins at the rank after its owner, goes around the circle, and ends at its owner, so that each rank
        sends `size - 1` tensors. Tensors that `part` returns are overwritten. Collective over the circle.
        """
        total = part(self.source(1))
        for step in range(2, self.size + 1):
            coming = self.shift(total, BACK)
            mine = part(self.source(step))
            total = mine.add_(coming())
        return total


def _arrived(works: Sequence[dist.Work], arriving: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """Wait for the previous rank's tensor and return it. The argument `sent` keeps the sent tensor alive meanwhile."""
    for work in works:
        work.wait()
    return arriving

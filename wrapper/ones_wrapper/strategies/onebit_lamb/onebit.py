"""Mean over ranks with error feedback, with one bit per element.

This is the compressed all-reduce of 1-bit Adam (arXiv 2102.02888) and 1-bit LAMB (arXiv 2104.06069). Each rank adds its
error of the last call to its values. It sends the signs of the sum, and as one scale the root mean square. Its new
error is the difference between the sum and what it sent. Each rank is the server of one chunk of the vector. The server
averages the chunk over all ranks, and sends the average in the same way, with an error of its own.

Nothing is lost, only delayed: result + new errors = mean of the values + old errors, where errors are the mean of the
ranks' plus the servers'. So one vector can hold all errors, at any number of ranks: `OneBitMean.carried`.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather into one tensor, under torch's new or old name."""


class OneBitMean:
    """Compressed mean over the ranks of a process group (default: all). Methods are collective, except
    `ranks_changed`."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._server: torch.Tensor | None = None
        """Error of this rank as the server of its chunk; None if there is none."""
        self.sent = 0
        """Bytes of payload that this rank has sent so far."""

    def ranks_changed(self) -> None:
        """Continue with new ranks. The servers' errors are lost unless `carried` was called before."""
        self._server = None

    def __call__(self, values: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the approximate mean of all ranks' `values`, and this rank's new error, both of shape [n]. `error` is
        this rank's error of the last call. With one rank the mean is `values` + `error`, and the new error is 0.

        A rank sends 2 (N-1)/N n bits, and 2 (N-1) scales.
        """
        world, wanted = dist.get_world_size(self.group), values + error
        if world == 1:
            return wanted, torch.zeros_like(wanted)
        each, used = self._chunk(wanted.numel())
        signs, size = _split(wanted)
        bits, scales = pack(_padded(signs, each * world)), wanted.new_empty(world)
        received = torch.empty_like(bits)
        dist.all_to_all_single(received, bits, group=self.group)
        _all_gather(scales, size.reshape(1), group=self.group)
        shown = unpack(received).view(world, each)[:, :used]
        scales = scales.unsqueeze(1)
        chunk = torch.where(shown, scales, -scales).mean(0)
        if self._server is not None:
            chunk += self._server
        chunk_signs, chunk_size = _split(chunk)
        mine, all_scales = pack(_padded(chunk_signs, each)), wanted.new_empty(world)
        _all_gather(bits, mine, group=self.group)
        _all_gather(all_scales, chunk_size.reshape(1), group=self.group)
        # Errors are kept only once all has arrived: if a rank is lost before, this step was not made.
        self._server = chunk - torch.where(chunk_signs, chunk_size, -chunk_size)
        self.sent += sent_bytes(wanted.numel(), world, wanted.element_size())
        all_scales = all_scales.unsqueeze(1)
        mean = torch.where(unpack(bits).view(world, each), all_scales, -all_scales).view(-1)[: wanted.numel()]
        return mean, wanted - torch.where(signs, size, -size)

    def carried(self, error: torch.Tensor) -> torch.Tensor:
        """Return all errors as one vector, equal on all ranks: the mean of the ranks' errors, plus the servers'. Each
        rank continues with this as its own error, at any number of ranks, and the servers with none. Takes one
        all-reduce of [n]."""
        world = dist.get_world_size(self.group)
        found = error / world
        if world > 1:
            if self._server is not None:
                each, used = self._chunk(error.numel())
                start = dist.get_rank(self.group) * each
                found[start : start + used] += self._server
            dist.all_reduce(found, group=self.group)
        self._server = None
        return found

    def _chunk(self, n: int) -> tuple[int, int]:
        """Return the elements of a chunk (a multiple of 8), and those of this rank's chunk without padding."""
        each = 8 * -(-n // (8 * dist.get_world_size(self.group)))
        return each, min(max(n - dist.get_rank(self.group) * each, 0), each)


def sent_bytes(n: int, world: int, element: int = 4) -> int:
    """Return the bytes that a rank sends for the mean of a vector [n]. A scale has `element` bytes."""
    return 2 * (world - 1) * (-(-n // (8 * world)) + element)


def _split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values >= 0, torch.linalg.vector_norm(values) / math.sqrt(max(values.numel(), 1))


def _padded(signs: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(signs, (0, size - signs.numel()))


def pack(signs: torch.Tensor) -> torch.Tensor:
    """Convert bools [8 n] to bytes [n]."""
    groups = signs.view(-1, 8).view(torch.uint8)
    packed = groups[:, 0].clone()
    for bit in range(1, 8):
        packed |= groups[:, bit] << bit
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Convert bytes [n] to bools [8 n]."""
    groups = packed.new_empty(packed.numel(), 8)
    for bit in range(8):
        torch.bitwise_and(packed >> bit, 1, out=groups[:, bit])
    return groups.view(torch.bool).view(-1)

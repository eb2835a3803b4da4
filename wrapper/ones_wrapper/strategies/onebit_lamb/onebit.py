"""One bit an element: a mean over ranks with error feedback, and the gradient exchange that goes with it.

The mean is the compressed all-reduce of 1-bit Adam (arXiv 2102.02888) and 1-bit LAMB (arXiv 2104.06069). Each rank
adds to its values what it kept back the last time, its error. Of the sum it sends signs and one scale, the root of the
mean square, and keeps the rest as its new error. Each rank is the server of one chunk: it takes the mean of what all
sent of the chunk, and sends that on in the same way, with an error of its own.

What goes in comes out, now or later: result + (mean of the ranks' errors + the servers' errors, in order) is the mean
of the values + the same of before. So one vector holds all errors, whatever the number of ranks: `OneBitMean.carried`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from ones_wrapper.gradients.exchange import DdpExchange, known, scale
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its new name since torch 2.13, which warns of the old one."""


class OneBitMean:
    """The mean over the ranks of a group of torch.distributed, the default one unless another is given. Each method is
    collective but `ranks_changed`."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._server: torch.Tensor | None = None
        """Residual of its chunk that this rank keeps back; None for nothing."""
        self.sent = 0
        """Bytes of payload that this rank has sent so far."""

    def ranks_changed(self) -> None:
        """Go on with other ranks. The servers' errors are lost, unless `carried` was called before."""
        self._server = None

    def __call__(self, values: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the mean of all ranks' `values`, about; this rank's new error), both of the shape [n] of `values` and of
        `error`, this rank's error of the last time. A single rank gets values + error, and no error is left.

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
        # Nothing is kept before all has arrived: where a rank is lost meanwhile, this step was not made.
        self._server = chunk - torch.where(chunk_signs, chunk_size, -chunk_size)
        self.sent += sent_bytes(wanted.numel(), world, wanted.element_size())
        all_scales = all_scales.unsqueeze(1)
        mean = torch.where(unpack(bits).view(world, each), all_scales, -all_scales).view(-1)[: wanted.numel()]
        return mean, wanted - torch.where(signs, size, -size)

    def carried(self, error: torch.Tensor) -> torch.Tensor:
        """All errors as one vector, the same on all ranks: what each is to go on with as its own error, at this or
        another number of ranks. The servers then keep nothing back. It takes one all-reduce of [n].
        """
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
        """The elements of a chunk, a multiple of 8, and how many of this rank's are no padding."""
        each = 8 * -(-n // (8 * dist.get_world_size(self.group)))
        return each, min(max(n - dist.get_rank(self.group) * each, 0), each)


def sent_bytes(n: int, world: int, element: int = 4) -> int:
    """Bytes that a rank sends for a mean of [n], with elements and scales of `element` bytes."""
    return 2 * (world - 1) * (-(-n // (8 * world)) + element)


def _split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs (zero counts as positive) and scale of a vector."""
    return values >= 0, torch.linalg.vector_norm(values) / math.sqrt(max(values.numel(), 1))


def _padded(signs: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(signs, (0, size - signs.numel()))


def pack(signs: torch.Tensor) -> torch.Tensor:
    """Bools [8 n] as bytes [n]."""
    groups = signs.view(-1, 8).view(torch.uint8)
    packed = groups[:, 0].clone()
    for bit in range(1, 8):
        packed |= groups[:, bit] << bit
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [n] as bools [8 n]."""
    groups = packed.new_empty(packed.numel(), 8)
    for bit in range(8):
        torch.bitwise_and(packed >> bit, 1, out=groups[:, bit])
    return groups.view(torch.bool).view(-1)


class Compressing(Protocol):
    """The optimizer of a model with a `OneBitExchange`, as the exchange uses it."""

    @property
    def frozen(self) -> bool:
        """True if the optimizer exchanges its momentum, so that gradients are not averaged."""

    def settle(self) -> None:
        """Merge the ranks' residuals into one. Collective."""


class OneBitExchange(DdpExchange):
    """Gradients are averaged over samples as by DistributedDataParallel, until their optimizer exchanges its momentum:
    then each rank keeps its own, scaled so that the plain mean over ranks is the mean over the step's samples.
    """

    def __init__(self, group: Group, noise: NoiseScale | None, made: Callable[[], Compressing | None]) -> None:
        """`made` gives the optimizer, once there is one."""
        super().__init__(group, noise)
        self._made = made

    def trained_by(self, optimizers: Sequence[torch.optim.Optimizer], scaled: bool = False) -> None:
        made: object = self._made()
        if len(optimizers) != 1 or optimizers[0] is not made:
            kinds = " and ".join(sorted(type(one).__name__ for one in optimizers)) or "none"
            raise ValueError(
                f"onebit_lamb: the model's optimizer is {kinds}; make one, of all its parameters, with "
                "OneBitLamb.optimizer(model.parameters(), lr=...)"
            )

    @contextmanager
    def published(self) -> Iterator[None]:
        self.settle()
        yield

    def settle(self) -> None:
        if (made := self._made()) is not None:
            made.settle()

    def _reduce(self, bucket: int, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        world, made = self._group.world, self._made()
        if world == 1 or made is None or not made.frozen:
            return super()._reduce(bucket, gradient)
        part = self._now()
        if not part.last:
            return known(gradient)
        if self._noise is not None:
            self._noise.skip()  # nobody sees the mean gradient
        scale(gradient, self._unit * world, part.share.total)
        return known(gradient)

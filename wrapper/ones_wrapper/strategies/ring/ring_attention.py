"""Exact attention over sequences that are split over a circle of ranks, by blocks and with an online softmax.

This is Ring Attention (Liu, Zaharia and Abbeel, 2310.01889) with the balanced causal order known as zig-zag. Keys and
values are sent around the circle. Each rank keeps its queries, its output and one logsumexp per query, and computes the
scores again in the backward pass. So no tensor of size length² is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ones_wrapper.strategies.ring import sdpa_kernel as fused
from ones_wrapper.strategies.ring import tile as block
from ones_wrapper.strategies.ring.circle import BACK, Circle
from ones_wrapper.strategies.ring.tile import Above, Dropout, Place


@dataclass(frozen=True)
class Arrangement:
    """Distribution of a sequence's tokens over the ranks of a circle."""

    circle: Circle
    length: int
    causal: bool = False
    """True if a token attends only to itself and earlier tokens. The sequence is then cut into 2N pieces, and rank n of
    N has pieces n and 2N − 1 − n, so that all ranks have equal work. If False, it is cut into N pieces, and rank n has
    piece n."""

    def __post_init__(self) -> None:
        size, pieces = self.circle.size, self.circle.size * (2 if self.causal else 1)
        if self.length % pieces:
            raise ValueError(
                f"ring: {self.length} tokens over {size} ranks must be a multiple of {pieces}"
                f"{' (two pieces a rank, since it is causal)' if self.causal else ''}; pad to "
                f"{padded_length(self.length, size, self.causal)} tokens, or take {_fitting(self.length, self.causal)}"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens of a sequence on each rank."""
        return self.length // self.circle.size

    def positions(self, rank: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the positions in the whole sequence of a rank's tokens, (tokens,), in the rank's own order."""
        if not self.causal:
            return torch.arange(rank * self.tokens, (rank + 1) * self.tokens, device=device)
        half, last = self.tokens // 2, 2 * self.circle.size - 1 - rank
        early = torch.arange(rank * half, (rank + 1) * half, device=device)
        return torch.cat((early, torch.arange(last * half, (last + 1) * half, device=device)))

    def meeting(self, source: int) -> tuple[slice, slice, bool]:
        """Return (slice of this rank's queries, slice of rank `source`'s keys to which they attend, True for a causal
        mask).

        For causal attention between different ranks, all queries attend to the early half of the keys, or the late
        queries to all keys. So the work is half of a whole block's.
        """
        rank, everything = self.circle.rank, slice(0, self.tokens)
        if not self.causal or source == rank:
            return everything, everything, self.causal
        if source < rank:
            return everything, slice(0, self.tokens // 2), False
        return slice(self.tokens // 2, self.tokens), everything, False


def padded_length(length: int, size: int, causal: bool) -> int:
    """Return the smallest length of at least `length` tokens that can be split over `size` ranks."""
    pieces = size * (2 if causal else 1)
    return -(-length // pieces) * pieces


def fits(length: int, size: int, causal: bool) -> bool:
    """Return True if sequences of `length` tokens can be split over `size` ranks."""
    return length % (size * (2 if causal else 1)) == 0


def _fitting(length: int, causal: bool) -> str:
    sizes = [size for size in range(1, min(length, 64) + 1) if fits(length, size, causal)]
    return f"{', '.join(map(str, sizes[:12]))} ranks" if sizes else "an even number of tokens"


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arrangement: Arrangement,
    *,
    real: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    scale: float | None = None,
    function: type[torch.autograd.Function] | None = None,
) -> torch.Tensor:
    """Return the softmax attention of this rank's queries to all keys of the sequences. Collective over the circle.

    `q`, `k` and `v` are those of this rank's tokens, (batch, heads, tokens, width). The result has the same shape, in
    the memory order (batch, tokens, heads, width). `real`, (batch, length), is False for padding tokens of the whole
    sequences, and equal on all ranks. A query that sees no keys gets 0. `scale` is 1/√width by default. Gradients are
    those of dense attention, not divided by the number of ranks. Under autocast the type is that of torch's attention.
    `function` may replace the computation by blocks, for example by `two_pass`.

    Raises ValueError if shapes contradict the arrangement or each other.
    """
    tokens, length = arrangement.tokens, arrangement.length
    if q.ndim != 4 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            f"ring: q, k and v must be of one shape (batch, heads, tokens, width), not {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[2] != tokens:
        raise ValueError(
            f"ring: {q.shape[2]} tokens on this rank, where {arrangement.circle.size} ranks hold {tokens} each of "
            f"{length}; take each rank's own with shard, and pad shorter sequences to {length} with pad"
        )
    if real is not None and real.shape != (q.shape[0], length):
        raise ValueError(f"ring: the mask must be of whole sequences, {(q.shape[0], length)}, not {tuple(real.shape)}")
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (one.to(torch.get_autocast_dtype(q.device.type)) for one in (q, k, v))
    meetings = Meetings(arrangement, real, dropout, scale or 1 / math.sqrt(q.shape[-1]))
    found: torch.Tensor = (function or _Ring).apply(q, k, v, meetings)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Meetings:
    """Masks and positions of this rank's queries and all ranks' keys, for one call of attention."""

    arrangement: Arrangement
    real: torch.Tensor | None
    dropout: Dropout | None
    scale: float

    def at(self, source: int, device: torch.device) -> tuple[slice, slice, Place]:
        """Return the slices of this rank's queries and of rank `source`'s keys that interact, with their positions and
        masks."""
        rows, columns, triangular = self.arrangement.meeting(source)
        mine, its = (self.arrangement.positions(rank, device) for rank in (self.arrangement.circle.rank, source))
        return rows, columns, self.place(mine[rows], its[columns], triangular)

    def place(self, queries: torch.Tensor, keys: torch.Tensor, triangular: bool) -> Place:
        real = None if self.real is None else self.real[:, keys]
        return Place(queries, keys, self.scale, triangular, real, self.dropout)


class _Ring(torch.autograd.Function):
    """Autograd function of attention by blocks in a ring. Forward and backward send blocks while they compute."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meetings: Meetings) -> torch.Tensor:
        circle, kernel = meetings.arrangement.circle, fused if fused.usable(q, meetings.dropout) else block
        output = total = None
        with torch.autocast(q.device.type, enabled=False):
            for step, both in enumerate(circle.around(torch.stack((k, v)))):
                rows, columns, place = meetings.at(circle.source(step), q.device)
                keys, values = both[:, :, :, columns]
                more, its_total = kernel.forward(q[:, :, rows], keys, values, place)
                if output is None or total is None:
                    output, total = more, its_total
                else:
                    block.merge(output[:, :, rows], total[:, :, rows], more, its_total)
        assert output is not None
        # Heads next to their tokens: the next step joins the heads, and so takes a view rather than another copy.
        found: torch.Tensor = output.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, found, total)
        ctx.meetings, ctx.kernel = meetings, kernel
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, total = ctx.saved_tensors
        circle = ctx.meetings.arrangement.circle
        with torch.autocast(q.device.type, enabled=False):
            gradient = block.precise(gradient)
            above = Above(gradient, total, (gradient * block.precise(output)).sum(-1))
            dq = torch.zeros_like(gradient)
            own = returning = None
            for step, both in enumerate(circle.around(torch.stack((k, v)))):
                rows, columns, place = ctx.meetings.at(circle.source(step), q.device)
                keys, values = both[:, :, :, columns]
                more, dk, dv = ctx.kernel.backward(q[:, :, rows], keys, values, place, above.rows(rows))
                dq[:, :, rows] += more
                part = dq.new_zeros(both.shape)
                part[:, :, :, columns] = torch.stack((dk, dv))
                if step == 0:
                    own = part
                else:  # a block's sum begins at the rank after its owner, and follows the block around
                    if returning is not None:
                        part += returning()
                    returning = circle.shift(part, BACK)
            assert own is not None
            if returning is not None:  # the last shift, without which the sums would be the next rank's
                own += returning()
        dk, dv = own
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None

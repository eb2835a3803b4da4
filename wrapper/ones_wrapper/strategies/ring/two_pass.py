"""Ring self-attention as in its paper, in two passes around the ring (Li et al., 2105.13120).

First the keys are sent around, and each rank keeps all scores of its queries; then the values are sent around. This
exists for comparison: `ring_attention` gives the same result in less memory. The paper all-reduces the gradients of
keys and values. Here each rank's sum goes around the ring once, which takes half the bytes. Unlike in the authors'
library, gradients are not divided by the number of ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ones_wrapper.strategies.ring.ring_attention import Arrangement, Meetings, ring_attention
from ones_wrapper.strategies.ring.tile import Place, precise


class _TwoPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meetings: Meetings) -> torch.Tensor:
        arrangement, circle = meetings.arrangement, meetings.arrangement.circle
        with torch.autocast(q.device.type, enabled=False):
            queries, where = precise(q), _whole(meetings, q.device)
            scores = torch.cat([queries @ precise(keys).mT for keys in circle.around(k)], -1).mul_(where.scale)
            if (hidden := where.hidden()) is not None:
                scores.masked_fill_(hidden, -torch.inf)
            p = scores.softmax(-1)
            if hidden is not None:
                p.nan_to_num_(0.0)  # a query that sees no key
            dropped = _dropped(p, where)
            output = torch.zeros_like(queries)
            blocks = torch.split(dropped, arrangement.tokens, -1)
            for weights, values in zip(blocks, circle.around(v), strict=True):
                output += weights @ precise(values)
        ctx.save_for_backward(q, k, v, p)
        ctx.rest = arrangement, where
        return output.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        arrangement, where = ctx.rest
        with torch.autocast(q.device.type, enabled=False):
            gradient, queries = precise(gradient), precise(q)
            dv = _owners(arrangement, _dropped(p, where), gradient)
            dp = torch.cat([gradient @ precise(values).mT for values in arrangement.circle.around(v)], -1)
            if (factors := where.factors(p)) is not None:
                dp *= factors
            ds = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p).mul_(where.scale)
            dk = _owners(arrangement, ds, queries)
            dq = torch.zeros_like(queries)
            for part, keys in zip(torch.split(ds, arrangement.tokens, -1), arrangement.circle.around(k), strict=True):
                dq += part @ precise(keys)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


two_pass_attention = partial(ring_attention, function=_TwoPass)
"""`ring_attention` in two passes. It keeps the probabilities, (batch, heads, tokens, length), for the backward pass."""


def _whole(meetings: Meetings, device: torch.device) -> Place:
    """Return the place of this rank's queries and all ranks' keys. The keys are in the order in which their blocks
    arrive."""
    arrangement, circle = meetings.arrangement, meetings.arrangement.circle
    order = torch.cat([arrangement.positions(circle.source(step), device) for step in range(circle.size)])
    return meetings.place(arrangement.positions(circle.rank, device), order, arrangement.causal)


def _owners(arrangement: Arrangement, weights: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks of weightsᵀ · mine, for this rank's keys."""
    circle, blocks = arrangement.circle, torch.split(weights, arrangement.tokens, -1)
    return circle.sum_to_owners(lambda owner: blocks[(circle.rank - owner) % circle.size].mT @ mine)


def _dropped(p: torch.Tensor, where: Place) -> torch.Tensor:
    factors = where.factors(p)
    return p if factors is None else p * factors

"""What ranks do in the tests of attention in a ring. They make rings of any smaller size, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ones_wrapper.group import Group
from ones_wrapper.strategies.ring import tile as block
from ones_wrapper.strategies.ring.circle import Circle
from ones_wrapper.strategies.ring.ring_attention import Arrangement, ring_attention
from ones_wrapper.strategies.ring.tile import Dropout
from ones_wrapper.strategies.ring.two_pass import two_pass_attention

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 32, 4
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"ring": ring_attention, "two passes": two_pass_attention}


def circle_of(group: Group, size: int) -> Circle:
    """The ring of `size` consecutive ranks that this one is in."""
    return Circle(group.rank % size, size, group.rank - group.rank % size)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, real: torch.Tensor | None, dropout: Dropout | None
) -> torch.Tensor:
    """Attention by its definition."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = (seen.tril() if causal else seen).expand(scores.shape)
    if real is not None:
        seen = seen & real[:, None, None, :]
    p = torch.where(seen, scores, -1e30).softmax(-1) * seen  # a row without keys becomes 0
    if dropout is not None:
        batch, heads, length = p.shape[:3]
        places = torch.arange(batch * heads * length * length).view(p.shape)
        p = p * (block.uniform(places, dropout.key) >= dropout.rate) / (1 - dropout.rate)
    return p @ v


def whole(replica: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, of whole sequences."""
    generator = torch.Generator().manual_seed(replica)
    shape = (BATCH, HEADS, LENGTH, WIDTH)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


def padding() -> torch.Tensor:
    """The second sequence is short, and the first one begins with padding, whose own queries see nothing if causal."""
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[1, 20:] = False
    real[0, :3] = False
    return real


def errors(
    group: Group, size: int, name: str, causal: bool, mask: bool, rate: float, dtype: torch.dtype
) -> list[float]:
    """The largest absolute differences of output, dq, dk and dv from the dense ones."""
    circle = circle_of(group, size)
    arrangement = Arrangement(circle, LENGTH, causal)
    *inputs, above = whole(group.rank // size, dtype)
    mine = arrangement.positions(circle.rank)
    real, dropout = padding() if mask else None, Dropout(rate, 12345 - (7 << 59), LENGTH) if rate else None
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v = leaves
    expected = dense(q, k, v, causal, real, dropout)
    torch.autograd.backward(expected, above)
    parts = [x[:, :, mine].clone().requires_grad_() for x in inputs]
    output = FUNCTIONS[name](*parts, arrangement, real=real, dropout=dropout)
    torch.autograd.backward(output, above[:, :, mine])
    pairs = [(output.detach(), expected.detach())]
    for part, leaf in zip(parts, leaves, strict=True):
        assert part.grad is not None and leaf.grad is not None
        pairs.append((part.grad, leaf.grad))
    return [float((found - wanted[:, :, mine]).abs().max()) for found, wanted in pairs]


def sent(group: Group, size: int, name: str, causal: bool) -> tuple[int, int]:
    """Bytes that this rank sent in the forward pass and in the backward pass."""
    circle = circle_of(group, size)
    arrangement = Arrangement(circle, LENGTH, causal)
    parts = [x[:, :, arrangement.positions(circle.rank)].float().requires_grad_() for x in whole(0)[:3]]
    output = FUNCTIONS[name](*parts, arrangement)
    before = circle.sent_bytes
    torch.autograd.backward(output.sum())
    return before, circle.sent_bytes - before


def errors_in_chunks(group: Group, size: int) -> list[float]:
    """`errors` where few scores fit."""
    most, block.SCORES = block.SCORES, 100
    try:
        return errors(group, size, "ring", True, True, 0.3, torch.float64)
    finally:
        block.SCORES = most

"""Attention layer for a ring, with the parameters of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import torch
from torch import nn

from ones_wrapper.strategies.ring.strategy import Ring


class RingAttention(nn.Module):
    """Self-attention over sequences that are split over a ring, in place of `nn.MultiheadAttention`.

    Parameters have the names, shapes and initial values of `nn.MultiheadAttention(width, heads, batch_first=True)`. So
    the two modules load each other's checkpoints. `Ring(causal=...)` sets whether attention is causal.
    """

    def __init__(self, ring: Ring, width: int, heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        """`dropout` is the fraction of attention probabilities that are dropped. Raises ValueError if `width` is no
        multiple of `heads`."""
        super().__init__()
        if width % heads:
            fitting = [str(n) for n in range(1, width + 1) if width % n == 0][:12]
            raise ValueError(f"ring: heads={heads} must divide width={width}; {', '.join(fitting)} would")
        self.ring, self.heads, self.rate = ring, heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width)) if bias else None
        self.out_proj = nn.Linear(width, width, bias=bias)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention's output for `x`, this rank's tokens; both are (batch, tokens, width). `real`, (batch,
        length), is False for padding tokens of the whole sequences. Collective over the ring."""
        joined = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (one.view(*one.shape[:2], self.heads, -1).transpose(1, 2) for one in joined.chunk(3, -1))
        seen = self.ring.attention(q, k, v, real=real, dropout=self.rate if self.training else 0.0)
        out: torch.Tensor = self.out_proj(seen.transpose(1, 2).flatten(2))
        return out

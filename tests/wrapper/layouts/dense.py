"""An ordinary language model, which the layouts' tests are measured against, and its twin on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ones_wrapper.strategies.optimus import modules
from ones_wrapper.strategies.optimus.costs import MeshTransformer
from ones_wrapper.strategies.optimus.mesh import Mesh

HIDDEN, HEADS, VOCAB, LENGTH = 24, 6, 96, 12
SMALL = MeshTransformer(HIDDEN, HEADS, VOCAB, layers=1, length=LENGTH)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.packed, self.joined = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.packed(x)
        heads = packed.shape[-1] // (3 * self.size)
        queries, keys, values = packed.unflatten(-1, (heads, 3, self.size)).transpose(1, 2).unbind(-2)
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        joined: torch.Tensor = self.joined(seen.transpose(1, 2).flatten(2))
        return joined


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.back(gelu(self.wide(x)))
        return found


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.before_mlp, self.mlp = nn.LayerNorm(hidden), Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        found: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return found


class Dense(nn.Module):
    """Tokens [samples, length] to logits [samples, length, vocabulary]."""

    def __init__(self, sizes: MeshTransformer = SMALL) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.token, self.place = nn.Embedding(sizes.vocab, hidden), nn.Embedding(sizes.length, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, sizes.heads) for _ in range(sizes.layers)))
        self.norm, self.output = nn.LayerNorm(hidden), nn.Linear(hidden, sizes.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        found: torch.Tensor = self.output(self.norm(self.blocks(x)))
        return found


class Meshed(nn.Module):
    """The same on a mesh: this row's tokens to blocks of logits."""

    def __init__(self, mesh: Mesh, sizes: MeshTransformer = SMALL) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.token = modules.Embedding(mesh, sizes.vocab, hidden)
        self.place = modules.Positions(mesh, sizes.length, hidden)
        self.blocks = nn.Sequential(*(modules.TransformerBlock(mesh, hidden, sizes.heads) for _ in range(sizes.layers)))
        self.norm, self.output = modules.LayerNorm(mesh, hidden), modules.Linear(mesh, hidden, sizes.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(self.norm(self.blocks(self.place(self.token(tokens)))))
        return found


T = TypeVar("T")


def in_double(make: Callable[[], T], seed: int = 0) -> T:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def twins(mesh: Mesh, seed: int = 0) -> tuple[Dense, Meshed]:
    """Both from one seed, in double precision."""
    return in_double(Dense, seed), in_double(lambda: Meshed(mesh), seed)


def texts(samples: int, seed: int, sizes: MeshTransformer = SMALL) -> torch.Tensor:
    """Token numbers [samples, length + 1]."""
    return torch.randint(sizes.vocab, (samples, sizes.length + 1), generator=torch.Generator().manual_seed(seed))

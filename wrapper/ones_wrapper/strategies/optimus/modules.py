"""Layers and loss of a transformer on a q × q mesh (Xu et al. 2021, arXiv 2104.05343).

Each layer takes and returns blocks: for activations [samples, length, hidden], rank (i, j) has [samples of row i,
length, hidden / q]. Each layer draws its whole parameters from the default generator, as torch's dense layer does, and
keeps its block. With one seed on all ranks the model equals the dense model on any mesh. The parameters are DTensors
with the names and whole shapes of the dense layer. So a checkpoint loads on any mesh, and into the dense model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ones_wrapper.group.flat import local
from ones_wrapper.strategies.optimus import summa
from ones_wrapper.strategies.optimus.mesh import FEATURES, MATRIX, TABLE, Mesh, features


class Linear(nn.Module):
    """`torch.nn.Linear` on a mesh, from blocks […, inputs / q] to blocks […, outputs / q]."""

    def __init__(self, mesh: Mesh, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        dense = nn.Linear(inputs, outputs, bias)
        self.mesh = mesh
        self.weight = mesh.cut(dense.weight, MATRIX)
        self.bias = mesh.cut(dense.bias, FEATURES) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = summa.product(x.flatten(0, -2), local(self.weight).t(), self.mesh)
        if self.bias is not None:
            product = product + features(self.bias, self.mesh).to(product.dtype)
        return product.view(*x.shape[:-1], product.shape[-1])


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm` over the last dimension of blocks […, size / q]."""

    def __init__(self, mesh: Mesh, size: int) -> None:
        super().__init__()
        dense = nn.LayerNorm(size)
        self.mesh, self.size, self.eps = mesh, size, dense.eps
        self.weight, self.bias = mesh.cut(dense.weight, FEATURES), mesh.cut(dense.bias, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal: torch.Tensor = _Normal.apply(x, self.size, self.eps, self.mesh)  # type: ignore[no-untyped-call]
        return torch.addcmul(features(self.bias, self.mesh), normal, features(self.weight, self.mesh))


class _Normal(torch.autograd.Function):
    """Normalisation x̂ = (x − mean) / √(variance + eps), where the features of a sample are split over a row of the
    mesh."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, eps: float, mesh: Mesh) -> torch.Tensor:
        # Two passes: the mean of squares less the square of the mean would lose digits where the mean is large.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        away = wide - mesh.sum_in_row(wide.sum(-1, keepdim=True)) / size
        scale = (mesh.sum_in_row(away.square().sum(-1, keepdim=True)) / size + eps).rsqrt()
        normal = (away * scale).to(x.dtype)
        ctx.save_for_backward(normal, scale)
        ctx.size, ctx.mesh = size, mesh
        return normal

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        normal, scale = ctx.saved_tensors
        gradient = gradient.to(scale.dtype)
        sums = torch.stack([gradient.sum(-1, keepdim=True), (gradient * normal).sum(-1, keepdim=True)])
        mean, slope = ctx.mesh.sum_in_row(sums) / ctx.size
        return (gradient - mean - normal * slope) * scale, None, None, None


class Embedding(nn.Module):
    """`torch.nn.Embedding` on a mesh, from token numbers [samples of the row, …] to blocks […, size / q]. The rows of
    the mesh split the vocabulary; each row's block of the table is sent along the columns."""

    def __init__(self, mesh: Mesh, count: int, size: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = mesh.cut(nn.Embedding(count, size).weight, TABLE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Lookup.apply(local(self.weight), tokens, self.mesh)  # type: ignore[no-untyped-call]
        return found

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the transposed table, from blocks [samples, …, size / q] to blocks [samples, …, count
        / q]. Use it for a model whose output layer shares the embedding's weights."""
        product = summa.product(x.flatten(0, -2), local(self.weight), self.mesh, transposed=True)
        return product.view(*x.shape[:-1], product.shape[-1])


class _Lookup(torch.autograd.Function):
    """Product of one-hot rows with a table, computed without the one-hot matrix."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, tokens: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.mesh, ctx.table = mesh, table.shape
        found = table.new_zeros(*tokens.shape, table.shape[1])
        for part, some in enumerate(summa.arriving(table, mesh.in_column, mesh.row, mesh.q)):
            here = (tokens // len(some) == part)[..., None]
            found = torch.where(here, some[tokens % len(some)], found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tokens,), mesh = ctx.saved_tensors, ctx.mesh
        count, size = ctx.table

        def of(part: int) -> torch.Tensor:
            mine = torch.where((tokens // count == part)[..., None], gradient, 0).flatten(0, -2)
            return gradient.new_zeros(count, size).index_add_(0, tokens.flatten() % count, mine)

        return summa.summed((of(part) for part in range(mesh.q)), mesh.in_column, mesh.row), None, None


class Positions(nn.Module):
    """Learned positions that are added to blocks [samples, length, size / q]; drawn as those of
    `torch.nn.Embedding(length, size)`."""

    def __init__(self, mesh: Mesh, length: int, size: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = mesh.cut(nn.Embedding(length, size).weight, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + features(self.weight, self.mesh)[: x.shape[1]]


class Attention(nn.Module):
    """Self-attention on blocks [samples, length, hidden / q]. A rank has the samples of its row, and heads / q whole
    heads.

    The outputs of `packed`, `torch.nn.Linear(hidden, 3 * hidden)`, are ordered by head: query, key and value of the
    first head, and so on.
    """

    def __init__(self, mesh: Mesh, hidden: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        if hidden % heads or heads % mesh.q:
            raise ValueError(f"attention: {heads} heads do not divide {hidden} features and {mesh.q} columns of ranks")
        self.heads, self.size, self.causal = heads // mesh.q, hidden // heads, causal
        self.packed = Linear(mesh, hidden, 3 * hidden)
        self.joined = Linear(mesh, hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.packed(x).unflatten(-1, (self.heads, 3, self.size)).transpose(1, 2).unbind(-2)
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        joined: torch.Tensor = self.joined(seen.transpose(1, 2).flatten(2))
        return joined


class Mlp(nn.Module):
    """Two linear layers on blocks […, hidden / q], with a GELU and 4 × hidden features between them."""

    def __init__(self, mesh: Mesh, hidden: int) -> None:
        super().__init__()
        self.wide = Linear(mesh, hidden, 4 * hidden)
        self.back = Linear(mesh, 4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.back(gelu(self.wide(x)))
        return found


class TransformerBlock(nn.Module):
    """Transformer block with norms before attention and MLP: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, mesh: Mesh, hidden: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.before_attention = LayerNorm(mesh, hidden)
        self.attention = Attention(mesh, hidden, heads, causal)
        self.before_mlp = LayerNorm(mesh, hidden)
        self.mlp = Mlp(mesh, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        found: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return found


IGNORED = -100
"""Target of tokens that do not count in the loss, as in torch."""


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the mean loss over the tokens of the replica's local batch, equal on all ranks of the replica.

    `logits` are blocks [samples of the row, …, vocabulary / q], `targets` are token numbers [samples of the row, …]. No
    rank gets the whole vocabulary: the ranks of a row exchange three numbers per token. The forward pass is collective,
    the backward pass is not.
    """
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))  # as torch's under autocast
    loss: torch.Tensor = _CrossEntropy.apply(wide, targets.flatten(), mesh)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        count = logits.shape[1]
        # The largest logit of a token over the whole row of ranks keeps the exponentials small.
        largest = mesh.sum_in_row(logits.amax(1), dist.ReduceOp.MAX)
        away = logits - largest[:, None]
        counted = targets != IGNORED
        mine = counted & (targets // count == mesh.column)
        places = (targets % count)[:, None]
        target = torch.where(mine, away.gather(1, places)[:, 0], 0)
        shares = away.exp_()
        sums, target = mesh.sum_in_row(torch.stack([shares.sum(1), target]))
        shares /= sums[:, None]
        losses = torch.where(counted, sums.log() - target, 0)
        total, tokens = mesh.sum_in_column(torch.stack([losses.sum(), counted.sum().to(losses.dtype)]))
        ctx.save_for_backward(shares, places, mine, counted, tokens)
        mean: torch.Tensor = total / tokens
        return mean

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        shares, places, mine, counted, tokens = ctx.saved_tensors
        found = shares.scatter_add(1, places, -mine[:, None].to(shares.dtype))
        return found.mul_((gradient / tokens * counted)[:, None]), None, None

"""Cross-entropy where no rank has all of the vocabulary: the row's ranks exchange three numbers a token."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ones_wrapper.strategies.optimus.mesh import Mesh

IGNORED = -100
"""Target of tokens that do not count, as in torch."""


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The mean over the tokens of the replica's local batch, the same on all of its ranks.

    `logits` are blocks [samples of the row, …, vocabulary / q], `targets` token numbers [samples of the row, …].
    Collective, its backward pass is not.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), mesh)  # type: ignore[no-untyped-call]
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

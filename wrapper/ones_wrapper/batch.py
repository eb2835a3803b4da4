"""Batch size and learning rate: what is in force for a wish, and how the optimizer comes to know."""

from __future__ import annotations

import math
from typing import Any

import torch

RULES = ("linear", "sqrt", "none")


def clamp_batch(wanted: int, world: int, max_batch: int, max_local_batch: int) -> int:
    """The global batch in force, in samples: no larger than the job takes or its GPUs hold in one pass."""
    return max(1, min(wanted, max_batch, max_local_batch * world))


def lr_factor(batch: int, base_batch: int, rule: str, cap: float) -> float:
    """Learning rate over the one chosen for `base_batch`.

    `linear` is Goyal et al. 2017 (arXiv 1706.02677), as in ONES §3.3; `sqrt` keeps the noise of adaptive
    optimizers (Krizhevsky 2014, arXiv 1404.5997). `cap` bounds it from above.
    """
    ratio = batch / base_batch
    factor = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
    return min(factor, cap)


class LrScale:
    """Multiplies an optimizer's learning rate during its step alone.

    Schedulers, checkpoints and logs so always see the learning rate that the script set.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        self.stepped = False
        """Whether the optimizer has stepped since this was last set to False."""
        self._base: list[Any] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._base = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._base, strict=True):
            group["lr"] = lr
        self.stepped = True

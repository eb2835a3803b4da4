"""The learning rate's factor over one job: through batches, newly measured noise, ramps and restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ones_wrapper.data.progress import Progress

RULES = ("linear", "sqrt", "adascale", "none")


@dataclass(frozen=True)
class LrRule:
    """How the learning rate follows the global batch. Raises ValueError for an unknown rule or a cap that is not
    positive.

    - `linear`: with the batch (Goyal et al. 2017, arXiv 1706.02677, §2.1), as in ONES §3.3.
    - `sqrt`: with its square root, which keeps the noise of an update (Krizhevsky 2014, arXiv 1404.5997, §3.2).
    - `adascale`: the gain of AdaScale (Johnson et al. 2020, arXiv 2007.05105, §3), from 1 where larger batches bring
      nothing to batch/base where gradients are all noise. It is batch/base × the efficiency of a sample, so a step
      is worth `gain` steps at the base batch, and the progress in samples of the base batch, over that batch, is
      the paper's count of scale-invariant iterations.
    - `none`: as the script set it.
    """

    base_batch: int
    """Global batch that the script's learning rate was chosen for."""
    rule: str = "linear"
    cap: float = 8.0
    """Largest factor."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"lr_rule={self.rule!r} is none of {', '.join(RULES)}")
        if not self.cap > 0:
            raise ValueError(f"lr_cap={self.cap} must be positive")

    @property
    def follows_noise(self) -> bool:
        """Whether the factor changes with the measured noise, at an unchanged batch."""
        return self.rule == "adascale"

    def factor(self, batch: float, noise: float | None) -> float:
        """Learning rate at this batch over the script's own; `noise` is the gradient noise scale in samples,
        None before anything was measured: AdaScale then raises nothing.
        """
        ratio = batch / self.base_batch
        if self.rule == "linear":
            factor = ratio
        elif self.rule == "sqrt":
            factor = math.sqrt(ratio)
        elif self.rule == "adascale":
            factor = _gain(ratio, self.base_batch, noise)
        else:
            factor = 1.0
        return min(factor, self.cap)


def _gain(ratio: float, base_batch: int, noise: float | None) -> float:
    """AdaScale's gain, (σ² + μ²)/(σ²/S + μ²), with σ² = tr(Σ)/base and μ² = |G|², whose ratio is the noise scale."""
    low, high = min(1.0, ratio), max(1.0, ratio)
    if noise is None:
        return low
    return min(max(ratio * (noise + base_batch) / (noise + ratio * base_batch), low), high)


class LrScale:
    """Multiplies the learning rate of optimizers during their steps alone.

    Schedulers, checkpoints and logs so always see the learning rate that the script set.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        """In force for the next step."""
        self.target = 1.0
        self.left = 0
        """Steps until the target is in force. With `factor` all that a later run needs: it sets `factor`
        and calls `aim(target, left)`."""
        self.stepped = False
        """Whether an optimizer has stepped since `expect`."""
        self._moves = False
        """Whether what stepped since then counts for the ramp."""
        self._base: dict[torch.optim.Optimizer, list[Any]] = {}
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def aim(self, target: float, steps: int = 0) -> None:
        """Go to `target` in equal parts over `steps` steps (Goyal et al. 2017, §2.2); at once for 0."""
        self.target, self.left = target, max(0, steps)
        if not self.left:
            self.factor = target

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.factor == 1.0:
            return
        self._base[optimizer] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._base.pop(optimizer, ()), strict=False):
            group["lr"] = lr
        self.stepped = True
        # To learn an optimizer's state, torch.distributed.checkpoint steps at rate 0: that is no step of the ramp.
        if self.left and any(float(group["lr"]) for group in optimizer.param_groups):
            self._moves = True

    def expect(self) -> None:
        """A step of the loop is about to be made."""
        self.stepped = self._moves = False

    def advance(self) -> None:
        """A step of the loop was made: the ramp moves once, however often which optimizers stepped in it."""
        if self._moves and self.left:
            self.factor += (self.target - self.factor) / self.left
            self.left -= 1
        self._moves = False


class Rate:
    """What multiplies the learning rates of a job's optimizers, as the rule and the batch want it: all alike."""

    def __init__(self, rule: LrRule, ramp: int, *optimizers: torch.optim.Optimizer) -> None:
        """`ramp` is the number of steps over which a new factor is reached."""
        self._rule = rule
        self._ramp = ramp
        self._scale = LrScale(*optimizers)

    @property
    def factor(self) -> float:
        """In force for the next step."""
        return self._scale.factor

    @property
    def target(self) -> float:
        """Where it goes."""
        return self._scale.target

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since `expect`."""
        return self._scale.stepped

    def expect(self) -> None:
        """A step is about to be made."""
        self._scale.expect()

    def resume(self, progress: Progress, batch: float) -> None:
        """Go on where the last run was, on its way to where the batch wants it."""
        target = self._wanted(progress, batch)
        self._scale.factor = progress.lr_factor or target
        self._scale.aim(target, progress.lr_ramp if target == progress.lr_target else self._ramp)

    def change(self, progress: Progress, batch: float) -> None:
        """Another batch is in force."""
        self._scale.aim(self._wanted(progress, batch), self._ramp)

    def follow(self, progress: Progress, batch: float) -> None:
        """The noise was measured anew."""
        if self._rule.follows_noise:
            self._scale.aim(self._wanted(progress, batch), self._scale.left)

    def remember(self, progress: Progress) -> None:
        """A step was made, or the rate set anew: write down what a later run needs."""
        scale = self._scale
        scale.advance()
        progress.lr_factor, progress.lr_target, progress.lr_ramp = scale.factor, scale.target, scale.left

    def _wanted(self, progress: Progress, batch: float) -> float:
        return self._rule.factor(batch, progress.noise or None)

"""The learning rate's factor over one job: through batches, newly measured noise and restarts."""

from __future__ import annotations

import torch

from ones_wrapper.batch import LrRule, LrScale
from ones_wrapper.checkpoint import Progress


class Rate:
    """What multiplies the learning rate of one optimizer, as the rule and the batch want it."""

    def __init__(self, rule: LrRule, ramp: int, optimizer: torch.optim.Optimizer) -> None:
        """`ramp` is the number of steps over which a new factor is reached."""
        self._rule = rule
        self._ramp = ramp
        self._scale = LrScale(optimizer)

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
        """Whether the optimizer has stepped since `expect`."""
        return self._scale.stepped

    def expect(self) -> None:
        """A step is about to be made."""
        self._scale.stepped = False

    def resume(self, progress: Progress, batch: int) -> None:
        """Go on where the last run was, on its way to where the batch wants it."""
        target = self._wanted(progress, batch)
        self._scale.factor = progress.lr_factor or target
        self._scale.aim(target, progress.lr_ramp if target == progress.lr_target else self._ramp)

    def change(self, progress: Progress, batch: int) -> None:
        """Another batch is in force."""
        self._scale.aim(self._wanted(progress, batch), self._ramp)

    def follow(self, progress: Progress, batch: int) -> None:
        """The noise was measured anew."""
        if self._rule.follows_noise:
            self._scale.aim(self._wanted(progress, batch), self._scale.left)

    def remember(self, progress: Progress) -> None:
        """Write down what a later run needs."""
        scale = self._scale
        progress.lr_factor, progress.lr_target, progress.lr_ramp = scale.factor, scale.target, scale.left

    def _wanted(self, progress: Progress, batch: int) -> float:
        return self._rule.factor(batch, progress.noise or None)

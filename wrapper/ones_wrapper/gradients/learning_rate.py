"""Rules by which learning rate and momentum follow the global batch, for each optimizer class.

A step of k base batches is to move the parameters as far as k steps of one base batch. Momentum is to average over as
many samples as before. So the rate is multiplied by k, and momentum (μ of SGD, β₁ of Adam) is raised to the power k.
SGD's rate and momentum buffer are also rescaled, so that a step with a constant gradient is k times as long. β₂, ε and
weight decay stay the same.

This rule is valid for batches up to a fraction of the gradient noise scale (`ones_wrapper.protocol.growth`); above it
training diverges. For larger batches, and before the noise scale is known, momentum stays as the script set it. The
rate is then at most `CAP` times the largest rate of the script's schedule so far; for Adam this limit always applies.
For other optimizers the factor is √k, with the same limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.protocol.growth import MOST, OTHER, SILENT, bound, doubled

CAP = 2.0
"""Largest learning rate, as a multiple of the largest rate of the script's own schedule so far."""


def rule_of(optimizer: torch.optim.Optimizer) -> str:
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    return "adam" if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) else OTHER


def common_rule(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return the rule of a job's optimizers; `OTHER` if they have different rules."""
    found = {rule_of(optimizer) for optimizer in optimizers}
    return found.pop() if len(found) == 1 else OTHER


class Rate:
    """Rule that changes learning rate and momentum of optimizers only while they step, so that schedulers and
    checkpoints get the script's own values."""

    def __init__(self, base: float, *optimizers: torch.optim.Optimizer, follows: bool = True) -> None:
        """`base` is the batch for which the script's rate was chosen. If `follows` is False, nothing is changed."""
        self.rule = common_rule(optimizers) if follows else SILENT
        self._base, self._optimizers = base, optimizers
        self._ratio = self._power = 1.0
        """Samples of the present step divided by the base batch; `_power` is the power to which momentum is raised."""
        self._peaks = [0.0 for _ in optimizers]
        self.stepped = False
        """True if an optimizer has stepped in the present step of the loop."""
        self.stepping = False
        """True from the beginning of an optimizer's step until its end. It stays True if the step raises an error."""
        self._own: dict[torch.optim.Optimizer, list[dict[str, Any]]] = {}
        for number, optimizer in enumerate(optimizers):
            optimizer.register_step_pre_hook(lambda one, *_, number=number: self._before(number, one))
            optimizer.register_step_post_hook(self._after)

    def resume(self, progress: TrainingProgress) -> None:
        """Set the power of momentum and the largest rates from the `progress` of a checkpoint or of other ranks."""
        self._power = progress.momentum_power
        self._peaks = [*progress.lr_peaks, *self._peaks[len(progress.lr_peaks) :]][: len(self._peaks)]

    def admit(self, progress: TrainingProgress, batch: float) -> bool:
        """Admit the present batch if it needs no more samples than the base batch, by the noise scale. Return True if
        the admission changed. The bound comes from the noise scale's lower bound, or from its mean for a batch that is
        already admitted."""
        before, most = progress.admitted, bound(self.rule, self._base, progress.noise_low)
        if batch <= before:
            most = max(most, bound(self.rule, self._base, progress.noise))
        progress.admitted = batch if self._base < batch <= most else 0.0
        return (progress.admitted >= batch) != (before >= batch)

    def free(self, progress: TrainingProgress) -> int:
        """Return the largest global batch that needs no more samples than the base batch, by the newest noise scale."""
        return int(max(doubled(self.rule, int(self._base), progress.noise_low), progress.admitted))

    def power(self, progress: TrainingProgress, batch: float) -> float:
        """Return the power to which momentum is raised at this batch; 1 if the script's momentum is used."""
        if self.rule not in ("sgd", "adam") or batch > max(self._base, progress.admitted):
            return 1.0
        return batch / self._base

    def factor(self, progress: TrainingProgress, batch: float) -> float:
        """Return the factor of the learning rate at this batch; for SGD, of rate / (1 − momentum)."""
        return self._factor(0, batch / self._base, self.power(progress, batch))

    def begin(self, progress: TrainingProgress, batch: float, total: float) -> None:
        """Begin a step of `total` samples at the global batch `batch`. The factor of a smaller step, such as an epoch's
        last, is for `total`, but at least for the base batch."""
        self.stepping = self.stepped = False
        own = max(total, min(batch, self._base)) if total < batch else batch
        self._ratio, power = own / self._base, self.power(progress, own)
        if power != self._power and self.rule == "sgd":
            for optimizer in self._optimizers:
                _scale_buffers(optimizer, self._power, power)
        self._power = progress.momentum_power = power

    def remember(self, progress: TrainingProgress) -> None:
        """Store the script's largest rates in `progress`, for later runs."""
        progress.lr_peaks = list(self._peaks)

    def _factor(self, number: int, ratio: float, power: float) -> float:
        if self.rule == SILENT or ratio == 1.0:
            return 1.0
        factor = ratio**0.5 if self.rule == OTHER else min(ratio, MOST)
        if self.rule == "sgd" and power != 1.0:
            return factor
        now = max((float(group["lr"]) for group in self._optimizers[number].param_groups), default=0.0)
        return min(factor, max(1.0, CAP * max(self._peaks[number], now) / now)) if now else factor

    def _before(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        self.stepping = True
        groups = optimizer.param_groups
        factor = self._factor(number, self._ratio, self._power)
        self._peaks[number] = max([self._peaks[number], *(float(group["lr"]) for group in groups)])
        if factor == self._power == 1.0:
            return
        self._own[optimizer] = [{name: group.get(name) for name in ("lr", "momentum", "betas")} for group in groups]
        for group in groups:
            scale = factor
            if self._power != 1.0 and self.rule == "adam":
                first, *others = group["betas"]
                group["betas"] = (first**self._power, *others)
            elif self._power != 1.0 and group.get("momentum"):
                momentum, group["momentum"] = group["momentum"], group["momentum"] ** self._power
                scale *= (1.0 - group["momentum"]) / (1.0 - momentum)
            group["lr"] = group["lr"] * scale

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group, own in zip(optimizer.param_groups, self._own.pop(optimizer, ()), strict=False):
            group.update({name: value for name, value in own.items() if name in group})
        self.stepping, self.stepped = False, True

    def words(self, progress: TrainingProgress, batch: float) -> str:
        """Return a text about learning rate and momentum at this batch, for the job's log."""
        factor, power = self.factor(progress, batch), self.power(progress, batch)
        text = f"learning rate {factor:.3g} times the script's"
        if self.rule in (OTHER, SILENT) or batch <= self._base:
            return text if self.rule != SILENT else "learning rate as the script sets it"
        if power != 1.0:
            return f"{text}, momentum to the power {power:.3g}"
        if not progress.noise_low:
            return f"{text}, momentum as it is: the gradient noise scale is not known yet"
        most = bound(self.rule, self._base, progress.noise_low)
        return f"{text}, momentum as it is: by the gradient noise scale a step of over {most:.0f} samples gains less"


def _scale_buffers(optimizer: torch.optim.Optimizer, old: float, new: float) -> None:
    """Rescale momentum buffers after the power of momentum changed from `old` to `new`, as for a constant gradient."""
    for group in optimizer.param_groups:
        momentum = group.get("momentum") or 0.0
        scale = (1.0 - momentum**old) / (1.0 - momentum**new)
        for parameter in group["params"]:
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                buffer.mul_(scale)

"""Batch size, learning rate and passes: what is in force for a wish, and how the script's optimizer comes to know."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ones_wrapper.checkpoint import Progress

RULES = ("linear", "sqrt", "adascale", "none")


def clamp_batch(wanted: int, world: int, max_batch: int, max_local_batch: int, max_passes: int = 1) -> int:
    """The global batch in force, in samples: no larger than the job takes or its GPUs hold in `max_passes` passes."""
    return max(1, min(wanted, max_batch, max_local_batch * max_passes * world))


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

    def factor(self, batch: int, noise: float | None) -> float:
        """Learning rate at this global batch over the script's own; `noise` is the gradient noise scale in samples,
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
    """Multiplies an optimizer's learning rate during its step alone.

    Schedulers, checkpoints and logs so always see the learning rate that the script set.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        """In force for the next step."""
        self.target = 1.0
        self.left = 0
        """Optimizer steps until the target is in force. With `factor` all that a later run needs: it sets `factor`
        and calls `aim(target, left)`."""
        self.stepped = False
        """Whether the optimizer has stepped since this was last set to False."""
        self._base: list[Any] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def aim(self, target: float, steps: int = 0) -> None:
        """Go to `target` in equal parts over `steps` optimizer steps (Goyal et al. 2017, §2.2); at once for 0."""
        self.target, self.left = target, max(0, steps)
        if not self.left:
            self.factor = target

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._base = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._base, strict=True):
            group["lr"] = lr
        self.stepped = True
        # To learn an optimizer's state, torch.distributed.checkpoint steps at rate 0: that is no step of the ramp.
        if self.left and any(float(lr) for lr in self._base):
            self.factor += (self.target - self.factor) / self.left
            self.left -= 1


class Gate:
    """With several passes to a step, lets an unchanged loop act rightly.

    In each pass such a loop calls backward, `optimizer.step()` and `optimizer.zero_grad()`, in either order. Gradients
    of the passes add up, so the step is due in the last pass alone, and zeroing only before the first pass or after
    the step. The same holds for what `register` was given beside the optimizer: torch's schedulers step and gradient
    scalers unscale, step and update in the last pass (outside the passes, as at the end of an epoch, always), and
    `model.zero_grad()` is the optimizer's.

    What changes gradients between backward and step, such as clipping, must be left to the last pass by the script;
    it is refused with what to write. So are closures: a step evaluates them again and again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *others: object) -> None:
        """Raises ValueError for an optimizer that cannot do without a closure."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "register: LBFGS evaluates the model several times a step through a closure, which cannot be averaged "
                "over ranks and passes here; use an optimizer that steps from .grad"
            )
        self._index, self._count = 0, 1
        self._asked = self._backward = False
        self._seen: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._zero = optimizer.zero_grad
        self._gate_optimizer(optimizer)
        for other in others:
            if isinstance(other, LRScheduler):
                _override(other, step=self._due(type(other).step))
            elif isinstance(other, torch.amp.GradScaler):
                kind = type(other)
                _override(
                    other,
                    unscale_=self._due(kind.unscale_),
                    step=self._due(kind.step, asks=True),
                    update=self._due(kind.update),
                )
            elif isinstance(other, torch.nn.Module):
                for module in (other, getattr(other, "module", None)):
                    if isinstance(module, torch.nn.Module):
                        module.zero_grad = MethodType(self._zeroing(module.zero_grad), module)  # type: ignore[method-assign]
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.is_leaf]
        # Two witnesses of each backward: cheap, and either may be unused in a model.
        for parameter in {id(p): p for p in (*trained[:1], *trained[-1:])}.values():
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    @property
    def updates(self) -> bool:
        """Whether this pass ends with the optimizer's step."""
        return self._index == self._count - 1

    def begin(self, index: int, count: int) -> None:
        """Pass `index` of `count` begins. A step that the script left before its last pass is dropped; where it
        leaves the loop, `begin(0, 1)` does that.
        """
        if index == 0 and not self.updates:
            self._zero()
        self._index, self._count = index, count
        self._asked = self._backward = False
        self._seen.clear()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self.updates and parameter.grad is not None:
            self._backward = True
            self._seen[parameter] = parameter.grad, parameter.grad._version

    def _gate_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Bound methods on the instance: torch's schedulers patch `step.__func__`, before or after this, and `wraps`
        keeps their mark of it."""
        step = optimizer.step

        @wraps(step)
        def gated(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if any(callable(value) for value in (*args, kwargs.get("closure"))):
                raise ValueError(
                    "optimizer.step: a closure is not taken, since gradients are averaged over ranks and passes before "
                    "the step; call loss.backward() yourself, then optimizer.step()"
                )
            self._asked = True
            if self.updates:
                return step(*args, **kwargs)
            self._check_scaler()
            self._check_unchanged()
            return None

        optimizer.step = MethodType(gated, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(self._zeroing(optimizer.zero_grad), optimizer)  # type: ignore[method-assign]

    def _zeroing(self, zero: Callable[..., None]) -> Callable[..., None]:
        @wraps(zero)
        def gated(owner: object, *args: Any, **kwargs: Any) -> None:
            begins = self._index == 0 and not (self._asked or self._backward)
            if self._count == 1 or begins or (self.updates and self._asked):
                zero(*args, **kwargs)

        return gated

    def _due(self, method: Callable[..., Any], asks: bool = False) -> Callable[..., Any]:
        """`method` in the last pass alone; `asks` says that it asks for the optimizer's step."""

        @wraps(method)
        def gated(owner: object, *args: Any, **kwargs: Any) -> Any:
            self._asked = self._asked or asks
            if self.updates:
                return method(owner, *args, **kwargs)
            self._check_unchanged()
            return None

        return gated

    def _check_unchanged(self) -> None:
        for parameter, (gradient, version) in self._seen.items():
            if parameter.grad is not gradient or gradient._version != version:
                raise RuntimeError(
                    f"gradients were changed after the backward of pass {self._index + 1} of {self._count}, before all "
                    "passes were added up. Clip, unscale or otherwise change them once a step: "
                    "`if job.updates: torch.nn.utils.clip_grad_norm_(...)`"
                )

    def _check_scaler(self) -> None:
        """A gradient scaler that was not registered unscales the sum again in each pass."""
        frame = sys._getframe(2)
        for _ in range(4):
            if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler) and frame.f_locals["self"].is_enabled():
                raise RuntimeError(
                    "the gradient scaler was not registered, so it would unscale each pass's gradients again. Name it: "
                    "job.register(..., scaler=scaler)"
                )
            if frame.f_back is None:
                break
            frame = frame.f_back


def _override(thing: object, **methods: Callable[..., Any]) -> None:
    """Override methods of one object. By a class of its own, as attributes of a scheduler go into its checkpoints."""
    kind = type(thing)
    thing.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


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

"""Gradient accumulation by wrappers around optimizer and gradient scaler, which `Job.register` returns.

If a batch does not fit, a step takes several accumulation steps: forward and backward passes whose gradients add up.
The script's loop calls backward, `optimizer.step()` and `optimizer.zero_grad()` in each accumulation step. With the
wrappers, optimizer and gradient scaler act only in the last one, and so do schedulers (`schedule.py`). Gradients are
zeroed only before the first one, or after the optimizer's step. (Accelerate's wrappers do the same.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ones_wrapper.script.optimizers import shown

CHANGED = (
    "gradients were changed in accumulation step {index} of {count}, before all of them were added up. Zero them "
    "by the optimizer that job.prepare or job.register returned, not by the model. Clip them once a step: "
    "`if job.updates: torch.nn.utils.clip_grad_norm_(...)`. Give it a gradient scaler, too, and use what is returned: "
    "`model, optimizer, scaler = job.prepare(model, optimizer, scaler)`"
)
UNWRAPPED = (
    "optimizer.step: this is the optimizer that the job was given. Where a step may take several accumulation steps, "
    "use the one that it returned: `model, optimizer = job.prepare(model, optimizer)`"
)
ALTERNATES = (
    "a backward pass came after an optimizer's step, in one of several accumulation steps: models that are trained in "
    "turns (a GAN) cannot accumulate, since the second's gradients belong to the first's new parameters. Leave out "
    "max_accumulation_steps, or call all backwards before all steps"
)
CLOSURE = (
    "optimizer.step: a closure is not taken, since gradients are averaged over ranks and accumulation steps before the "
    "step; call loss.backward() yourself, then optimizer.step()"
)
UNREGISTERED_SCALER = (
    "the gradient scaler was not registered, so it would unscale the gradients again in each accumulation step: "
    "`model, optimizer, scaler = job.prepare(model, optimizer, scaler)`"
)


class Accumulation:
    """The present accumulation step, which all wrappers share."""

    def __init__(self) -> None:
        self._index, self._count = 0, 1
        self._within = self._stepping = self._asked = self._backward = False
        self._optimizers: list[torch.optim.Optimizer] = []
        self._marks: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        """(gradient, its version number) after backward, by parameter: the first and the last trained one of each
        optimizer."""
        self._arrived: set[torch.Tensor] = set()
        """Parameters in `_marks` whose gradients backward has computed in this accumulation step."""

    @property
    def updates(self) -> bool:
        """True in the last accumulation step, which ends with the optimizer's step."""
        return self._index == self._count - 1

    @contextmanager
    def during(self, index: int, count: int) -> Iterator[None]:
        """Context of accumulation step `index` of `count`. Raises RuntimeError if the script changed gradients."""
        if index == 0:
            self.drop()
        self._index, self._count = index, count
        self._asked = self._backward = False
        self._arrived.clear()
        self._marks = {p: _mark(p.grad) for p in self._marks if index and p.grad is not None}
        self._within = True
        try:
            yield
            self.check()
        finally:
            self._within = False

    def drop(self) -> None:
        """Zero the gradients of a step that the script left before the optimizer's step."""
        if not self.updates or (self._count > 1 and not (self._asked or self._arrived)):
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        self._index, self._count = 0, 1

    def wrap(self, thing: Any) -> Any:
        """Return a wrapper of an optimizer or gradient scaler; any other object is returned as it is. Raises ValueError
        for an optimizer that needs a closure."""
        if isinstance(thing, torch.optim.Optimizer):
            self._watch(thing)
            return AccumulatedOptimizer(thing, self)
        return AccumulatedScaler(thing, self) if isinstance(thing, torch.amp.GradScaler) else thing

    def due(self, asks: bool = False) -> bool:
        """Return True in the last accumulation step, in which wrappers must act. `asks` is True if the optimizer's or
        scaler's `step` calls this."""
        self._asked = self._asked or asks
        if not self.updates:
            self.check()
        return self.updates

    def may_zero(self) -> bool:
        """Return True if gradients may be zeroed now: before the step's first backward pass, or after the optimizer's
        step."""
        begins = self._index == 0 and not (self._asked or self._backward)
        return self._count == 1 or begins or (self.updates and self._asked)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context in which a wrapper calls the script's own optimizer."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check(self) -> None:
        """Raise RuntimeError if gradients changed after backward, except in the last accumulation step."""
        if not self.updates and any(not _unchanged(p.grad, mark) for p, mark in self._marks.items()):
            raise self._changed()

    def _changed(self) -> RuntimeError:
        return RuntimeError(CHANGED.format(index=self._index + 1, count=self._count))

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "register: LBFGS evaluates the model several times a step through a closure. That cannot be averaged "
                "over ranks and accumulation steps here; use an optimizer that steps from .grad"
            )
        self._optimizers.append(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        for parameter in shown(optimizer):
            parameter.register_hook(lambda _, p=parameter: self._arriving(p))
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._within and not self._stepping:
            raise RuntimeError(UNWRAPPED)

    def _arriving(self, parameter: torch.Tensor) -> None:
        """Hook before backward adds to a gradient: check that the script has not changed it."""
        mark = self._marks.get(parameter)
        if mark is None or parameter in self._arrived or not self._within:
            return
        self._arrived.add(parameter)
        # If DDP keeps gradients in its buckets, another tensor with the same values may be there by now.
        if parameter.grad is None or (parameter.grad is mark[0] and not _unchanged(parameter.grad, mark)):
            raise self._changed()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if self._count > 1 and self._within and self._asked:
            raise RuntimeError(ALTERNATES)
        if self._count == 1 or gradient is None:  # MPI's exchange keeps the sum elsewhere
            return
        mark = self._marks.get(parameter)
        # FSDP2 adds to the shard inside the DTensor, whose own version stays, and calls no hook before that.
        if isinstance(gradient, DTensor) and mark is not None and parameter not in self._arrived:
            self._arrived.add(parameter)
            if not _unchanged(gradient, mark):
                raise self._changed()
        if not self.updates:
            self._backward = True
            self._marks[parameter] = _mark(gradient)


def _mark(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    return gradient, gradient._version


def _unchanged(gradient: torch.Tensor | None, mark: tuple[torch.Tensor, int]) -> bool:
    return gradient is mark[0] and gradient._version == mark[1]


class RefusesScaler:
    """Mixin of an optimizer that raises an error if a gradient scaler steps it."""

    _step_supports_amp_scaling = True
    """Flag that makes a `GradScaler` set `grad_scale`, by which the mixin notices the scaler."""
    scaler_refused: str

    @property
    def grad_scale(self) -> Any:
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: object) -> None:
        raise RuntimeError(self.scaler_refused)


class AccumulatedOptimizer(RefusesScaler, torch.optim.Optimizer):
    """Optimizer wrapper that steps only in the last accumulation step. State, parameter groups and hooks are those of
    the wrapped `optimizer`."""

    scaler_refused = UNREGISTERED_SCALER  # a registered scaler sets `grad_scale` of `optimizer`

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: Accumulation) -> None:
        # The base class's is not called: the wrapper has no state and no groups of its own.
        self.optimizer, self._accumulation = optimizer, accumulation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, in the last accumulation step only. Raises ValueError for a closure."""
        if any(callable(value) for value in (*args, kwargs.get("closure"))):
            raise ValueError(CLOSURE)
        if not self._accumulation.due(asks=True):
            return None
        with self._accumulation.stepping():
            return self.optimizer.step(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients if `Accumulation.may_zero`, else do nothing."""
        if self._accumulation.may_zero():
            self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class AccumulatedScaler:
    """Gradient scaler wrapper that acts only in the last accumulation step."""

    def __init__(self, scaler: torch.amp.GradScaler, accumulation: Accumulation) -> None:
        self.scaler, self._accumulation = scaler, accumulation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scaler":
            raise AttributeError(name)
        return getattr(self.scaler, name)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, so that they can be clipped under `if job.updates:`."""
        if self._accumulation.due():
            self.scaler.unscale_(_own(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer if its gradients are finite."""
        if not self._accumulation.due(asks=True):
            return None
        with self._accumulation.stepping():
            return self.scaler.step(_own(optimizer), *args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the scale."""
        if self._accumulation.due():
            self.scaler.update(*args, **kwargs)


def _own(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AccumulatedOptimizer) else optimizer

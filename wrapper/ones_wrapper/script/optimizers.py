"""Support for optimizers that wrap others, or whose state differs from torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

INNER = ("base_optimizer", "optimizer", "_optimizer")
"""Attributes in which an optimizer holds the optimizer that it wraps (SAM, Lookahead)."""


def stepper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose `step` changes the parameters: the innermost one, if optimizers wrap each other."""
    for name in INNER:
        held = getattr(optimizer, "__dict__", {}).get(name)
        if isinstance(held, torch.optim.Optimizer) and held is not optimizer:
            return stepper(held)
    return optimizer


def shown(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the first and the last trained parameter of an optimizer, for hooks that notice backward passes. One
    parameter is not enough, because a loss may not use it."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.is_leaf]
    return list({id(p): p for p in (*trained[:1], *trained[-1:])}.values())


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer's state must be saved as plain data, because torch.distributed.checkpoint cannot load
    it. Such an optimizer wraps another one, has a `state_dict` unlike torch's, or needs a closure or sparse
    gradients."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return True
    if stepper(optimizer) is not optimizer or not {"state", "param_groups"} <= set(optimizer.state_dict()):
        return True
    closure = _parameters(optimizer).get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def plain_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the states of an optimizer and of the optimizer that it wraps; only the outer state if that includes the
    inner one."""
    found, inner = [optimizer.state_dict()], stepper(optimizer)
    if inner is not optimizer and "state" in found[0] and inner.state is not optimizer.state:
        found.append(inner.state_dict())
    return found


def load_plain_state(optimizer: torch.optim.Optimizer, states: list[dict[str, Any]]) -> None:
    """Load states from `plain_state`."""
    for one, state in zip((optimizer, stepper(optimizer)), states, strict=False):
        one.load_state_dict(state)


@contextmanager
def stepping_without_closure(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which `step(closure=None)` works for any optimizer. torch.distributed.checkpoint calls it to create an
    empty state."""
    parameters = _parameters(optimizer)
    taken = "closure" in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if taken:
        yield
        return
    own, step = "step" in vars(optimizer), cast("Callable[[], Any]", optimizer.step)
    vars(optimizer)["step"] = lambda closure=None: step()
    try:
        yield
    finally:
        if own:
            vars(optimizer)["step"] = step
        else:
            del vars(optimizer)["step"]


def _parameters(optimizer: torch.optim.Optimizer) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(optimizer.step).parameters)
    except (TypeError, ValueError):
        return {"closure": inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)}

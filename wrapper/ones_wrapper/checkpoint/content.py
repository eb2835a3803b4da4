"""Model, optimizer and extras as tensors with names and plain data beside them; and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ones_wrapper.checkpoint.header import refusal
from ones_wrapper.checkpoint.plain import CannotSaveError, pack, unpack
from ones_wrapper.checkpoint.state import State

SHOWN = 5
"""Differences that an error names."""


@dataclass(frozen=True)
class Content:
    """One rank's view of all that is saved; the tensors are the live ones."""

    tensors: dict[str, torch.Tensor]
    """Those of model and optimizer, and sharded ones of extras, by path."""
    rest: dict[str, Any]
    """`model`, `optimizer` and `extras` as `plain.pack` makes them, the tensors above taken out."""
    first: frozenset[str]
    """Paths of the model's buffers: ranks may differ in these, and rank 0's count, as in DDP."""


def collect(state: State, *, template: bool = False) -> Content:
    """What there is to save now. Raises `CannotSaveError`.

    A `template`, for loading, has the optimizer's state also where no step was taken yet.
    """
    tensors: dict[str, torch.Tensor] = {}

    def every(path: str, tensor: torch.Tensor) -> bool:
        if path in tensors:
            raise CannotSaveError(f"{path} names two tensors; rename one of the modules or extras")
        if why := refusal(path, tensor.dtype):
            raise CannotSaveError(why)
        tensors[path] = tensor.detach()
        return True

    def sharded(path: str, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DTensor) and every(path, tensor)

    model = get_model_state_dict(state.model)
    with _as_it_is(state.optimizer, not template):
        optimizer = get_optimizer_state_dict(state.model, state.optimizer)
    rest = {
        "model": {key: pack(value, f"model.{key}", every) for key, value in model.items()},
        "optimizer": {
            "state": pack(optimizer["state"], "optimizer.state", every),
            "param_groups": pack(optimizer["param_groups"], "optimizer.param_groups", sharded),
        },
        "extras": {key: pack(extra.state_dict(), key, sharded) for key, extra in state.extras.items()},
    }
    places = {buffer.data_ptr() for buffer in state.model.buffers() if not isinstance(buffer, DTensor)} - {0}
    first = frozenset(
        f"model.{key}"
        for key, value in model.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.data_ptr() in places
    )
    return Content(tensors, rest, first)


@contextmanager
def _as_it_is(optimizer: torch.optim.Optimizer, wanted: bool) -> Iterator[None]:
    """Keep torch from taking a step with zero gradients to fill an empty optimizer, which would count as one.

    It takes none where any gradient exists.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    bare = wanted and not optimizer.state and bool(parameters) and all(p.grad is None for p in parameters)
    if bare:
        parameters[0].grad = torch.zeros_like(parameters[0])
    try:
        yield
    finally:
        if bare:
            parameters[0].grad = None


def differences(now: Content, rest: dict[str, Any], metadata: Metadata) -> list[str]:
    """Why a checkpoint does not fit, in words; empty where it fits."""
    found = []
    saved = metadata.state_dict_metadata
    bare = _without_state(now, rest)
    for path, tensor in now.tensors.items():
        there = saved.get(path)
        if there is None:
            if path not in bare:
                found.append(f"{path} {_shape(tensor.shape)} is missing in the checkpoint")
        elif isinstance(there, TensorStorageMetadata) and there.size != tensor.shape:
            found.append(f"{path} is {_shape(there.size)} in the checkpoint and {_shape(tensor.shape)} here")
    found += [f"{path} is in the checkpoint and not here" for path in saved if path not in now.tensors]
    for key in now.rest["extras"]:
        if key not in rest["extras"]:
            names = ", ".join(sorted(rest["extras"])) or "nothing"
            found.append(f"the checkpoint holds no {key!r} (beside model and optimizer it has {names})")
    groups, here = len(rest["optimizer"]["param_groups"]), len(now.rest["optimizer"]["param_groups"])
    if groups != here:
        found.append(f"the optimizer has {groups} parameter groups in the checkpoint and {here} here")
    return found[:SHOWN] + ([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])


def _shape(size: torch.Size) -> str:
    return str(tuple(size))


def _without_state(now: Content, rest: dict[str, Any]) -> set[str]:
    """Paths of optimizer state of parameters that had none yet when the checkpoint was taken."""
    had = rest["optimizer"]["state"]
    prefixes = tuple(f"optimizer.state.{name}." for name in now.rest["optimizer"]["state"] if name not in had)
    return {path for path in now.tensors if path.startswith(prefixes)} if prefixes else set()


def restore(state: State, rest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Give the objects of `state` what was read; `tensors` are those of a template, filled."""
    set_model_state_dict(state.model, unpack(rest["model"], tensors))
    optimizer = unpack(rest["optimizer"], tensors)
    # Parameters that never had a gradient have no state, which strictness would refuse.
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(state.model, state.optimizer, optimizer, options=options)
    if not optimizer["state"]:
        state.optimizer.state.clear()
    for key, extra in state.extras.items():
        extra.load_state_dict(unpack(rest["extras"][key], tensors))

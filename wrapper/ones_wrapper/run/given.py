"""Arguments of `Job.prepare`, sorted by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from ones_wrapper.data.streams import can_skip
from ones_wrapper.gradients.schedule import is_scheduler

T = TypeVar("T")

PARALLEL = (
    "prepare: the model is a {kind} already, which averages gradients over ranks and not over samples: give the model "
    "inside it"
)
NOT_TOGETHER = (
    "prepare: give {names} together with model and optimizer, since that call loads the checkpoint: `model, "
    "optimizer, scheduler = job.prepare(model, optimizer, scheduler)`"
)
UNKNOWN = (
    "prepare: a {kind} is no model, optimizer, scheduler, Dataset or DataLoader, nor has it state_dict and "
    "load_state_dict. Give several things one by one, and samples in a list to job.loader(...)"
)
DICT = (
    "prepare: the dict holds a {kind}: give objects one by one, and only plain values in a dict; to name several "
    "objects use job.ddp and job.register"
)


@dataclass
class Given:
    """Arguments by kind, in the given order."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    """Schedulers, averages, gradient scalers, other objects with a state, and dicts of plain values."""
    data: list[Any] = field(default_factory=list)

    @property
    def carried(self) -> list[Any]:
        """Arguments, except models, whose state is saved in checkpoints."""
        return [*self.optimizers, *self.others]


def sorted_by_kind(things: Iterable[Any]) -> Given:
    """Return the arguments by kind. Raises TypeError for an argument of no known kind."""
    given = Given()
    for thing in things:
        if isinstance(thing, torch.nn.Module) and not isinstance(thing, AveragedModel):
            given.models.append(thing)
        elif isinstance(thing, Optimizer):
            given.optimizers.append(thing)
        elif _is_data(thing):
            given.data.append(thing)
        elif isinstance(thing, dict):
            given.others.append(_plain(thing))
        elif is_scheduler(thing) or all(hasattr(thing, name) for name in ("state_dict", "load_state_dict")):
            given.others.append(thing)
        else:
            raise TypeError(UNKNOWN.format(kind=type(thing).__name__))
    return given


def _is_data(thing: Any) -> bool:
    if isinstance(thing, (dict, list, tuple, str)):
        return False
    by_items = hasattr(thing, "__len__") and hasattr(thing, "__getitem__")
    return isinstance(thing, (DataLoader, Dataset)) or by_items or can_skip(thing)


def _plain(values: dict[Any, Any]) -> dict[Any, Any]:
    for value in values.values():
        if hasattr(value, "state_dict"):
            raise TypeError(DICT.format(kind=type(value).__name__))
    return values


def named_by_type(things: Sequence[T]) -> dict[str, T]:
    """Return the objects by names made from their types, the same at each start."""
    found: dict[str, T] = {}
    for thing in things:
        found[unused_name(_name(thing), found)] = thing
    return found


def unused_name(name: str, used: Mapping[str, Any]) -> str:
    """Return the name, followed by a number if it is already used."""
    number = 1 + sum(one.rstrip("0123456789") == name for one in used)
    return f"{name}{number}" if number > 1 else name


def _name(thing: Any) -> str:
    kinds = {torch.amp.GradScaler: "scaler", AveragedModel: "average", dict: "values"}
    known = next((name for kind, name in kinds.items() if isinstance(thing, kind)), type(thing).__name__)
    return "scheduler" if is_scheduler(thing) else known

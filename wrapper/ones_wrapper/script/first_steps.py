"""A look at the first steps of a run: what works on these ranks, and would not survive the first resize.

Each thing is said once, by rank 0, with the script's line and what to write. Training goes on.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from ones_wrapper.process.log import log
from ones_wrapper.script.line import line

LOOK = 20
"""Steps of a run in which gradients are looked for that no optimizer used."""
FORGOTTEN_AT = 2
"""The step after which the script's objects are looked through: what it makes late in the first turn is there."""

UNUSED = (
    "the step{line} ended with gradients that no optimizer used: a script that accumulates by hand loses its place "
    "when the job is resized, which waits until the optimizer has stepped. Write ones.init(batch=what one step takes, "
    "max_local_batch=what one backward takes, max_accumulation_steps=N) and step in each turn of the loop"
)
PARTS = (
    "the step{line} trained on its batch in several parts: ranks with another share would make fewer backward passes, "
    "which is an error. Write ones.init(max_local_batch=what one part takes, max_accumulation_steps=N) in place of it"
)
SKIPPED = (
    "a turn of the loop{line} made no backward pass: on several GPUs the ranks wait for each other in it, so all or "
    "none must skip: `if job.any(bad): continue`"
)
AVERAGE = (
    "{name} is updated once a step, and a larger batch makes fewer: give it decay ** (job.batch / {batch}), or use "
    "torch.optim.swa_utils.AveragedModel, which follows progress once it is registered"
)
_FRAMEWORKS = ("torch", "lightning", "pytorch_lightning", "ones_wrapper", "transformers", "accelerate")
_AVERAGE = re.compile(r"ema(?![a-z])|averag|swa", re.IGNORECASE)
_SCHEDULE = re.compile(r"[Ss]ched|[Aa]nneal|[Ww]arm|[Cc]osine|LR")
FORGOTTEN = {
    LRScheduler: (
        "{name} drives a registered optimizer and is not registered, so it begins anew at each resize: give it to "
        "job.prepare, or to accelerator.prepare, together with model and optimizer"
    ),
    torch.amp.GradScaler: "{name} is not registered, so its scale is lost at each resize: give it to job.prepare",
    AveragedModel: "{name} is not registered, so the average begins again at each resize: give it to job.prepare",
}
"""By the type of what training should carry."""
FORGOTTEN_AVERAGE = (
    "{name} has a state and is not registered, so it begins again at each resize: give it to job.prepare, or to "
    "accelerator.register_for_checkpointing"
)


class FirstSteps:
    """The look at one run."""

    def __init__(
        self,
        speaks: bool,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        carried: Iterable[Any],
    ) -> None:
        """`carried` is all that is registered besides model and optimizers; `speaks` says that this is rank 0."""
        self._forward = model.register_forward_pre_hook(self._fed, with_kwargs=True) if speaks else None
        self._parts: list[int] = []
        """Samples of each forward pass of the step, while that is looked at."""
        self._speaks = speaks
        self._optimizers = optimizers
        self._carried = list(carried)
        self._averages = any(getattr(one, "carries_averages", False) for one in self._carried)
        self._scaled = any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in self._carried)
        held = [[p for group in one.param_groups for p in group["params"]] for one in optimizers]
        trained = [[p for p in its if p.requires_grad and p.is_leaf] for its in held]
        self._shown = list({id(p): p for its in trained for p in (*its[:1], *its[-1:])}.values())
        """Two parameters of each optimizer show each backward pass; either may be unused in a model."""
        for parameter in self._shown:
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        self.touched = False
        """A backward pass was made since `begin`."""
        self.skipped = False
        """The ranks agreed to leave the step out."""
        self._steps = 0
        self._said: set[str] = set()

    def begin(self) -> None:
        """A step begins, or the loop over an epoch."""
        self.touched = self.skipped = False
        self._parts.clear()

    def _fed(self, model: torch.nn.Module, args: Any, options: Any) -> None:
        given = (one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor) and one.ndim)
        self._parts += [len(one) for one in islice(given, 1)]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self.touched = True

    def end(self, stepped: bool, samples: int) -> None:
        """The step was made, with or without one of an optimizer; this rank had `samples` in its last pass."""
        self._steps += 1
        if len(self._parts) > 1 and sum(self._parts) == samples:
            self.say(PARTS)
        if self._steps == FORGOTTEN_AT and self._forward is not None:
            self._forward.remove()
        if not stepped and not self.touched:
            self.say(SKIPPED)
        elif not stepped and self._steps <= LOOK and not self._scaled and self._left():
            self.say(UNUSED)
        if self._steps == FORGOTTEN_AT and self._speaks:
            for text in self._forgotten():
                log(text)

    def say(self, text: str) -> None:
        """Say it once, with the script's line."""
        if self._speaks and text not in self._said:
            self._said.add(text)
            log(text.format(line=line()))

    def _left(self) -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in self._shown)

    def _forgotten(self) -> list[str]:
        """Sentences on objects of the script that training should carry and nobody registered."""
        own = {id(one) for one in self._optimizers}
        shapes = [tuple(p.shape) for one in self._optimizers for group in one.param_groups for p in group["params"]]
        carried = {id(part) for thing in self._carried for part in _parts(thing)}
        found: list[str] = []
        kinds: dict[int, bool] = {}
        for thing in gc.get_objects():
            kind = next((kind for kind in FORGOTTEN if issubclass(type(thing), kind)), None)
            if kind is None and (own_kind := kinds.get(id(type(thing)))) is None:
                own_kind = kinds[id(type(thing))] = _stateful(type(thing))
            if kind is None and own_kind and id(thing) not in carried:
                name = type(thing).__name__
                if not self._averages and _own_average(thing, shapes):
                    found.append(FORGOTTEN_AVERAGE.format(name=name))
                elif _SCHEDULE.search(name) and {id(one) for one in _layers(getattr(thing, "optimizer", None))} & own:
                    found.append(FORGOTTEN[LRScheduler].format(name=name))
            if kind is None or id(thing) in carried or (kind is AveragedModel and self._averages):
                continue
            if kind is LRScheduler and not {id(one) for one in _layers(getattr(thing, "optimizer", None))} & own:
                continue
            if kind is torch.amp.GradScaler and not thing.is_enabled():
                continue
            found.append(FORGOTTEN[kind].format(name=type(thing).__name__))
        return list(dict.fromkeys(found))


def averages(others: Iterable[Any], batch: int) -> list[str]:
    """Sentences on registered averages whose decay does not follow the batch."""
    names = {type(one).__name__ for one in others if not isinstance(one, AveragedModel)}
    return [AVERAGE.format(name=name, batch=batch) for name in sorted(names) if _AVERAGE.search(name)]


def _stateful(kind: type) -> bool:
    """Whether it is a script's own class of things with a state."""
    if not all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    own = str(kind.__module__).split(".")[0] not in _FRAMEWORKS
    return own and not issubclass(kind, torch.optim.Optimizer)


def _own_average(thing: Any, shapes: list[tuple[int, ...]]) -> bool:
    """Whether it is an average of weights: by its class's name, or since it holds tensors of the shapes of all that are
    trained.
    """
    held = list(
        chain.from_iterable(
            one if isinstance(one, list) else one.values() if isinstance(one, dict) else (one,)
            for one in (getattr(thing, "__dict__", None) or {}).values()
        )
    )
    if _AVERAGE.search(type(thing).__name__):
        return any(isinstance(one, (torch.Tensor, torch.nn.Module)) for one in held)
    if not shapes or isinstance(thing, torch.nn.Module):
        return False
    return Counter(shapes) <= Counter(tuple(one.shape) for one in held if isinstance(one, torch.Tensor))


def _parts(thing: Any) -> list[Any]:
    """A thing, and what it is made of: schedulers in schedulers, and what our wrappers and a framework's hold."""
    found: list[Any] = []
    left = [thing]
    while left and len(found) < 100:
        one = left.pop()
        found.append(one)
        for name in ("scheduler", "_scheduler", "scaler"):
            if name in (getattr(one, "__dict__", None) or {}):
                left.append(vars(one)[name])
        for name in ("_schedulers", "_objects"):
            left += [part for part in (getattr(one, "__dict__", None) or {}).get(name) or () if part is not None]
    return found


def _layers(optimizer: Any) -> list[Any]:
    """An optimizer, and those that it wraps."""
    found: list[Any] = []
    while optimizer is not None and len(found) < 10:
        found.append(optimizer)
        held = getattr(optimizer, "__dict__", {})
        optimizer = held.get("optimizer") or held.get("base_optimizer")
    return found

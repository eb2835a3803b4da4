"""Checks in a run's first steps, which find state that the first resize would lose.

Rank 0 logs each finding once, with the script's line and a remedy. Training goes on.
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
from ones_wrapper.script.optimizers import INNER, shown

LOOK = 20
"""Number of a run's first steps that are checked for gradients which no optimizer used."""
FORGOTTEN_AT = 2
"""Step after which the script's objects are searched; objects made late in the loop's first turn exist by then."""

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
_PARTS = ("scheduler", "_scheduler", "scaler", "_schedulers", "_objects")
"""Attributes in which wrappers (ours, frameworks') and schedulers hold registered objects."""
_SCHEDULE = re.compile(r"[Ss]ched|[Aa]nneal|[Ww]arm|[Cc]osine|LR")
FORGOTTEN = (
    "{name} {what} and is not registered, so it begins again at each resize: give it to job.prepare, together with "
    "model and optimizer, or to accelerator.{call}"
)


class FirstSteps:
    """The checks of one run."""

    def __init__(
        self,
        speaks: bool,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        carried: Iterable[Any],
    ) -> None:
        """`carried` are all registered objects besides model and optimizers; `speaks` is true on rank 0."""
        self._forward = model.register_forward_pre_hook(self._fed, with_kwargs=True) if speaks else None
        self._parts: list[int] = []
        """Samples of each forward pass of the present step, counted only in a run's first steps."""
        self._speaks = speaks
        self._optimizers = optimizers
        self._carried = list(carried)
        self._averages = any(getattr(one, "carries_averages", False) for one in self._carried)
        self._scaled = any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in self._carried)
        self._shown = list(dict.fromkeys(p for one in optimizers for p in shown(one)))
        for parameter in self._shown:
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        self.touched = False
        """True if a backward pass was made since `begin`."""
        self.skipped = False
        """True if the ranks agreed to leave the step out."""
        self._steps = 0
        self._said: set[str] = set()

    def begin(self) -> None:
        """Begin a step, or the loop over an epoch."""
        self.touched = self.skipped = False
        self._parts.clear()

    def _fed(self, model: torch.nn.Module, args: Any, options: Any) -> None:
        given = (one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor) and one.ndim)
        self._parts += [len(one) for one in islice(given, 1)]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self.touched = True

    def end(self, stepped: bool, samples: int) -> None:
        """End a step; `stepped` if an optimizer stepped in it. This rank had `samples` samples in its last pass."""
        self._steps += 1
        if len(self._parts) > 1 and sum(self._parts) == samples:
            self.say(PARTS)
        if not stepped and not self.touched:
            self.say(SKIPPED)
        elif not stepped and self._steps <= LOOK and not self._scaled and self._left():
            self.say(UNUSED)
        if self._steps == FORGOTTEN_AT and self._forward is not None:
            self._forward.remove()
            for text in self._forgotten():
                log(text)

    def say(self, text: str) -> None:
        """Log a sentence once, with the script's line."""
        if self._speaks and text not in self._said:
            self._said.add(text)
            log(text.format(line=line()))

    def _left(self) -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in self._shown)

    def _forgotten(self) -> list[str]:
        """Return sentences on the script's objects that have a state and are not registered."""
        carried = {id(part) for thing in self._carried for part in _reached(thing, _PARTS)}
        stateful: dict[int, bool] = {}
        found = []
        for thing in gc.get_objects():
            kind = type(thing)
            if id(kind) not in stateful:
                stateful[id(kind)] = _stateful(kind)
            if stateful[id(kind)] and id(thing) not in carried and (what := self._lost(thing)):
                found.append(FORGOTTEN.format(name=kind.__name__, what=what[0], call=what[1]))
        return list(dict.fromkeys(found))

    def _lost(self, thing: Any) -> tuple[str, str] | None:
        """Return why a resize would lose an object's state, and the method of Accelerate that carries it; None if
        nothing is lost."""
        schedules = isinstance(thing, LRScheduler) or _SCHEDULE.search(type(thing).__name__)
        if schedules and {id(one) for one in self._optimizers} & {id(one) for one in _reached(thing, INNER)}:
            return "drives a registered optimizer", "prepare"
        if isinstance(thing, torch.amp.GradScaler):
            lost = thing.is_enabled()
        else:
            lost = not self._averages and (isinstance(thing, AveragedModel) or self._is_average(thing))
        return ("has a state", "register_for_checkpointing") if lost else None

    def _is_average(self, thing: Any) -> bool:
        """Return True if an object is an average of weights: by its class's name, or by tensors in the shapes of all
        trained parameters."""
        values = (vars(thing) if hasattr(thing, "__dict__") else {}).values()
        lists = (one if isinstance(one, list) else one.values() if isinstance(one, dict) else (one,) for one in values)
        held = list(chain.from_iterable(lists))
        if _AVERAGE.search(type(thing).__name__):
            return any(isinstance(one, (torch.Tensor, torch.nn.Module)) for one in held)
        shapes = Counter(p.shape for one in self._optimizers for group in one.param_groups for p in group["params"])
        its = Counter(one.shape for one in held if isinstance(one, torch.Tensor))
        return bool(shapes) and not isinstance(thing, torch.nn.Module) and shapes <= its


def averages(others: Iterable[Any], batch: int) -> list[str]:
    """Return sentences on registered averages whose decay does not follow the batch."""
    names = {type(one).__name__ for one in others if not isinstance(one, AveragedModel)}
    return [AVERAGE.format(name=name, batch=batch) for name in sorted(names) if _AVERAGE.search(name)]


def _stateful(kind: type) -> bool:
    """Return True if objects of this type have a state to carry: torch's types, or the script's own classes."""
    if issubclass(kind, (LRScheduler, AveragedModel, torch.amp.GradScaler)):
        return True
    methods = all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))
    script = str(kind.__module__).split(".")[0] not in _FRAMEWORKS
    return methods and script and not issubclass(kind, torch.optim.Optimizer)


def _reached(thing: Any, names: Iterable[str]) -> list[Any]:
    """Return an object and all objects reached from it by attributes of these names, also in lists."""
    found: list[Any] = []
    left = [thing]
    while left and len(found) < 100:
        found.append(left.pop())
        held = getattr(found[-1], "__dict__", None) or {}
        for one in (held.get(name) for name in names):
            left += one if isinstance(one, (list, tuple)) else [one]
        left = [one for one in left if one is not None]
    return found

"""Checks in the first steps of a run, which find state that the first resize would lose.

Rank 0 logs each finding once, with a line of the script and a remedy. Training continues.
"""

from __future__ import annotations

import gc
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as registers
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from ones_wrapper.process.log import log
from ones_wrapper.script import source
from ones_wrapper.script.counts import attributes, codes, collected, counts, flat
from ones_wrapper.script.line import frames, is_script, line, place, variables
from ones_wrapper.script.optimizers import INNER, shown, stepper

LOOK = 20
"""Number of first steps in which the script is checked for gradients that no optimizer used."""
FORGOTTEN_AT = 2
"""Step after which the script's objects are searched. By then the loop has made its objects, too."""

UNUSED = (
    "the step{line} ended with gradients that no optimizer used. If the script accumulates gradients by itself, a "
    "resize waits until the optimizer has stepped, and the script's own count then begins again. Write "
    "ones.init(batch=what one step takes, max_local_batch=what one backward takes, max_accumulation_steps=N) and "
    "step in each turn of the loop"
)
PARTS = (
    "the step{line} trained on its batch in several parts: ranks with different shares would make different numbers "
    "of backward passes, which is an error. Instead write ones.init(max_local_batch=what one part takes, "
    "max_accumulation_steps=N)"
)
SKIPPED = (
    "a turn of the loop{line} made no backward pass. On several GPUs ranks wait for each other in the backward pass, "
    "so all or none must skip: `if job.any(bad): continue`"
)
AVERAGE = (
    "{name} is updated once a step, and a larger batch makes fewer steps: give it decay ** (job.batch / {batch}), or "
    "use torch.optim.swa_utils.AveragedModel, which follows progress once it is registered"
)
_PACKAGES = {"torch", "lightning", "pytorch_lightning", "ones_wrapper", "transformers", "accelerate"}
_KNOWN = _PACKAGES | sys.stdlib_module_names
"""Packages whose objects have no state to save, except for some of torch's (`_stateful`)."""
_AVERAGE = re.compile(r"E[Mm][Aa](?![a-z])|(?<![a-z])ema(?![a-z])|[Aa]verag|SWA|[Ss]wa(?![a-z])")
_BUFFER = re.compile(r"(?:[Rr]eplay|[Bb]uffer|[Mm]emory|[Bb]ank|[Qq]ueue)(?!.*Data)")
_PARTS = ("scheduler", "_scheduler", "scaler", "_schedulers", "_objects")
"""Attributes in which schedulers and wrappers, ours or a framework's, hold registered objects."""
_SCHEDULE = re.compile(r"[Ss]ched|[Aa]nneal|[Ww]arm|[Cc]osine|LR|[Nn]oam")
FORGOTTEN = (
    "{name} {what} and is not registered, so it begins again at each resize: give it to job.prepare, together with "
    "model and optimizer, or to accelerator.{call}"
)
DRIVES = ("drives a registered optimizer", "prepare")
METHODS = (
    ". It needs state_dict and load_state_dict (a callback of the Trainer: ExportableState); a dict of tensors is "
    "saved as it is"
)
COPY = (
    "a second {name} is not registered: if training changes it (an average, a target network), it begins again at each "
    "resize. Give it to job.prepare, together with model and optimizer, or to accelerator.register_for_checkpointing"
)
COUNTS = (
    "{names}: what the script counts, collects or draws by variables of its own begins again at each resize, "
    "and in a new block. Keep it in a dict that job.prepare carries (`kept = {{'best': 0.0, 'replay': []}}`), alike on "
    "all ranks; count steps by job.base_steps, and draw by the global random generators"
)
DIVIDED = (
    "`{text}`{line}: the sum begins again at each resize, and in a new block, so count what was summed (`total += "
    "loss.item() * len(x); seen += len(x)`) and take job.mean(total, seen) on all ranks"
)
EMPTIED = (
    "{name} is open for writing from its beginning, so each start empties it: job.open({name!r}) continues the file "
    "after a resize, with the lines up to the checkpoint"
)
RATE = (
    "the script sets the learning rate at each step{line}, and no schedule is registered: use job.base_steps as the "
    "iteration, since the script's own counts, and its position in an epoch, begin again at each resize"
)
TOGETHER = (
    "{name}{line} is called under a condition on the rank. All ranks must call it together: at another number of "
    "GPUs, ranks that call it would wait for the others. Put only printing and files there; to use the model on one "
    "rank, take job.unwrap(model)"
)
GROWN = (
    "{name} of the model was made or changed after job.prepare or job.register, so no checkpoint would fit the next "
    "start. Make it before: by a forward pass if a layer makes it; or use register_buffer(..., persistent=False)"
)
OVER = (
    "{name}.load_state_dict was called after job.prepare or job.register{line}: once the job has a checkpoint of its "
    "own, that checkpoint is loaded instead. Load weights before job.prepare, and leave out the script's own resume"
)
HOOKED = (
    "a hook on a parameter's gradient sees one rank's part of the batch{line}. A nonlinear change (clamp, norm) then "
    "depends on the number of GPUs: change gradients after backward, under `if job.updates:`"
)
CUT = (
    "data is cut by rank and world size{line}: samples that a rank leaves out are used by no rank after a resize. "
    "Give job.prepare, job.loader and job.evaluate the whole dataset or stream on all ranks; they cut it, at any "
    "number of GPUs"
)
DRAWN = (
    "data is drawn{line} after a seed by the rank: ranks would have different samples under the same numbers, and a "
    "resize to several GPUs would end with an error. Draw data with one seed on all ranks, and seed by the rank only "
    "after that, if at all: the job seeds each rank's steps differently"
)
COUNTER = (
    "`{test}`{line} counts from 0 again after a resize, and in a new block, while other ranks are further on. So it "
    "is true at other steps, or on some ranks only: use job.progress.step, which is the same on all ranks, and for "
    "shorter epochs a smaller dataset"
)
_FEW = 100
"""Largest number of objects of one class that are searched; a script may hold millions of samples."""


class FirstSteps:
    """The checks of one run."""

    def __init__(
        self, speaks: bool, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], carried: Iterable[Any]
    ) -> None:
        """`carried` are all registered objects except model and optimizers. `speaks` is True on rank 0."""
        self._forward = model.register_forward_pre_hook(self._fed, with_kwargs=True) if speaks else None
        shared = speaks and isinstance(model, DistributedDataParallel) and model.broadcast_buffers
        buffers = shared and any(True for _ in model.buffers())
        self._evaluation = model.register_forward_pre_hook(self._evaluates) if buffers else None
        self._parts: list[int] = []
        """Samples in each forward pass of the present step, during a run's first steps."""
        self._speaks, self._optimizers = speaks, optimizers
        self._carried = list(carried)
        self._saves = any(getattr(one, "carries_counts", False) for one in self._carried)
        self._scaled = any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in self._carried)
        self._shown = list(dict.fromkeys(p for one in optimizers for p in shown(one)))
        for parameter in self._shown:
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        self.touched = False
        self.skipped = False
        self._steps = 0
        self._said: set[str] = set()
        self._model = model
        self._shapes, self._inner = _shapes(model), {*map(id, model.modules())}
        self._grown = False
        """True if a module of the model got a new parameter, buffer or submodule since the last check."""
        for kind in ("module", "parameter", "buffer") if optimizers else ():
            getattr(registers, f"register_module_{kind}_registration_hook")(self._registers)
        self.counts_by_job = False
        self._collected: dict[str, Any] = {}
        """Lengths and states from `collected` after the first step."""
        self._rates: list[list[float]] = []
        self._scheduled = False
        """True once a finding has named a scheduler that is not registered."""
        self.loads: list[str] = []
        """Messages about states that the script itself loaded after registration."""
        self._watches = self._watch_loads()

    def _watch_loads(self) -> list[Any]:
        loads, modules = self.loads, list(self._model.modules())
        optimizers = [stepper(one) for one in self._optimizers]
        watched = {id(one) for one in (*modules, *optimizers)}

        def loaded(thing: Any, *_: Any) -> None:  # a function, which copies of the model keep
            text = OVER.format(name=type(thing).__name__, line=line())
            if id(thing) in watched and text not in loads:
                loads.append(text)

        # Optimizers of scripts may lack what torch's base class sets up.
        whole = [one for one in optimizers if hasattr(one, "_optimizer_load_state_dict_post_hooks")]
        hooked: list[Any] = [*modules, *whole]
        return [one.register_load_state_dict_post_hook(loaded) for one in hooked]

    def close_setup(self) -> None:
        """Remove the hooks that find loaded states, because training begins."""
        for handle in self._watches:
            handle.remove()

    def begin(self) -> None:
        """Reset the checks for a new step."""
        self.touched = self.skipped = False
        self._parts.clear()

    def _fed(self, model: torch.nn.Module, args: Any, options: Any) -> None:
        given = (one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor) and one.ndim)
        self._parts += [len(one) for one in islice(given, 1)]

    def together(self, name: str) -> None:
        """Log a finding if the script calls `name` only on some ranks, although all must call it."""
        if self._speaks and source.by_rank():
            self.say(TOGETHER.replace("{name}", name))

    def _evaluates(self, model: torch.nn.Module, args: Any) -> None:
        if not model.training and self._evaluation is not None:
            self._evaluation.remove()
            self.together("a forward pass of a model with buffers")

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self.touched = True

    def _registers(self, module: torch.nn.Module, name: str, thing: Any) -> None:
        if id(module) in self._inner:  # and not in a loss function that is made in each step
            known = name in module._parameters or name in module._buffers
            self._grown = self._grown or not (known or module._modules.get(name) is thing)

    def end(self, stepped: bool, samples: int) -> None:
        """Check at the end of a step. `stepped` is True if an optimizer stepped in it; `samples` is the size of this
        rank's last pass. Raises RuntimeError if names or shapes in the model's state have changed."""
        self._steps += 1
        if self._grown:
            self._grown, self._inner = False, {*map(id, self._model.modules())}
            if other := {*self._shapes.items()} ^ {*_shapes(self._model).items()}:
                raise RuntimeError(GROWN.format(name=min(other)[0]))
        if len(self._parts) > 1 and sum(self._parts) == samples:
            self.say(PARTS)
        if not stepped and not self.touched:
            self.say(SKIPPED)
        elif not stepped and self._steps <= LOOK and not self._scaled and self._left():
            self.say(UNUSED)
        if not self._speaks or self._steps > LOOK:
            return
        self._rates.append([group["lr"] for one in self._optimizers for group in one.param_groups])
        with suppress(Exception):  # other packages' objects may fail when read
            if self._steps == 1:
                self._collected = collected(frames(sys._getframe(1)), ())
            if self._steps == FORGOTTEN_AT and self._forward is not None:
                self._forward.remove()
                for text in self._forgotten():
                    log(text)
        known = (hasattr(one, "scheduler") or _SCHEDULE.search(type(one).__name__) for one in self._carried)
        scheduled = self._saves or self.counts_by_job or self._scheduled or any(known)
        if len(self._rates) > 2 and not scheduled and self._rates[-3] != self._rates[-2] != self._rates[-1]:
            self.say(RATE.replace("{line}", _rate_line()))

    def say(self, text: str) -> None:
        """Log a message once, with the script's line that runs now."""
        if self._speaks and text not in self._said:
            self._said.add(text)
            log(text.format(line=line()))

    def _left(self) -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in self._shown)

    def _forgotten(self) -> list[str]:
        """Return messages about state that the script has not registered."""
        parts = [part for thing in self._carried for part in _reached(thing, _PARTS)]
        held = [one for part in parts for one in attributes(part).values()]
        modules = [
            one for it in (self._model, *parts, *held) if isinstance(it, torch.nn.Module) for one in it.modules()
        ]
        plain = [one for one in held if isinstance(one, dict)]
        carried = {id(one) for one in (*parts, *held, *modules, *(it for one in plain for it in one.values()))}
        copied = {type(one): [p.shape for p in one.parameters()] for one in _inside(self._model)}
        seen: Counter[int] = Counter()
        found = []
        for thing in gc.get_objects():
            kind = type(thing)
            seen[id(kind)] += 1
            if kind is io.TextIOWrapper and _empties(thing):
                found.append(EMPTIED.format(name=thing.name))
            if seen[id(kind)] > _FEW or id(thing) in carried or not (kind in copied or _stateful(kind)):
                continue
            if what := self._lost(thing):
                self._scheduled = self._scheduled or what == DRIVES
                needs = "" if callable(getattr(kind, "load_state_dict", None)) else METHODS
                found.append(FORGOTTEN.format(name=kind.__name__, what=what[0], call=what[1]) + needs)
            elif kind in copied and not self._saves and [p.shape for p in thing.parameters()] == copied[kind]:
                found.append(COPY.format(name=kind.__name__))
        stack = list(frames(sys._getframe(1)))
        for name, value in (pair for frame in stack for pair in variables(frame).items()):
            if type(value) in (list, tuple, dict) and id(value) not in carried and self._has_shapes(flat([value])):
                found.append(FORGOTTEN.format(name=name, what="may have a state", call="register_for_checkpointing"))
        known = [name for one in plain for name in one]
        now, before = collected(stack, carried), self._collected
        names = [
            *counts(stack, self._model.modules(), carried, known),
            *(it + line() for it in now if now[it] != before.get(it, now[it])),
        ][:5]
        if names and not self._saves:
            found.append(COUNTS.format(names=", ".join(names)))
        for parameter in self._trained:
            for key, hook in (parameter._backward_hooks or {}).items():
                if is_script(code := getattr(hook, "__code__", None)):  # rather than a strategy's
                    parameter._backward_hooks[key] = partial(self._hooked, hook, code)
        for path in source.files(stack):
            for look, text in ((source.cut, CUT), (source.drawn, DRAWN)):
                found += [text.format(line=place(path, number))] if (number := look(path)) else []
        for frame in stack:
            if counted := source.counter(path := frame.f_code.co_filename, frame.f_lineno):
                found.append(COUNTER.format(test=counted[0], line=place(path, counted[1])))
            saved = [one for one, it in variables(frame).items() if id(it) in carried and type(it) not in (int, float)]
            if divided := source.divided(path, frame.f_lineno, saved):
                found.append(DIVIDED.format(text=divided[0], line=place(path, divided[1])))
        return list(dict.fromkeys(found))

    def _hooked(self, hook: Callable[[Any], Any], code: CodeType, gradient: Any) -> Any:
        """Call a hook of the script on a gradient, and log a finding if it changes the gradient."""
        before, found = gradient._version, hook(gradient)
        if gradient._version != before or (found is not None and found is not gradient):
            self.say(HOOKED.replace("{line}", place(code.co_filename, code.co_firstlineno)))
        return found

    @property
    def _trained(self) -> list[Any]:
        return [p for one in self._optimizers for group in one.param_groups for p in group["params"]]

    def _lost(self, thing: Any) -> tuple[str, str] | None:
        """Return (reason, Accelerate's method to register it) if a resize would lose this object's state; else None."""
        schedules = isinstance(thing, LRScheduler) or _SCHEDULE.search(type(thing).__name__)
        if schedules and {id(one) for one in self._optimizers} & {id(one) for one in _reached(thing, INNER)}:
            return DRIVES
        if isinstance(thing, torch.amp.GradScaler):
            lost = thing.is_enabled()
        else:
            lost = isinstance(thing, AveragedModel) or self._is_average(thing)
        return ("has a state", "register_for_checkpointing") if lost else None

    def _is_average(self, thing: Any) -> bool:
        held, kind = flat(attributes(thing).values()), type(thing)
        if _AVERAGE.search(kind.__name__) or (_BUFFER.search(kind.__name__) and codes(kind)):
            return any(isinstance(one, (torch.Tensor, torch.nn.Module, np.ndarray)) for one in held)
        return not isinstance(thing, torch.nn.Module) and self._has_shapes(held)

    def _has_shapes(self, held: list[Any]) -> bool:
        """Return True if `held` has a tensor in the shape of each trained parameter, not counting parameters and
        gradients."""
        trained = self._trained
        tensors = [one for one in held if isinstance(one, torch.Tensor)]
        if not trained or len(tensors) < len(trained):
            return False
        own = {id(one) for p in trained for one in (p, p.grad)}
        its = Counter(one.shape for one in tensors if id(one) not in own)
        return Counter(p.shape for p in trained) <= its


def _rate_line() -> str:
    with suppress(Exception):  # other packages' objects may fail when read
        found = ((path, source.rate(path)) for path in source.files(frames()))
        return next((place(path, number) for path, number in found if number), "")
    return ""


def _empties(file: io.TextIOWrapper) -> bool:
    with suppress(ValueError):
        return getattr(file, "mode", "")[:1] == "w" and not file.closed and Path(str(file.name)).is_file()
    return False


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


def _inside(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the script's own models inside wrappers. Leaves out models without submodules."""
    for one in model.children() if isinstance(model, torch.nn.ModuleDict) else [model]:
        # A model that its ranks train apart is its own `module`.
        while isinstance(inner := getattr(one, "module", getattr(one, "_orig_mod", one)), torch.nn.Module):
            if inner is one:
                break
            one = inner
        if any(True for _ in one.children()):
            yield one


def averages(others: Iterable[Any], batch: int) -> list[str]:
    """Return messages about registered averages of weights whose decay does not depend on the batch. `batch` is the
    base batch, which the messages name."""
    names = {type(one).__name__ for one in others if not isinstance(one, AveragedModel)}
    return [AVERAGE.format(name=name, batch=batch) for name in sorted(names) if _AVERAGE.search(name)]


def _stateful(kind: type) -> bool:
    """Return True if objects of this type may have a state to save: some types of torch, and types of the script or of
    packages not in `_KNOWN`."""
    if issubclass(kind, (LRScheduler, AveragedModel, torch.amp.GradScaler)):
        return True
    return str(kind.__module__).split(".")[0] not in _KNOWN and not issubclass(kind, torch.optim.Optimizer)


def _reached(thing: Any, names: Iterable[str]) -> list[Any]:
    """Return an object, and all objects that are reached from it by attributes of these names or lists in them."""
    found: list[Any] = []
    left = [thing]
    while left and len(found) < 100:
        found.append(left.pop())
        for one in (attributes(found[-1]).get(name) for name in names):
            left += one if isinstance(one, (list, tuple)) else [one]
        left = [one for one in left if one is not None]
    return found

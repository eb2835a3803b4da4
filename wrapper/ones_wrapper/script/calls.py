"""Checks of the script's calls in training: collectives, a second DataLoader, and files that all ranks write.

A collective that gathers a batch fails if ranks have different numbers of samples. gloo aborts one rank and returns old
memory on another; NCCL hangs, or reads beyond the tensor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ones_wrapper.script.first_steps import FirstSteps
from ones_wrapper.script.line import frames, is_ours, is_script, line
from ones_wrapper.script.source import by_rank, names_rank

NAMES = ("all_gather", "all_gather_into_tensor", "all_gather_single", "gather", "all_to_all_single", "all_to_all")
"""Collectives of torch.distributed in which all ranks must give the same number of rows."""
_LIBRARIES = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "ones_wrapper.")

MAY = (
    "{name}{line} gathers the samples of a batch. Ranks may have different numbers of them at another number of "
    "GPUs, or in an epoch's last step: write ones.init(shares='equal')"
)
EVALUATED = (
    "{name}{line} gathers results of job.evaluate, and ranks may have different numbers of them: pad them, use "
    "all_gather_object, or combine sums by job.mean"
)
CANNOT = (
    "{name}{line} gathers the samples of a batch, and ranks have different numbers of them in this step ({samples} "
    "here): write ones.init(shares='equal')"
)
SECOND = (
    "a second DataLoader{line} feeds the training: each rank reads all of it, so more GPUs use its samples more "
    "often, and it begins again after a resize. Make one Dataset whose item holds a sample of each, `first[i], "
    "second[random.randrange(len(second))]`: what an item draws stays the same at any number of GPUs"
)
EVERYWHERE = (
    "{name}{line} is called on all ranks, which write one file at the same time: put it under `if job.rank == 0:`, "
    "or put job.rank into the file's name"
)


Look = Callable[[str, tuple[Any, ...], FrameType], None]
"""Function that checks one call of the script. It gets the call's name, the arguments and the caller's frame."""
_WRITERS = ((torch, "save"), (np, "save"), (np, "savez"), (np, "savetxt"))


class BatchShares(NamedTuple):
    """This rank's number of samples in the present pass. `alike` is True if all ranks have the same number."""

    samples: int
    alike: bool


_first = FirstSteps(False, torch.nn.Module(), [], [])
_shares: Callable[[], BatchShares | None] = type(None)
_evaluated = -1


def watch(first: FirstSteps, shares: Callable[[], BatchShares | None], gathers: bool) -> None:
    """Check the script's calls from now on. `shares` returns the number of samples in the present pass; None outside of
    training. With `gathers`, also check collectives that gather."""
    global _first, _shares
    _first, _shares = first, shares
    looked_at: list[tuple[Any, str, Look]] = [(dist, name, _gathers) for name in NAMES if gathers]
    looked_at.append((_BaseDataLoaderIter, "__next__", _fetches))
    looked_at += [(owner, name, _writes) for owner, name in _WRITERS]
    _replace([(owner, name, call) for owner, name, look in looked_at if (call := _watched(owner, name, look))])


def evaluates(samples: int) -> None:
    """Store the number of samples that this rank evaluates."""
    global _evaluated
    _evaluated = samples


def _watched(owner: Any, name: str, look: Look) -> Any:
    """Return a function that calls `look` and then `owner.name`; None for a missing or already watched function."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "looked_at"):
        return None

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        look(name, (*args, *options.values()), sys._getframe(1))
        return original(*args, **options)

    call.looked_at = original  # type: ignore[attr-defined]
    return call


def _replace(calls: list[tuple[Any, str, Any]]) -> None:
    """Replace functions by their watched versions, in their own module and in all modules that imported them."""
    by_name: dict[str, list[Any]] = {}
    for owner, name, call in calls:
        setattr(owner, name, call)
        by_name.setdefault(name, []).append(call)
    for module in [*sys.modules.values()]:
        held = getattr(module, "__dict__", {})
        for name in by_name.keys() & held.keys():  # of thousands of modules few have one
            for call in by_name[name]:
                if held[name] is call.looked_at:
                    setattr(module, name, call)


def _gathers(name: str, given: tuple[Any, ...], caller: FrameType) -> None:
    shares = None if caller.f_globals.get("__name__", "").startswith(_LIBRARIES) else _shares()
    tensors = [one for one in given if isinstance(one, torch.Tensor) and one.ndim]
    if shares is None:
        if is_script(caller.f_code) and any(len(one) == _evaluated for one in tensors):
            _first.say(EVALUATED.replace("{name}", name))
    # Tensors of one dimension may be figures, by chance as many as samples.
    elif any(one.ndim > 1 and len(one) == shares.samples for one in tensors):
        if not shares.alike:
            raise RuntimeError(CANNOT.format(name=name, line=line(), samples=shares.samples))
        _first.say(MAY.replace("{name}", name))


def _fetches(name: str, given: tuple[Any, ...], caller: FrameType) -> None:
    if _shares() is not None and torch.is_grad_enabled():
        known = (one.f_code for one, _ in walk_stack(caller) if is_ours(one.f_code) or is_script(one.f_code))
        if is_script(next(known, None)):
            _first.say(SECOND)


def _writes(name: str, given: tuple[Any, ...], caller: FrameType) -> None:
    if not is_script(caller.f_code):
        return
    file = given[: 1 + (name == "save")]
    named = any(isinstance(one, (str, os.PathLike)) and one != os.devnull for one in file)
    caches = any(is_ours(one.f_code, "/data/") for one, _ in walk_stack(caller))  # what its samples are made from
    apart = by_rank(caller) or any(names_rank(one.f_code.co_filename, one.f_lineno) for one in frames(caller))
    if named and not caches and not apart:
        _first.say(EVERYWHERE.replace("{name}", name))

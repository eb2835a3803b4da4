"""Counts, best values and collections that a script keeps in plain variables, which no checkpoint holds."""

from __future__ import annotations

import dis
import random
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from ones_wrapper.script.line import is_script, variables
from ones_wrapper.script.source import renewed

_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_FAST_LOAD_FAST")
_BEST = re.compile(r"(?<![a-z])best(?![a-z])", re.IGNORECASE)
_NUMBERS = (int, float, type(None))


def counts(
    frames: Iterable[FrameType], models: Iterable[Any], carried: Collection[int], known: Iterable[str]
) -> list[str]:
    """Return the names of numbers that the script's code counts up by a constant or names best: in frames, and in
    objects that frames or models hold. Objects whose ids are `carried`, and `known` names, are left out."""
    things, found = list(models), []
    for frame in frames:
        values = variables(frame)
        things += [one for one in values.values() if id(one) not in carried]
        found += [name for name in _kept(frame.f_code) if type(values.get(name)) in _NUMBERS and name in values]
    for thing in things:
        kind, own = type(thing), getattr(thing, "__dict__", {})
        codes = [code for one in vars(kind).values() if is_script(code := getattr(one, "__code__", None))]
        names = (name for code in codes for name in _kept(code) if type(own.get(name)) in _NUMBERS and name in own)
        found += [f"{kind.__name__}.{name}" for name in names]
    return [one for one in dict.fromkeys(found) if one not in known]


def collected(frames: Iterable[FrameType], carried: Collection[int]) -> dict[str, Any]:
    """Return lengths of the script's lists, queues and dicts, and states of its random generators, by name. Left out
    are ids in `carried`, what a loop makes again and again, and lists or queues of numbers in a script's object."""
    found = {}
    for frame in frames:
        for name, value in variables(frame).items():
            if type(value) in _HELD and not name.startswith("__") and not renewed(frame, name):
                found[name] = value
            elif is_script(getattr(getattr(type(value), "__init__", None), "__code__", None)):
                cache = dict if isinstance(value, Dataset) else None
                held = getattr(value, "__dict__", {}).items()
                lasting = ((at, it) for at, it in held if type(it) in _HELD and type(it) is not cache and _arrays(it))
                found |= {f"{type(value).__name__}.{at}": it for at, it in lasting}
    return {name: str(_HELD[type(it)](it)) for name, it in found.items() if id(it) not in carried}


_HELD: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((list, dict, deque), len),
    torch.Generator: lambda one: one.get_state().tolist(),
    np.random.Generator: lambda one: one.bit_generator.state,
    random.Random: lambda one: one.getstate(),
}
"""Functions that tell whether a thing of this type has changed."""


def _arrays(held: Any) -> bool:
    """Return False for a list or queue of single numbers."""
    last = [held[-1]] if type(held) in (list, deque) and held else []
    return not last or any(getattr(one, "ndim", 0) for one in tree_leaves(last))


def _kept(code: CodeType) -> Iterator[str]:
    """Yield the names that the code counts up (`+= 1`), or stores a best value in."""
    value, counted = None, False
    for one in dis.get_instructions(code):
        if one.opname in _STORES:
            name = one.argval[0] if isinstance(one.argval, tuple) else one.argval
            if counted or _BEST.search(name):
                yield name
            counted = False
        elif one.opname == "INPLACE_ADD" or one.argrepr == "+=":
            counted = type(value) is int
        elif not one.opname.startswith(("SWAP", "ROT_")):
            value, counted = one.argval if one.opname in ("LOAD_CONST", "LOAD_SMALL_INT") else None, False

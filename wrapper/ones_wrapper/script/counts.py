"""Counts, best values and collections that a script keeps in plain variables, which no checkpoint holds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from ones_wrapper.script.line import is_script, variables
from ones_wrapper.script.source import kept, renewed

_FEW = 100
"""Longest list whose items are searched, such as a trainer's callbacks."""
_PLAIN = ("__main__", "types", "argparse")
"""Modules of classes that may have no methods of the script: its own, SimpleNamespace, Namespace."""


def counts(
    frames: Iterable[FrameType], models: Iterable[Any], carried: Collection[int], known: Iterable[str]
) -> list[str]:
    """Return the names of numbers that the script's code counts up by a constant or names best: in frames, in objects
    that frames or models hold, and in their attributes. Objects whose ids are `carried`, and `known` names, are left
    out."""
    found, things, shared = [], [*models], set[str]()
    for frame in frames:
        values, names = variables(frame), dict.fromkeys(kept(frame.f_code))
        shared |= names.keys()
        things += [one for one in _with_items(values.values()) if id(one) not in carried]
        found += [name for name in names if name in values and _is_number(values[name])]
    own = [one for one in things if _codes(type(one)) or type(one).__module__ in _PLAIN]
    inner = (it for one in own for it in _with_items(_attributes(one).values()) if _codes(type(it)))
    for one in [*own, *(it for it in inner if id(it) not in carried)]:
        its = shared.union(*map(kept, _codes(type(one))))
        found += [
            f"{type(one).__name__}.{at}" for at, it in _attributes(one).items() if f".{at}" in its and _is_number(it)
        ]
    return [one for one in dict.fromkeys(found) if one not in known]


def _with_items(values: Iterable[Any]) -> Iterator[Any]:
    for one in values:
        yield from (one, *one) if type(one) in (list, tuple) and len(one) <= _FEW else (one,)


def _attributes(thing: Any) -> dict[str, Any]:
    return getattr(thing, "__dict__", {})


def _codes(kind: type) -> list[CodeType]:
    """Return the code of a class's methods, as far as the script has it."""
    return [code for one in vars(kind).values() if is_script(code := getattr(one, "__code__", None))]


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float) or getattr(value, "shape", None) == ()


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
                lasting = {at: it for at, it in _attributes(value).items() if type(it) in _HELD and _arrays(it)}
                found |= {f"{type(value).__name__}.{at}": it for at, it in lasting.items() if type(it) is not cache}
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

"""Search for counts, best values and collections that a script keeps in plain variables, which no checkpoint holds."""

from __future__ import annotations

import random
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from ones_wrapper.script.line import is_script, place, variables
from ones_wrapper.script.source import kept, renewed

_FEW, _LONG = 100, 10_000
"""Largest number of items of a list or dict that is searched for counts (`_FEW`) or tensors (`_LONG`)."""
_PLAIN = ("__main__", "types", "argparse")
"""Modules of classes, such as SimpleNamespace, whose objects are searched even if the script defines no method of
them."""


def counts(
    frames: Iterable[FrameType], models: Iterable[Any], carried: Collection[int], known: Iterable[str]
) -> list[str]:
    """Return names and lines of numbers that the script counts up by a constant, or whose names suggest a best value.

    Searches the variables of `frames`, and attributes of their objects and of the `models`, two levels deep. Leaves out
    objects whose ids are in `carried`, and names in `known`.
    """
    found, things, shared = dict[str, str](), [*models], dict[str, str]()
    for frame in frames:
        values, names = variables(frame), _places(frame.f_code)
        shared |= names
        things += [one for one in flat(values.values(), _FEW) if id(one) not in carried]
        found |= {name: names[name] for name in names if name in values and _is_number(values[name])}
    own = [one for one in things if codes(type(one)) or type(one).__module__ in _PLAIN]
    inner = (it for one in own for it in flat(attributes(one).values(), _FEW) if codes(type(it)))
    for one in [*own, *(it for it in inner if id(it) not in carried)]:
        its = dict(ChainMap(shared, *map(_places, codes(type(one)))))
        numbers = [at for at, it in attributes(one).items() if f".{at}" in its and _is_number(it)]
        found |= {f"{type(one).__name__}.{at}": its[f".{at}"] for at in numbers}
    return [name + where for name, where in found.items() if name not in known]


def _places(code: CodeType) -> dict[str, str]:
    return {name: place(code.co_filename, number) for name, number in kept(code).items()}


def flat(values: Iterable[Any], most: int = _LONG) -> list[Any]:
    """Return the values, with each list or dict of at most `most` items replaced by its items."""
    found: list[Any] = []
    for one in values:
        inner = isinstance(one, (list, tuple, dict)) and len(one) <= most
        found += (one.values() if isinstance(one, dict) else one) if inner else [one]
    return found


def attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes in an object's `__dict__`; empty if it has no `__dict__`."""
    return getattr(thing, "__dict__", None) or {}


def codes(kind: type) -> list[CodeType]:
    """Return the code objects of those methods of a class that the script defines."""
    return [code for one in vars(kind).values() if is_script(code := getattr(one, "__code__", None))]


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float) or getattr(value, "shape", None) == ()


def collected(frames: Iterable[FrameType], carried: Collection[int]) -> dict[str, Any]:
    """Return the lengths of the script's lists, queues and dicts, and the states of its random generators, as texts by
    name.

    Leaves out objects whose ids are in `carried`, and variables that get a new value in each turn of a loop. Leaves out
    attributes that are lists or queues of numbers.
    """
    found = {}
    for frame in frames:
        for name, value in variables(frame).items():
            if type(value) in _HELD and not name.startswith("__") and not renewed(frame, name):
                found[name] = value
            elif is_script(getattr(getattr(type(value), "__init__", None), "__code__", None)):
                cache = dict if isinstance(value, Dataset) else None
                lasting = {at: it for at, it in attributes(value).items() if type(it) in _HELD and _arrays(it)}
                found |= {f"{type(value).__name__}.{at}": it for at, it in lasting.items() if type(it) is not cache}
    return {name: str(_HELD[type(it)](it)) for name, it in found.items() if id(it) not in carried}


_HELD: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((list, dict, deque), len),
    torch.Generator: lambda one: one.get_state().tolist(),
    np.random.Generator: lambda one: one.bit_generator.state,
    random.Random: lambda one: one.getstate(),
}
"""Function, by type of object, whose result changes when the object changes."""


def _arrays(held: Any) -> bool:
    """Return True unless this is a list or queue of single numbers."""
    last = [held[-1]] if type(held) in (list, deque) and held else []
    return not last or any(getattr(one, "ndim", 0) for one in tree_leaves(last))

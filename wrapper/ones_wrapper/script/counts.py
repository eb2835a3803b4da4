"""Counts and best values that a script keeps in plain variables, which no checkpoint holds."""

from __future__ import annotations

import dis
import re
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from ones_wrapper.script.line import is_script, variables

_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_FAST_LOAD_FAST")
_BEST = re.compile(r"(?<![a-z])best(?![a-z])", re.IGNORECASE)
_NUMBERS = (int, float, type(None))


def counts(frames: Iterable[FrameType], models: Iterable[Any], carried: Collection[int], known: Iterable[str]) -> str:
    """Return the names of numbers that the script's code counts up by a constant or names best, up to five: in frames,
    and in objects that they or the models hold. Left out are objects whose ids are `carried`, and `known` names."""
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
    return ", ".join([one for one in dict.fromkeys(found) if one not in known][:5])


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

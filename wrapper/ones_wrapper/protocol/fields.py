"""Checks of values that another program wrote: of the field's type, finite, not negative, and of limited length.

Needs only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from reprlib import repr as short  # `repr` of nested lists may need more stack than their parser
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

MAX_TEXT = 1_000
"""Largest number of characters of a text field."""
MAX_BLOCKS = 512
"""Largest number of blocks of a job."""
MAX_INT = 2**53
"""Largest absolute value of a number: the largest integer that all JSON readers represent exactly."""
TINY = 1e-99
"""Smallest absolute value of a number other than 0; smaller ones are read as 0. PostgreSQL refuses products that are
too small for a float."""
MAX_ROWS = 256
"""Largest number of items of a list, unless the items are integers (`MAX_BLOCKS`)."""

T = TypeVar("T")


class ProtocolError(ValueError):
    """Error of a line or file that breaks the protocol; the message names the field."""


class FieldKind(NamedTuple):
    """Type of a field's values."""

    type: Any
    optional: bool
    """True if the field may be None."""


@cache
def types_of(cls: Any) -> dict[str, FieldKind]:
    """Return the type of each field of a dataclass, by the field's name."""
    hints = get_type_hints(cls)
    return {field.name: _kind(hints[field.name]) for field in fields(cls)}


def _kind(hint: Any) -> FieldKind:
    choices = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is not tuple and type(None) in get_args(hint):
        return FieldKind(choices[0], True)
    return FieldKind(hint, False)


def object_of(text: bytes | str) -> dict[str, Any]:
    """Return the JSON object in a text. Raises `ProtocolError`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProtocolError("not a JSON object")
    return data


def build(cls: type[T], types: Mapping[str, FieldKind], data: Mapping[str, Any]) -> T:
    """Return an instance of `cls` from parsed JSON. Checks all values, and ignores unknown names. Raises
    `ProtocolError`."""
    values: dict[str, Any] = {
        name: None if optional and data[name] is None else value_of(name, kind, data[name])
        for name, (kind, optional) in types.items()
        if name in data
    }
    try:
        return cls(**values)
    except TypeError:
        missing = sorted(f.name for f in fields(cls) if f.name not in values)  # type: ignore[arg-type]
        raise ProtocolError(f"{cls.__name__.lower()}: missing {', '.join(missing)}") from None


def value_of(name: str, kind: Any, value: Any) -> Any:
    """Return `value` if it is of the field's type, finite, not negative and of limited length. In a text, unprintable
    characters become question marks. Raises `ProtocolError`."""
    if kind is float or kind is int:  # most of all values by far
        return value if type(value) is kind and TINY <= value <= MAX_INT else _number(name, kind, value)
    if kind is str:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise ProtocolError(f"{name}: not a text of at most {MAX_TEXT} characters")
        return value if value.isprintable() else "".join(c if c.isprintable() else "?" for c in value)
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise ProtocolError(f"{name}: {short(value):.40} is not true or false")
    if get_origin(kind) is tuple:
        return _items(name, get_args(kind)[0], value)
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{name}: not a JSON object")
    return build(kind, types_of(kind), value)


def _number(name: str, kind: type[int] | type[float], value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProtocolError(f"{name}: {short(value):.40} is not a number")
    if kind is int and not isinstance(value, int):
        raise ProtocolError(f"{name}: {value!r:.40} is not an integer")
    if not abs(value) <= MAX_INT:
        raise ProtocolError(f"{name}: {value!r:.40} is not finite or too large")
    if value < 0 and name not in ("loss", "exit_code"):
        raise ProtocolError(f"{name}: {value!r:.40} is negative")
    return kind(value) if abs(value) >= TINY else kind(0)


def _items(name: str, kind: Any, values: Any) -> tuple[Any, ...]:
    most, what = (MAX_BLOCKS, "numbers") if kind is int else (MAX_ROWS, "items")
    if not isinstance(values, (list, tuple)) or len(values) > most:
        raise ProtocolError(f"{name}: not a list of at most {most} {what}")
    if not is_dataclass(kind):
        return tuple(value_of(name, kind, value) for value in values)
    assert isinstance(kind, type)
    types = types_of(kind)  # once for all rows
    if not all(isinstance(value, Mapping) for value in values):
        raise ProtocolError(f"{name}: not a list of JSON objects")
    return tuple(build(kind, types, value) for value in values)

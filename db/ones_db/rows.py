"""Conversion between records and rows of tables, by the fields of the record.

A field is stored in the column with its name, with three exceptions. A shape is two columns (``old_shape``:
``old_nodes`` and ``old_gpus_per_node``). A reason is three (``outcome`` with the sentence, ``outcome_code`` and
``outcome_arguments``). A tuple is a text with commas; a tuple of records has no column, but rows of another table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from types import UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ones_db.reasons import NO_REASON, Reason
from ones_db.shape import Shape
from ones_db.tables import storable

T = TypeVar("T")
Row = Mapping[Any, Any]

COLUMNS = {"user": "user_name", "order": "order_number"}
"""Column of each field whose name is reserved in SQL."""


class _Kind(NamedTuple):
    write: Callable[[str, Any], Mapping[str, Any]]
    read: Callable[[str, Row], Any] | None
    """Function that reads the field from a row. None for a field without a column (a tuple of records)."""


def row_of(record: Any) -> dict[str, Any]:
    """Return the columns of a record by name. If a field is None, its columns are NULL."""
    kind: Any = type(record)
    plain, kinds = _fields(kind)
    values = {column: getattr(record, name) for name, column in plain}
    for name, kind in kinds:
        values |= kind.write(name, getattr(record, name))
    return values


def record_of(kind: Callable[..., T], row: Row, **given: Any) -> T:
    """Return the record of a row. Fields in `given` are not read from the row."""
    plain, kinds = _fields(kind)
    values = {name: row[column] for name, column in plain if name not in given}
    for name, one in kinds:
        if name not in given and one.read is not None:
            values[name] = one.read(name, row)
    return kind(**values, **given)


KEPT = 4096
"""Largest number of rows whose records are cached: enough for one read of a large site."""


@lru_cache(maxsize=KEPT)
def same_record(kind: Callable[..., T], names: tuple[str, ...], values: tuple[Any, ...]) -> T:
    """Return the record of a row with these columns and values. Equal rows give the same object."""
    return record_of(kind, dict(zip(names, values, strict=True)))


@cache
def _fields(kind: Any) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, _Kind], ...]]:
    """Return (field, column) for each field that is one column, and (field, conversion) for all other fields."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}
    kinds = {name: found for name, hint in hints.items() if (found := _kind(hint)) is not None}
    return tuple((name, COLUMNS.get(name, name)) for name in hints if name not in kinds), tuple(kinds.items())


def _kind(hint: Any) -> _Kind | None:
    if get_origin(hint) is UnionType:
        hint = next(part for part in get_args(hint) if part is not type(None))
    if hint is Shape:
        return _Kind(_shape_columns, _shape)
    if hint is Reason:
        return _Kind(reason_columns, reason_of)
    if get_origin(hint) is not tuple:
        return None
    item = get_args(hint)[0]
    if item is int:
        return _Kind(_list_column, lambda name, row: numbers(row[name]))
    if item is str:
        return _Kind(_list_column, lambda name, row: tuple(row[name].split(",")) if row[name] else ())
    if item == tuple[int, Shape]:
        return _Kind(_blocks_column, lambda name, row: blocks_of(row[name]))
    return _Kind(lambda name, records: {}, None)


def shape_names(name: str) -> tuple[str, str]:
    """Return the two columns of a field that is a shape."""
    before = name.removesuffix("shape")
    return f"{before}nodes", f"{before}gpus_per_node"


def _shape_columns(name: str, shape: Shape | None) -> dict[str, int | None]:
    values = (None, None) if shape is None else (shape.nodes, shape.gpus_per_node)
    return dict(zip(shape_names(name), values, strict=True))


def _shape(name: str, row: Row) -> Shape | None:
    nodes, gpus_per_node = shape_names(name)
    return None if row[nodes] is None else Shape(row[nodes], row[gpus_per_node])


def reason_columns(name: str, reason: Reason) -> dict[str, str]:
    """Return the columns of a reason. Arguments that no database stores (infinite numbers, surrogates) become text."""
    arguments = {
        storable(key): storable(value)
        if isinstance(value, str)
        else str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in reason.arguments
    }
    as_json = json.dumps(arguments, ensure_ascii=False)
    return {name: str(reason), f"{name}_code": reason.code, f"{name}_arguments": as_json}


def reason_of(name: str, row: Row) -> Reason:
    """Return the reason in the three columns of a field."""
    code, arguments = row[f"{name}_code"], row[f"{name}_arguments"]
    if not code:
        return NO_REASON
    # Of thousands of rows most have none.
    return Reason(code) if arguments == "{}" else Reason(code, tuple(json.loads(arguments).items()))


def _list_column(name: str, items: tuple[Any, ...]) -> dict[str, str]:
    return {name: ",".join(map(str, items))}


def numbers(listed: str) -> tuple[int, ...]:
    """Return the whole numbers in a text such as 0,2,5."""
    return tuple(map(int, listed.split(","))) if listed else ()


def _blocks_column(name: str, blocks: tuple[tuple[int, Shape], ...]) -> dict[str, str]:
    return {name: ",".join(f"{task}:{shape}" for task, shape in blocks)}


def blocks_of(listed: str) -> tuple[tuple[int, Shape], ...]:
    """Return (task, shape) of each block in a text such as 0:1x4,2:1x4."""
    return tuple((int(task), Shape.parse(shape)) for task, shape in re.findall(r"(\d+):(\d+x\d+)", listed))


def flat(record: Any) -> dict[str, Any]:
    """Return a record's fields for JSON. A shape or reason becomes its columns, except that a reason's arguments are an
    object."""
    kind: Any = type(record)
    plain, kinds = _fields(kind)
    found = {name: getattr(record, name) for name, _ in plain}
    for name, one in kinds:
        value = getattr(record, name)
        if one.write is reason_columns:
            found |= {name: str(value), f"{name}_code": value.code, f"{name}_arguments": dict(value.arguments)}
        elif one.write is _shape_columns:
            found |= _shape_columns(name, value)
        else:
            found[name] = [flat(item) if one.read is None else item for item in value]
    return found

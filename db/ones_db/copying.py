"""COPY: rows of numbers in PostgreSQL's binary form, others in its text."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Connection, Double, Table
from sqlalchemy.exc import DBAPIError

_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TAIL = struct.pack(">h", -1)


def stream_of(table: Table, rows: Sequence[Sequence[Any]]) -> bytes | None:
    """The rows as COPY's binary form has them; None where not every column is a number of 64 bits.

    Raises `OverflowError` for a number beyond that. A field is its length and its value, or -1 for none.
    """
    kinds = _kinds(table)
    if kinds is None:
        return None
    full = _layout(kinds, (True,) * len(kinds))
    blank: list[Any] = [len(kinds), *(8 for _ in range(2 * len(kinds)))]
    parts = [_HEAD]
    try:
        for row in rows:
            if None in row:
                known = tuple(value is not None for value in row)
                fields = [part for value in row for part in ((-1,) if value is None else (8, value))]
                parts.append(_layout(kinds, known).pack(len(kinds), *fields))
            else:
                blank[2::2] = row
                parts.append(full.pack(*blank))
    except struct.error as error:
        raise OverflowError(str(error)) from None
    parts.append(_TAIL)
    return b"".join(parts)


@cache
def _kinds(table: Table) -> str | None:
    kinds = [
        "q" if isinstance(c.type, BigInteger) else "d" if isinstance(c.type, Double) else "" for c in table.columns
    ]
    return "".join(kinds) if all(kinds) else None


@cache
def _layout(kinds: str, known: tuple[bool, ...]) -> struct.Struct:
    return struct.Struct(">h" + "".join(f"i{kind}" if there else "i" for kind, there in zip(kinds, known, strict=True)))


def copied(
    connection: Connection, table: str, names: Sequence[str], stream: bytes | None, rows: Sequence[Sequence[Any]]
) -> None:
    """COPY the stream, or else the rows, into a table; the driver's errors come as SQLAlchemy's."""
    driver: Any = connection.connection.driver_connection
    columns = ", ".join(f'"{name}"' for name in names)
    form = "" if stream is None else " (FORMAT BINARY)"
    try:
        with driver.cursor() as cursor, cursor.copy(f"COPY {table} ({columns}) FROM STDIN{form}") as copy:
            if stream is not None:
                copy.write(stream)
            else:
                for row in rows:
                    copy.write_row(row)
    except connection.dialect.loaded_dbapi.Error as error:
        lost = bool(driver.closed)
        if lost:
            connection.invalidate(error)
        raise DBAPIError(f"COPY {table}", None, error, connection_invalidated=lost) from error

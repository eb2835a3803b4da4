"""Moving a site: all rows of one database into another, of the same kind or not, and the proof that they are there.

Both are walked in pages by their keys. A page that is the same on both sides is left alone, so that a copy that was
killed goes on where it was, and one that is made again, once the companion has stopped, brings what is new.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Table, UniqueConstraint, delete, func, select, text, tuple_
from sqlalchemy.types import TypeDecorator

from ones_db import migrate
from ones_db.backend import Mode
from ones_db.engine import (
    UNFINISHED,
    add_or_replace,
    add_rows,
    backend_behind,
    backend_of,
    check_revision,
    revision_of,
    transaction,
)
from ones_db.errors import SchemaError, StoreError
from ones_db.tables import METADATA, SCHEMA_REVISION

PAGE = 20_000
"""Rows compared, and copied in one transaction."""

Progress = Callable[[str, str, int, int], None]
"""Called with what is done (compared, copied or verified), of which table, how many rows and of how many."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Moved:
    """What became of one table."""

    table: str
    rows: int
    """Rows in both databases."""
    copied: int
    """Rows that this call stored; the others were there."""
    checksum: str
    """SHA-256 of all rows in the order of their keys, the same on both sides."""


@dataclass(frozen=True)
class _Page:
    """The rows of a table whose key lies above `after` and not above `last`; None is without a bound."""

    table: Table
    after: Row | None
    last: Row | None

    def where(self, query: Any) -> Any:
        key = tuple_(*self.table.primary_key)
        if self.after is not None:
            query = query.where(key > self.after)
        return query if self.last is None else query.where(key <= self.last)

    def keys(self, connection: Connection, limit: int) -> list[Row]:
        """Those of the first rows, in their order."""
        key = self.table.primary_key
        return [tuple(row) for row in connection.execute(self.where(select(*key)).order_by(*key).limit(limit))]

    def rows(self, connection: Connection, limit: int | None = None) -> list[Row]:
        """In the order of their keys, with text as this version stores it."""
        query = self.where(select(self.table)).order_by(*self.table.primary_key).limit(limit)
        rows = [tuple(row) for row in connection.execute(query)]
        clean = _words(self.table, connection)
        if clean:
            rows = [tuple(_as(clean[i], row[i]) if i in clean else row[i] for i in range(len(row))) for row in rows]
        return rows


def copy(
    source: str, target: str, progress: Progress = lambda what, table, done, total: None, page: int = PAGE
) -> list[Moved]:
    """Bring every row of the source into the target, and verify each table's count and checksum there.

    The source is read as of one moment, and may be written meanwhile. The target is created where it is absent. It
    may hold what a copy of this source brought before, also one that was killed; nothing else: raises `StoreError`,
    with nothing changed, where it has a row that the source has not. No store opens a target whose copy was not
    finished. Raises `SchemaError` where either has another schema than this version's.
    """
    if backend_of(source).place == backend_of(target).place:
        raise StoreError(f"{backend_of(source).place}: source and target are the same database")
    with _opened(source, "read") as old, transaction(old) as reading:
        check_revision(reading)
        if not backend_of(target).exists() or _revision(target) is None:
            migrate.upgrade(target)
        with _opened(target, "write") as new:
            with transaction(new) as looking:
                check_revision(looking, unfinished=True)
                different = [list(_compared(table, reading, looking, progress, page)) for table in _tables()]
            if any(different):
                with transaction(new, write=True) as writing:
                    _mark(writing, SCHEMA_REVISION + UNFINISHED)
            stored = {
                table.name: _fill(table, pages, reading, new, progress)
                for table, pages in zip(_tables(), different, strict=True)
            }
            with transaction(new, write=True) as writing:
                moved = [_verified(table, stored[table.name], reading, writing, progress, page) for table in _tables()]
                for table in _tables():
                    backend_behind(writing).renumber(writing, table)
                _mark(writing, SCHEMA_REVISION)
    return moved


@contextmanager
def _opened(url: str, mode: Mode) -> Iterator[Engine]:
    backend = backend_of(url)
    if mode == "read" and not backend.exists():
        raise SchemaError(f"{backend.place}: no such database")
    engine = backend.engine(mode)
    try:
        yield engine
    finally:
        engine.dispose()


def _revision(url: str) -> str | None:
    with _opened(url, "read") as engine, transaction(engine) as connection:
        return revision_of(connection, unfinished=True)


def _tables() -> Sequence[Table]:
    """Parents before their children."""
    return METADATA.sorted_tables


def _mark(connection: Connection, revision: str) -> None:
    connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def _words(table: Table, connection: Connection) -> dict[int, Any]:
    """For each column of text, by its place, what a store would make of a value."""
    columns = [(i, column.type) for i, column in enumerate(table.columns)]
    return {i: kind.bind_processor(connection.dialect) for i, kind in columns if isinstance(kind, TypeDecorator)}


def _as(processed: Any, value: Any) -> Any:
    return value if processed is None else processed(value)


def _pages(table: Table, connection: Connection, size: int, *, keys: bool = False) -> Iterator[tuple[_Page, list[Row]]]:
    """The whole table, the last page without an end; with its rows, or their keys alone."""
    places = [list(table.columns).index(column) for column in table.primary_key]
    if keys:
        places = list(range(len(places)))
    after: Row | None = None
    while True:
        page = _Page(table, after, None)
        rows = page.keys(connection, size) if keys else page.rows(connection, size)
        last = tuple(rows[-1][i] for i in places) if len(rows) == size else None
        yield _Page(table, after, last), rows
        if last is None:
            return
        after = last


def _identity(table: Table) -> list[int]:
    """The places of the columns by which a row stays the same one, whatever was written into it: those of its keys."""
    uniques = [constraint for constraint in table.constraints if isinstance(constraint, UniqueConstraint)]
    indexes = [index for index in table.indexes if index.unique]
    keys: list[Any] = [table.primary_key, *uniques, *indexes]
    names = {column.name for key in keys for column in key.columns}
    return [i for i, column in enumerate(table.columns) if column.name in names]


def _count(table: Table, connection: Connection) -> int:
    return int(connection.scalar(select(func.count()).select_from(table)) or 0)


def _compared(
    table: Table, source: Connection, target: Connection, progress: Progress, size: int
) -> Iterator[tuple[_Page, bool]]:
    """The pages that differ, each with whether the target has rows in it. Raises `StoreError` for a row that the
    source has not."""
    total, done = _count(table, source), 0
    empty = _count(table, target) == 0
    for page, rows in _pages(table, source, size, keys=empty):
        there = [] if empty else page.rows(target)
        done += len(rows)
        if there != rows:
            if there:
                _refuse_others(table, rows, there, source, target)
            yield page, bool(there)
        progress("compared", table.name, done, total)


def _refuse_others(
    table: Table, rows: Sequence[Row], there: Sequence[Row], source: Connection, target: Connection
) -> None:
    """Raise `StoreError` where the target has a row in this page that is none of the source's."""
    places = _identity(table)
    known = {tuple(row[i] for i in places) for row in rows}
    other = next((row for row in there if tuple(row[i] for i in places) not in known), None)
    if other is not None:
        key = ", ".join(f"{table.columns[i].name} {other[i]!r}" for i in places)
        raise StoreError(
            f"{backend_behind(target).place}: holds other data, such as this row of {table.name}, which "
            f"{backend_behind(source).place} has not: {key}; name an empty database"
        )


def _fill(
    table: Table, pages: Sequence[tuple[_Page, bool]], source: Connection, target: Engine, progress: Progress
) -> int:
    """Make the pages the same, a transaction each; returns how many rows were stored."""
    parent = any(key.column.table is table for other in _tables() for key in other.foreign_keys)
    names = [column.name for column in table.columns]
    keys = [column.name for column in table.primary_key]
    stored = 0
    for number, (page, occupied) in enumerate(pages, 1):
        rows = page.rows(source)
        with transaction(target, write=True) as connection:
            if occupied and parent:
                # Others point to these rows.
                add_or_replace(connection, table, keys, [dict(zip(names, row, strict=True)) for row in rows])
            else:
                if occupied:
                    connection.execute(page.where(delete(table)))
                add_rows(connection, table, rows)
        stored += len(rows)
        progress("copied", table.name, stored, stored * len(pages) // number)
    return stored


def _verified(
    table: Table, stored: int, source: Connection, target: Connection, progress: Progress, size: int
) -> Moved:
    total, sums, counts = _count(table, source), (hashlib.sha256(), hashlib.sha256()), [0, 0]
    for page, rows in _pages(table, source, size):
        there = page.rows(target)
        # SQLite keeps no sign of a zero, so equal rows need not be the same bytes.
        for side, found in enumerate((rows, rows if there == rows else there)):
            # This form has no references, so that equal rows give equal bytes.
            sums[side].update(marshal.dumps(found, 2))
            counts[side] += len(found)
        progress("verified", table.name, counts[0], total)
    if counts[0] != counts[1] or sums[0].digest() != sums[1].digest():
        raise StoreError(
            f"{table.name}: {counts[0]} rows in {backend_behind(source).place}, {counts[1]} in "
            f"{backend_behind(target).place}, checksums {sums[0].hexdigest()[:12]} and {sums[1].hexdigest()[:12]}; "
            "run it again"
        )
    return Moved(table.name, counts[0], stored, sums[0].hexdigest())

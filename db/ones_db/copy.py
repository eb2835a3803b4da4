"""Copy of all rows from one database to another, such as from SQLite to PostgreSQL, with a check of the result.

Rows are compared in pages, in the order of their keys, and only pages that differ are copied. So a copy that was killed
can be continued. A site moves by one copy while the companion runs, and a second, short one after it has stopped.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, Table, UniqueConstraint, delete, func, select, text, tuple_
from sqlalchemy.types import TypeDecorator

from ones_db import migrate
from ones_db.backend import StoreError
from ones_db.engine import (
    UNFINISHED,
    add_or_replace,
    add_rows,
    backend_behind,
    backend_of,
    check_revision,
    opened,
    transaction,
)
from ones_db.tables import METADATA, SCHEMA_REVISION

PAGE = 20_000
"""Number of rows in a page. A page is compared as a whole, and copied in one transaction."""

Progress = Callable[[str, str, int, int], None]
"""Callback for progress: (action, table, rows done, rows in all). The action is "compared", "copied" or "verified"."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Moved:
    """Result of copying one table."""

    table: str
    rows: int
    """Number of rows in the table, which source and target have in common after the copy."""
    copied: int
    """Number of rows that this call stored in the target. The other rows were there already."""
    checksum: str
    """SHA-256 of all rows in the order of their keys."""


@dataclass(frozen=True)
class _Page:
    """Rows of a table with keys above `after`, up to and including `last`. None means no limit."""

    table: Table
    after: Row | None
    last: Row | None

    def where(self, query: Any) -> Any:
        key = tuple_(*self.table.primary_key)
        if self.after is not None:
            query = query.where(key > self.after)
        return query if self.last is None else query.where(key <= self.last)

    def rows(self, connection: Connection, limit: int | None = None) -> list[Row]:
        """Return at most `limit` rows of the page, by their keys, with text as `SafeText` would store it."""
        query = self.where(select(self.table)).order_by(*self.table.primary_key).limit(limit)
        words = {
            i: column.type.bind_processor(connection.dialect) or (lambda value: value)
            for i, column in enumerate(self.table.columns)
            if isinstance(column.type, TypeDecorator)
        }
        rows = (tuple(row) for row in connection.execute(query))
        return [tuple(words[i](value) if i in words else value for i, value in enumerate(row)) for row in rows]


def copy(
    source: str, target: str, progress: Progress = lambda what, table, done, total: None, page: int = PAGE
) -> list[Moved]:
    """Copy every row of the source into the target, then compare all tables row by row.

    The source is read as of one moment, and may be written meanwhile. The target is created if it does not exist. It
    may hold rows of an earlier copy of this source, even an unfinished one, but no other rows. Until the copy is
    complete, `Store.open` refuses the target.

    Raises `StoreError` if the target has a row that the source lacks; nothing is changed then. Raises `SchemaError` if
    source or target does not have this version's schema.
    """
    if backend_of(source).place == backend_of(target).place:
        raise StoreError(f"{backend_of(source).place}: source and target are the same database")
    tables = METADATA.sorted_tables  # parents before their children
    with opened(source) as old, transaction(old) as reading:
        check_revision(reading)
        if migrate.current(target, unfinished=True) is None:
            migrate.upgrade(target)
        with opened(target, "write") as new:
            with transaction(new) as looking:
                check_revision(looking, unfinished=True)
                differ = [_compared("compared", table, reading, looking, progress, page).differ for table in tables]
            if any(differ):
                with transaction(new, write=True) as writing:
                    _mark(writing, SCHEMA_REVISION + UNFINISHED)
            stored = [_fill(table, pages, reading, new, progress) for table, pages in zip(tables, differ, strict=True)]
            with transaction(new, write=True) as writing:
                found = [_compared("verified", table, reading, writing, progress, page) for table in tables]
                for table, one in zip(tables, found, strict=True):
                    if one.differ:
                        raise StoreError(f"{table.name}: rows differ after the copy; run it again")
                    backend_behind(writing).renumber(writing, table)
                _mark(writing, SCHEMA_REVISION)
    moved = zip(tables, stored, found, strict=True)
    return [Moved(table.name, one.rows, copied, one.checksum) for table, copied, one in moved]


def _mark(connection: Connection, revision: str) -> None:
    connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def _pages(table: Table, connection: Connection, size: int) -> Iterator[tuple[_Page, list[Row]]]:
    """Yield (page, its rows) for the whole table in the order of its keys."""
    places = [list(table.columns).index(column) for column in table.primary_key]
    after: Row | None = None
    while True:
        rows = _Page(table, after, None).rows(connection, size)
        last = tuple(rows[-1][i] for i in places) if len(rows) == size else None
        yield _Page(table, after, last), rows
        if last is None:
            return
        after = last


class _Compared(NamedTuple):
    differ: list[tuple[_Page, bool]]
    """(page, occupied) of each page that differs. `occupied` is True if the target has rows in the page."""
    rows: int
    checksum: str
    """SHA-256 of the source's rows."""


def _compared(
    what: str, table: Table, source: Connection, target: Connection, progress: Progress, size: int
) -> _Compared:
    """Compare the table page by page. Raises `StoreError` for a row of the target that the source lacks."""
    total = int(source.scalar(select(func.count()).select_from(table)) or 0)
    differ, done, checksum = [], 0, hashlib.sha256()
    for page, rows in _pages(table, source, size):
        there = page.rows(target)
        done += len(rows)
        # This form has no references, so that equal rows give equal bytes.
        checksum.update(marshal.dumps(rows, 2))
        if there != rows:
            _refuse_others(table, rows, there, source, target)
            differ.append((page, bool(there)))
        progress(what, table.name, done, total)
    return _Compared(differ, done, checksum.hexdigest())


def _refuse_others(
    table: Table, rows: Sequence[Row], there: Sequence[Row], source: Connection, target: Connection
) -> None:
    """Raise `StoreError` if `there`, the target's rows of a page, has a row whose keys the source lacks."""
    indexes = [index for index in table.indexes if index.unique]
    uniques = [constraint for constraint in table.constraints if isinstance(constraint, UniqueConstraint)]
    keys: list[Any] = [table.primary_key, *uniques, *indexes]
    names = {column.name for key in keys for column in key.columns}
    places = [i for i, column in enumerate(table.columns) if column.name in names]
    known = {tuple(row[i] for i in places) for row in rows}
    other = next((row for row in there if tuple(row[i] for i in places) not in known), None)
    if other is not None:
        key = ", ".join(f"{table.columns[i].name} {other[i]!r}" for i in places)
        raise StoreError(
            f"{backend_behind(target).place}: holds other data, such as this row of {table.name}, which "
            f"{backend_behind(source).place} lacks: {key}; name an empty database"
        )


def _fill(
    table: Table, pages: Sequence[tuple[_Page, bool]], source: Connection, target: Engine, progress: Progress
) -> int:
    """Copy these pages, each in a transaction. Return the number of rows stored."""
    parent = any(key.column.table is table for other in METADATA.tables.values() for key in other.foreign_keys)
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

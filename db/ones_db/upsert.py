"""Inserting rows that may be there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table

from ones_db.engine import backend_behind


def add_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows that are not there; those that are stay as they are. One statement, whatever the
    number."""
    if rows:
        connection.execute(backend_behind(connection).insert(table).on_conflict_do_nothing(), rows)


def add_rows(connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
    """`add_new` for many rows, each with a value for every column of the table in its order."""
    backend_behind(connection).add_rows(connection, table, rows)


def add_or_replace(connection: Connection, table: Table, key: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, or give those with the same key these values. All rows name the same columns."""
    if rows:
        statement = backend_behind(connection).insert(table)
        changed = {name: statement.excluded[name] for name in rows[0] if name not in key}
        connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=changed), rows)

"""Inserting rows that may be there already: the one place that speaks a database's own dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.dialects.sqlite import insert


def add_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows that are not there; those that are stay as they are. One statement, whatever the
    number."""
    if rows:
        connection.execute(insert(table).on_conflict_do_nothing(), rows)


def add_numbers(connection: Connection, table: Table, rows: Sequence[tuple[float | None, ...]]) -> None:
    """`add_new` for many rows of numbers, each with a value for every column of the table in its order.

    The driver gets them as they are: binding each value by its name would cost more than storing it.
    """
    if rows:
        connection.exec_driver_sql(_insertion(table, connection.dialect), list(rows))


@cache
def _insertion(table: Table, dialect: Dialect) -> str:
    return str(insert(table).on_conflict_do_nothing().compile(dialect=dialect))


def add_or_replace(connection: Connection, table: Table, key: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, or give those with the same key these values. All rows name the same columns."""
    if rows:
        statement = insert(table)
        changed = {name: statement.excluded[name] for name in rows[0] if name not in key}
        connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=changed), rows)

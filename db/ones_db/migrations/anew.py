"""Tables of SQLite with further columns."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op


def make_anew(table: str, columns: list[str]) -> None:
    """The table with these columns before its constraints: one that SQLite adds stands behind them. By its own
    definition, as Alembic would put the foreign keys of a table with two in an order of chance."""
    connection = op.get_bind()
    definition, *indexes = connection.scalars(
        sa.text(
            "SELECT sql FROM sqlite_master WHERE tbl_name = :name AND sql IS NOT NULL ORDER BY type DESC, rootpage"
        ),
        {"name": table},
    )
    start, constraint, rest = definition.partition("CONSTRAINT")
    head, body = start.split("(", 1)
    names = ", ".join(row.name for row in connection.execute(sa.text(f"SELECT name FROM pragma_table_info('{table}')")))
    anew = f"{head.replace(table, 'anew')}({body}{', '.join(columns)}, {constraint}{rest}"
    for statement in (
        anew,
        f"INSERT INTO anew ({names}) SELECT {names} FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE anew RENAME TO {table}",
        *indexes,
    ):
        connection.exec_driver_sql(statement)

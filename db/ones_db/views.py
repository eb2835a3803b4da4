"""The views that answer questions, in a database.

Views hold nothing. So they belong to no migration: each upgrade drops them first, since SQLite renames no table under
a view, and makes them anew at its end.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, inspect

from ones_db.view_definitions import ALL

VIEWS = {view.name: view for view in ALL}
"""All views by name."""


def drop_views(connection: Connection) -> None:
    """Drop those of our views that the database has, so that tables can be changed under them."""
    there = set(inspect(connection).get_view_names())
    for name in VIEWS:
        if name in there:
            connection.exec_driver_sql(f"DROP VIEW {name}")


def create_views(connection: Connection) -> None:
    """Make all views, in a database of the newest schema that has none of them."""
    dialect = connection.dialect.name
    for view in VIEWS.values():
        # Row-level security is then that of whoever asks, save where nothing of a single job is told. Before 15
        # PostgreSQL cannot, and a site that has row-level security must not grant its readers the views.
        secured = dialect == "postgresql" and not view.aggregate and can_secure(connection)
        options = " WITH (security_invoker = true)" if secured else ""
        connection.exec_driver_sql(f"CREATE VIEW {view.name}{options} AS {view.select(dialect)}")


def can_secure(connection: Connection) -> bool:
    """Whether views of this PostgreSQL can show each reader what row-level security lets them see of the tables."""
    version: tuple[Any, ...] = connection.dialect.server_version_info or (0,)
    return int(version[0]) >= 15

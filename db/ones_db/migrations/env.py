"""Script that alembic runs. It migrates over the connection that `ones_db.migrate` has opened."""

from __future__ import annotations

from typing import Any

from alembic import context
from sqlalchemy.schema import SetColumnComment, SetTableComment

from ones_db.tables import METADATA
from ones_db.views import VIEWS

connection = context.config.attributes["connection"]


def _applied(ctx: Any, step: Any, heads: Any, run_args: Any) -> None:
    """Call the caller's `Step` callback. alembic requires these names of arguments."""
    context.config.attributes["step"](step.up_revision_id, (step.up_revision.doc or "").rstrip("."))


context.configure(
    connection=connection,
    target_metadata=METADATA,
    render_as_batch=True,
    # Ours begins each transaction itself, so SQLite's schema changes roll back like rows do.
    transactional_ddl=True,
    on_version_apply=_applied,
)
with context.begin_transaction():
    for name in VIEWS:  # so that tables can be changed
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
    context.run_migrations()
    if context.get_context().get_current_revision() == context.get_head_revision():
        for view in VIEWS.values():
            connection.exec_driver_sql(f"CREATE VIEW {view.name} AS {view.select(connection.dialect.name)}")
        if connection.dialect.supports_comments:
            for table in METADATA.sorted_tables:
                connection.execute(SetTableComment(table))
                for column in table.columns:
                    connection.execute(SetColumnComment(column))

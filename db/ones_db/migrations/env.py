"""What alembic runs: the migrations, over the connection that `ones_db.migrate` hands it."""

from __future__ import annotations

from alembic import context

from ones_db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    # Ours begins each transaction itself, so SQLite's schema changes roll back like rows do.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()

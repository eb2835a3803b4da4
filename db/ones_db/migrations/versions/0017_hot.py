"""What `jobs.hot` says since blocks join and leave by terms too.

Revision 0017.
"""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Change the column's comment; SQLite has none."""
    if op.get_bind().dialect.name != "sqlite":
        comment = (
            "of a job of blocks: its state moves from memory to memory when blocks join; "
            "where not, each change begins a term from a checkpoint"
        )
        op.alter_column("jobs", "hot", comment=comment)

"""Blocks that were let go out of the companion's hold: who holds them afterwards is their owner.

Revision 0016.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ones_db.migrations.anew import make_anew

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add the column; of older resizes nobody looked."""
    if op.get_bind().dialect.name == "sqlite":
        make_anew("resizes", ["let_go TEXT DEFAULT '' NOT NULL"])
        return
    comment = "of blocks: tasks that were seen out of that hold since, separated by commas"
    op.add_column("resizes", sa.Column("let_go", sa.Text(), nullable=False, server_default="", comment=comment))

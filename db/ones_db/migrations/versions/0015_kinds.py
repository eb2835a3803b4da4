"""GPUs of several kinds: of which a run's were, and between which a resize changes.

Revision 0015.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ones_db.migrations.anew import make_anew

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add the columns; of older runs the kind is unknown, and older resizes changed none."""
    dialect = op.get_bind().dialect
    run = "kind of its GPUs, several with commas between; empty where it is unknown"
    old = "kind of GPU asked for before; empty for any"
    new = "kind of GPU asked for after; empty for any"
    if dialect.name == "sqlite":
        make_anew("runs", ["kind TEXT"])
        make_anew("resizes", ["old_kind TEXT DEFAULT '' NOT NULL", "new_kind TEXT DEFAULT '' NOT NULL"])
        return
    op.add_column("runs", sa.Column("kind", sa.Text(), nullable=True, comment=run))
    for name, comment in (("old_kind", old), ("new_kind", new)):
        op.add_column("resizes", sa.Column(name, sa.Text(), nullable=False, server_default="", comment=comment))

"""Jobs say by which strategy they train, and what that can do at each number of GPUs.

Revision 0013.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ones_db.migrations.anew import make_anew

revision = "0013"
down_revision = "0012"

COLUMNS = {
    "strategy": "training strategy, by its own word; null where it is plainly data parallel",
    "limits": "what that strategy can do, as a JSON object (the view `size_limits`)",
}


def upgrade() -> None:
    """Add the columns; older rows are plainly data parallel."""
    dialect = op.get_bind().dialect
    if dialect.name == "sqlite":
        make_anew("jobs", [f"{name} {sa.Text().compile(dialect)}" for name in COLUMNS])
        return
    for name, comment in COLUMNS.items():
        op.add_column("jobs", sa.Column(name, sa.Text(), nullable=True, comment=comment))

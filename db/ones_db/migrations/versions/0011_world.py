"""Runs say how many ranks train.

Revision 0011.
"""

from __future__ import annotations

from typing import Literal

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the column; older rows never said."""
    recreate: Literal["always", "never"] = "always" if op.get_bind().dialect.name == "sqlite" else "never"
    with op.batch_alter_table("runs", recreate=recreate) as table:
        table.add_column(sa.Column("world", WHOLE, comment="ranks, as its last hello said"))

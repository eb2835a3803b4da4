"""Plainly data-parallel jobs say how many bytes of gradients they average.

Revision 0018.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ones_db.migrations.anew import make_anew

revision = "0018"
down_revision = "0017"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COMMENT = "bytes of the gradients that it averages in a step, by its own word; 0 or null where it did not say"


def upgrade() -> None:
    """Add the column; older rows never said."""
    dialect = op.get_bind().dialect
    if dialect.name == "sqlite":
        make_anew("jobs", [f"gradient_bytes {WHOLE.compile(dialect)}"])
    else:
        op.add_column("jobs", sa.Column("gradient_bytes", WHOLE, nullable=True, comment=COMMENT))

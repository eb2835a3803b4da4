"""Jobs say of what their global batches are multiples.

Revision 0012.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ones_db.migrations.anew import make_anew

revision = "0012"
down_revision = "0011"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COMMENT = "its global batches are multiples of this, samples"


def upgrade() -> None:
    """Add the column; older rows never said, so theirs are multiples of 1."""
    dialect = op.get_bind().dialect
    if dialect.name == "sqlite":
        make_anew("jobs", [f"multiple_of {WHOLE.compile(dialect)}"])
    else:
        op.add_column("jobs", sa.Column("multiple_of", WHOLE, nullable=True, comment=COMMENT))

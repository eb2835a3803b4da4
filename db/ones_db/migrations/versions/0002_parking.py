"""Jobs that are kept from starting: until when.

Revision 0002.
"""

from __future__ import annotations

from typing import Literal

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column."""
    # SQLite's table is made anew, as a column that SQLite adds to a table stands behind its constraints.
    recreate: Literal["always", "never"] = "always" if op.get_bind().dialect.name == "sqlite" else "never"
    with op.batch_alter_table("jobs", recreate=recreate) as jobs:
        jobs.add_column(
            sa.Column(
                "deferred_until",
                sa.Double(),
                nullable=True,
                comment="until when the companion keeps it from starting, Unix seconds; null where it does not",
            )
        )

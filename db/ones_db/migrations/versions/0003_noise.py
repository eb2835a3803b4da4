"""Runs and their throughput say the gradient noise scale and the progress.

Revision 0003.
"""

from __future__ import annotations

from typing import Literal

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns; older rows never said."""
    # SQLite's tables are made anew, as a column that SQLite adds to a table stands behind its constraints.
    recreate: Literal["always", "never"] = "always" if op.get_bind().dialect.name == "sqlite" else "never"
    with op.batch_alter_table("runs", recreate=recreate) as runs:
        runs.add_column(sa.Column("noise", sa.Double(), comment="gradient noise scale that it reported last, samples"))
        runs.add_column(
            sa.Column(
                "progress",
                sa.Double(),
                comment="progress it has reached since the job's first run, samples of the base batch",
            )
        )
    with op.batch_alter_table(
        "throughput", recreate=recreate, table_kwargs={"sqlite_with_rowid": False}
    ) as throughput:
        throughput.add_column(sa.Column("noise", sa.Double(), comment="gradient noise scale, samples"))
        throughput.add_column(
            sa.Column("progress", sa.Double(), comment="progress since the job's first run, samples of the base batch")
        )

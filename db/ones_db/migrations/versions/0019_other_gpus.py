"""A table of the GPUs of jobs that did not opt in.

From now on `held` has all tasks that a resize holds. So the dropped tasks of older resizes are added to it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table, and add the tasks."""
    op.create_table(
        "other_gpus",
        sa.Column("cluster_id", WHOLE, autoincrement=False, nullable=False, comment="cluster"),
        sa.Column("time", sa.Double(), autoincrement=False, nullable=False, comment="when it was seen, Unix seconds"),
        sa.Column("gpus", WHOLE, nullable=False, comment="number of these GPUs"),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_other_gpus_cluster_id_clusters")),
        sa.PrimaryKeyConstraint("cluster_id", "time", name=op.f("pk_other_gpus")),
        comment="GPUs held by jobs that did not opt in; each number holds until the next",
        sqlite_with_rowid=False,
    )
    op.execute(
        "UPDATE resizes SET held = CASE held WHEN '' THEN dropped ELSE held || ',' || dropped END "
        "WHERE mechanism = 'blocks' AND state <> 'rolled_back' AND dropped <> ''"
    )

"""How the companion was at its last tick.

Revision 0008.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "health",
        sa.Column("cluster_id", WHOLE, nullable=False, comment="cluster"),
        sa.Column("time", sa.Double(), nullable=False, comment="when it wrote this, Unix seconds"),
        sa.Column("mode", sa.Text(), nullable=False, comment="act or advise"),
        sa.Column("interval_s", sa.Double(), nullable=False, comment="seconds from one tick to the next"),
        sa.Column(
            "tick_time",
            sa.Double(),
            nullable=True,
            comment="end of its last tick that was not in vain, Unix seconds; null before one",
        ),
        sa.Column("tick_s", sa.Double(), nullable=True, comment="what that tick took, seconds"),
        sa.Column("running", WHOLE, nullable=True, comment="elastic jobs that ran then"),
        sa.Column("waiting", WHOLE, nullable=True, comment="elastic jobs that waited then"),
        sa.Column("gpus", WHOLE, nullable=True, comment="GPUs on which elastic jobs ran then"),
        sa.Column(
            "error",
            sa.Text(),
            nullable=False,
            comment="its last complaint, in words; empty where it had none since it started",
        ),
        sa.Column("error_time", sa.Double(), nullable=True, comment="when it complained, Unix seconds"),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_health_cluster_id_clusters")),
        sa.PrimaryKeyConstraint("cluster_id", name=op.f("pk_health")),
        comment="how the companion that acted last was at its last tick",
        sqlite_with_rowid=False,
    )

"""Which companion of each cluster leads.

Revision 0007.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "leaders",
        sa.Column("cluster_id", WHOLE, nullable=False, comment="cluster"),
        sa.Column(
            "term",
            WHOLE,
            nullable=False,
            comment="how often the lead was taken; whoever has an older term writes no more",
        ),
        sa.Column(
            "holder",
            sa.Text(),
            nullable=False,
            comment="who leads, as host:process id; empty once it gave the lead back",
        ),
        sa.Column("since", sa.Double(), nullable=False, comment="when it took the lead, Unix seconds"),
        sa.Column("beat", sa.Double(), nullable=False, comment="when it was last heard of, Unix seconds"),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_leaders_cluster_id_clusters")),
        sa.PrimaryKeyConstraint("cluster_id", name=op.f("pk_leaders")),
        comment="which companion of each cluster acts, or did last",
        sqlite_with_rowid=False,
    )

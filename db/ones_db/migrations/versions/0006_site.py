"""Nodes, operators' actions, alternatives that decisions weighed, jobs known from accounting, roll-ups.

Revision 0006.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "nodes",
        sa.Column("id", WHOLE, nullable=False, comment="key of this table alone"),
        sa.Column("cluster_id", WHOLE, nullable=False, comment="cluster"),
        sa.Column("name", sa.Text(), nullable=False, comment="its name, as Slurm has it"),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_nodes_cluster_id_clusters")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        comment="nodes that the companion has seen",
    )
    op.create_index("uq_nodes_cluster_id_name", "nodes", ["cluster_id", "name"], unique=True)
    op.create_table(
        "node_changes",
        sa.Column("node_id", WHOLE, nullable=False, comment="node"),
        sa.Column("time", sa.Double(), nullable=False, comment="when it was seen, Unix seconds"),
        sa.Column(
            "state",
            sa.Text(),
            nullable=False,
            comment="UP while it takes jobs, has it any or not; RESERVED; else what Slurm says of it",
        ),
        sa.Column(
            "usable",
            sa.Boolean(),
            nullable=False,
            comment="up, and neither drained, reserved, failing nor in maintenance",
        ),
        sa.Column("gpus", WHOLE, nullable=False, comment="GPUs it has; 0 where Slurm knows of none"),
        sa.Column("partitions", sa.Text(), nullable=False, comment="partitions it is in, separated by commas"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_node_changes_node_id_nodes")),
        sa.PrimaryKeyConstraint("node_id", "time", name=op.f("pk_node_changes")),
        comment="what a node was from a moment on, until its next change",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "actions",
        sa.Column("id", WHOLE, nullable=False, comment="key of this table alone"),
        sa.Column("cluster_id", WHOLE, nullable=False, comment="cluster"),
        sa.Column("time", sa.Double(), nullable=False, comment="when, Unix seconds"),
        sa.Column("user_name", sa.Text(), nullable=False, comment="login name of who did it"),
        sa.Column(
            "action", sa.Text(), nullable=False, comment="what was done: a command, or what was seen of a file"
        ),
        sa.Column("detail", sa.Text(), nullable=False, comment="with what, in words"),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_actions_cluster_id_clusters")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_actions")),
        comment="what people did to the companion, its database and its jobs",
    )
    op.create_index(
        "uq_actions_cluster_id_time_user_name_action",
        "actions",
        ["cluster_id", "time", "user_name", "action"],
        unique=True,
    )
    op.create_table(
        "decision_alternatives",
        sa.Column("decision_id", WHOLE, nullable=False, comment="decision"),
        sa.Column("job_id", WHOLE, nullable=False, comment="job (jobs.id)"),
        sa.Column("rank", WHOLE, nullable=False, comment="from 0, the best for the job"),
        sa.Column("nodes", WHOLE, nullable=False, comment="nodes; 0 for waiting"),
        sa.Column("gpus_per_node", WHOLE, nullable=False, comment="GPUs per node; 0 for waiting"),
        sa.Column("batch", WHOLE, nullable=False, comment="global batch, samples; 0 for waiting"),
        sa.Column(
            "worth",
            sa.Double(),
            nullable=False,
            comment="what it is worth by itself, in the policy's own unit; more is better",
        ),
        sa.ForeignKeyConstraint(
            ["decision_id"], ["decisions.id"], name=op.f("fk_decision_alternatives_decision_id_decisions")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_decision_alternatives_job_id_jobs")),
        sa.PrimaryKeyConstraint("decision_id", "job_id", "rank", name=op.f("pk_decision_alternatives")),
        comment="the best few sizes that a decision weighed for a job",
        sqlite_with_rowid=False,
    )
    op.create_index("ix_decision_alternatives_job_id", "decision_alternatives", ["job_id"])
    op.create_table(
        "accounting",
        sa.Column("job_id", WHOLE, nullable=False, comment="job (jobs.id)"),
        sa.Column(
            "time_limit_s", sa.Double(), nullable=True, comment="time limit, seconds; null where it had none"
        ),
        sa.Column(
            "import_time", sa.Double(), nullable=False, comment="when its rows were last read, Unix seconds"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_accounting_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_accounting")),
        comment="jobs that are known from Slurm's accounting alone",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rollups",
        sa.Column("run_id", WHOLE, nullable=False, comment="run"),
        sa.Column(
            "stretch_s",
            sa.Double(),
            nullable=False,
            comment="samples that ended in the same stretch of so many seconds are one",
        ),
        sa.Column("number", WHOLE, nullable=False, comment="number of the run's last report then"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rollups_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_rollups")),
        comment="runs whose throughput samples were put together to longer ones",
        sqlite_with_rowid=False,
    )

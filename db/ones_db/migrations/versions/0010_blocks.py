"""Jobs of blocks: blocks that ran, memberships, and by which mechanism a job was resized.

Revision 0010.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from ones_db.migrations.anew import make_anew

revision = "0010"
down_revision = "0009"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

ADDED: dict[str, tuple[tuple[str, Any, str | None, str], ...]] = {
    "jobs": (
        ("term", WHOLE, None, "of a job of blocks: the term of its leader, by its own word"),
        ("hot", sa.Boolean(), None, "of a job of blocks: blocks can join and leave while it trains"),
    ),
    "resizes": (
        ("mechanism", sa.Text(), "requeue", "requeue, or blocks: blocks join and leave while the job trains"),
        ("added", sa.Text(), "", "of blocks: task:nodesxGPUs of those that are to join, separated by commas"),
        ("dropped", sa.Text(), "", "of blocks: tasks of those that are to leave, separated by commas"),
        ("held", sa.Text(), "", "of blocks: waiting tasks that are put into a hold, separated by commas"),
    ),
}
"""Name, type, default of older rows (None for null) and meaning of each column."""


def upgrade() -> None:
    """Add the columns and create the tables."""
    dialect = op.get_bind().dialect
    for table, columns in ADDED.items():
        if dialect.name == "sqlite":
            make_anew(
                table,
                [
                    f"{name} {kind.compile(dialect)}" + ("" if default is None else f" DEFAULT '{default}' NOT NULL")
                    for name, kind, default, _ in columns
                ],
            )
            continue
        for name, kind, default, comment in columns:
            null = default is None
            op.add_column(table, sa.Column(name, kind, nullable=null, server_default=default, comment=comment))
    _create_blocks()
    _create_memberships()


def _column(name: str, kind: Any, comment: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=nullable, autoincrement=False, comment=comment)


def _create_blocks() -> None:
    op.create_table(
        "blocks",
        _column("job_id", WHOLE, "job (jobs.id)"),
        _column("task", WHOLE, "task of the job array"),
        _column("restart", WHOLE, "Slurm's restart count of the task"),
        _column("slurm_id", WHOLE, "Slurm's job id of the task, as accounting has it"),
        _column("nodes", WHOLE, "nodes"),
        _column("gpus_per_node", WHOLE, "GPUs per node"),
        _column("node_list", sa.Text(), "names of its nodes, separated by commas"),
        _column("state", sa.Text(), "base state, as Slurm names it"),
        _column("start_time", sa.Double(), "start, Unix seconds"),
        _column("end_time", sa.Double(), "end, Unix seconds; null until then", nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_blocks_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "task", "restart", name=op.f("pk_blocks")),
        comment="one start of a block each, of jobs of blocks",
        sqlite_with_rowid=False,
    )


def _create_memberships() -> None:
    op.create_table(
        "memberships",
        _column("run_id", WHOLE, "run (its restart is the term)"),
        _column("number", WHOLE, "number of the report"),
        _column("time", sa.Double(), "from when, Unix seconds"),
        _column("generation", WHOLE, "rises with each change, over all terms of the job"),
        _column("blocks", sa.Text(), "tasks of its blocks in rank order, separated by commas; the first leads"),
        _column("restarts", sa.Text(), "Slurm's restart count of each of them, separated by commas"),
        _column("nodes", WHOLE, "nodes"),
        _column("gpus_per_node", WHOLE, "GPUs per node; 0 where nodes give unequally many"),
        _column("world", WHOLE, "GPUs in all, one rank each"),
        _column("step", WHOLE, "optimizer steps since the job's first run"),
        _column("batch", WHOLE, "global batch from then on, samples"),
        _column("pause_s", sa.Double(), "how long no rank trained, seconds"),
        _column("bytes", WHOLE, "state that was sent to new blocks, bytes"),
        _column("transfer_s", sa.Double(), "what sending it took of pause_s, seconds"),
        _column("ready_s", sa.Double(), "from the order until the last new block was ready, training going on, seconds"),
        _column("order_number", WHOLE, "order that asked for it", nullable=True),
        _column("why", sa.Text(), "order, lost, leaving or first"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_memberships_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_memberships")),
        comment="the blocks that train together, from a step boundary on",
        sqlite_with_rowid=False,
    )

"""Deadlines that were promised to jobs, or refused.

Revision 0014.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _column(name: str, kind: Any, comment: str, default: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, autoincrement=False, comment=comment, server_default=default)


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "promises",
        _column("job_id", WHOLE, "job (jobs.id)"),
        _column("deadline", sa.Double(), "when the job is to have ended, Unix seconds"),
        _column("time", sa.Double(), "when that was promised or refused, Unix seconds"),
        _column("given", sa.Boolean(), "it was promised"),
        _column("reason", sa.Text(), "why, in words"),
        _column("reason_code", sa.Text(), "code of reason, by which causes are counted", ""),
        _column("reason_arguments", sa.Text(), "what reason names, as a JSON object", "{}"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_promises_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_promises")),
        comment="deadlines that were promised to jobs, or refused",
        sqlite_with_rowid=False,
    )

"""Reasons are data: beside each sentence its code and its arguments. Samples stand in one table on PostgreSQL too.

Revision 0009.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ones_db.migrations.anew import make_anew

revision = "0009"
down_revision = "0008"

REASONS = {
    "jobs": ("refusal",),
    "decision_jobs": ("reason", "outcome"),
    "resizes": ("outcome",),
    "resize_steps": ("detail",),
}


def upgrade() -> None:
    """Add the columns; older rows have their sentence alone."""
    if op.get_bind().dialect.name == "postgresql":
        _join_months()
    for table, reasons in REASONS.items():
        columns = []
        for reason in reasons:
            columns.append((f"{reason}_code", "", f"code of {reason}, by which causes are counted"))
            columns.append((f"{reason}_arguments", "{}", f"what {reason} names, as a JSON object"))
        if op.get_bind().dialect.name == "sqlite":
            make_anew(table, [f"{name} TEXT DEFAULT '{default}' NOT NULL" for name, default, _ in columns])
            continue
        for name, default, comment in columns:
            op.add_column(
                table, sa.Column(name, sa.Text(), nullable=False, server_default=default, comment=comment)
            )


def _join_months() -> None:
    """One table of samples in place of a partition for each month."""
    comment = "samples used over a stretch of steps, at the shape of the run"
    for statement in (
        "ALTER TABLE throughput RENAME TO throughput_by_month",
        "CREATE TABLE throughput (LIKE throughput_by_month INCLUDING DEFAULTS INCLUDING COMMENTS)",
        f"COMMENT ON TABLE throughput IS '{comment}'",
        "INSERT INTO throughput SELECT * FROM throughput_by_month",
        "DROP TABLE throughput_by_month",
        "ALTER TABLE throughput ADD CONSTRAINT pk_throughput PRIMARY KEY (run_id, number)",
        "ALTER TABLE throughput ADD CONSTRAINT fk_throughput_run_id_runs FOREIGN KEY (run_id) REFERENCES runs (id)",
        "CREATE INDEX ix_throughput_time ON throughput USING brin (time)",
    ):
        op.execute(statement)

"""Runs say how they started and whether their losses were finite; jobs and batches, how many passes a step takes.

Revision 0004.
"""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

COLUMNS: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "jobs": (("max_passes", WHOLE, "most forward passes per optimizer step"),),
    "runs": (
        ("queue_s", sa.Double(), "from the last report of the run before to the batch script, seconds"),
        ("import_s", sa.Double(), "what imports took of launch_s, seconds"),
        ("first_step_s", sa.Double(), "from the hello to the end of the first step, seconds"),
        ("resizes", WHOLE, "runs so far that began at another world size, by the job's own count"),
        ("attempts", WHOLE, "how often its ranks were started again within it"),
        ("hello_number", WHOLE, "number of the hello of its last start of the ranks"),
        ("nonfinite", WHOLE, "steps with a loss that is not a finite number"),
        ("nonfinite_step", WHOLE, "step of the last report that had such a loss; null for none"),
    ),
    "throughput": (("nonfinite", WHOLE, "steps with a loss that is not a finite number; they are not in the mean"),),
    "epochs": (("nonfinite", WHOLE, "steps with a loss that is not a finite number"),),
    "checkpoints": (("stall_s", sa.Double(), "how long training stood still for it, seconds"),),
    "batch_changes": (
        ("passes", WHOLE, "forward passes per step from then on"),
        ("ramp", WHOLE, "steps over which the learning rate goes there"),
    ),
}
KEYED = ("throughput", "epochs", "checkpoints", "batch_changes")


def upgrade() -> None:
    """Add the columns; older rows never said. Jobs that told their spec before took one pass a step."""
    # SQLite's tables are made anew, as a column that SQLite adds to a table stands behind its constraints.
    recreate: Literal["always", "never"] = "always" if op.get_bind().dialect.name == "sqlite" else "never"
    for name, columns in COLUMNS.items():
        options = {"sqlite_with_rowid": False} if name in KEYED else {}
        with op.batch_alter_table(name, recreate=recreate, table_kwargs=options) as table:
            for column, kind, comment in columns:
                table.add_column(sa.Column(column, kind, comment=comment))
            if name == "jobs":
                table.alter_column("dataset", comment="samples in an epoch; 0 where it does not know")
            if name == "runs":
                table.alter_column("hello_time", comment="when its first hello was written, Unix seconds")
            if name == "batch_changes":
                table.alter_column(
                    "lr_factor", comment="learning rate over the one set for the base batch, where it goes"
                )
    op.execute("UPDATE jobs SET max_passes = 1 WHERE base_batch IS NOT NULL")

"""`slurm-ones db …`: the job database's own tools."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ones_db import migrate
from ones_db.copy import copy as copy_rows
from ones_db.engine import backend_of
from slurm_ones.cli.access import export, grant, revoke
from slurm_ones.cli.common import ConfigOption, DatabaseOption, command, console, errors, settings_of, without_password
from slurm_ones.cli.maintain import maintain_database
from slurm_ones.cli.query import query

app = typer.Typer(add_completion=False, help="The job database.", no_args_is_help=True)
app.command()(query)
app.command("maintain")(maintain_database)
for access in (grant, revoke, export):
    app.command()(access)


@app.command()
@command
def upgrade(config: ConfigOption = None, database: DatabaseOption = "") -> None:
    """Create the database, or upgrade it to this version's schema (SQLite: a copy is kept beside the file).

    All steps are one transaction: stopped in the middle, it changed nothing, and is run again.
    """
    url = settings_of(config, database).database_url
    place = backend_of(url).place
    before, after = migrate.upgrade(url, lambda revision, what: errors.print(f"{revision}  {what}", markup=False))
    if before == after:
        console.print(f"{place}: schema {after}, nothing to do", markup=False)
    else:
        console.print(f"{place}: schema {before or 'none'} → {after}", markup=False)


@app.command()
@command
def copy(
    source: Annotated[str, typer.Argument(help="URL of the database to copy.")],
    target: Annotated[str, typer.Argument(help="URL of the database to copy to; created if it does not exist.")],
) -> None:
    """Move a site to another database, from SQLite to PostgreSQL or back, and verify every table's count and checksum.

    The companion may run meanwhile. Stop it, run this once more, which brings the rest, and name the new database in
    its settings. A copy that was interrupted goes on where it was. Passwords come from ~/.pgpass, PGPASSWORD or a
    service file.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as bars:
        tasks: dict[tuple[str, str], TaskID] = {}

        def show(what: str, table: str, done: int, total: int) -> None:
            if (what, table) not in tasks:
                tasks[what, table] = bars.add_task(f"{table} {what}")
            bars.update(tasks[what, table], completed=done, total=max(total, done))

        moved = copy_rows(without_password(source), without_password(target), show)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("table", "rows", "copied now", "SHA-256"):
        table.add_column(column, justify="right" if column in ("rows", "copied now") else "left")
    for row in moved:
        table.add_row(row.table, str(row.rows), str(row.copied), row.checksum[:16])
    console.print(table)
    console.print(f"{backend_of(target).place} holds what {backend_of(source).place} holds", markup=False)

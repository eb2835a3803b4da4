"""`slurm-ones db …`: the job database's own tools."""

from __future__ import annotations

import typer

from ones_db import migrate
from slurm_ones.cli.common import ConfigOption, DatabaseOption, command, console, settings_of

app = typer.Typer(help="The job database.", no_args_is_help=True)


@app.command()
@command
def upgrade(config: ConfigOption = None, database: DatabaseOption = "") -> None:
    """Create the database, or bring it to this version's schema (a copy of an SQLite file is kept beside it)."""
    url = settings_of(config, database).database_url
    before, after = migrate.upgrade(url)
    if before == after:
        console.print(f"{url}: schema {after}, nothing to do")
    else:
        console.print(f"{url}: schema {before or 'none'} → {after}")

"""Commands `slurm-ones db …`: tools for the job database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn, TaskID, TimeRemainingColumn

from ones_db import Store, migrate
from ones_db.copy import copy as copy_rows
from ones_db.engine import backend_of
from ones_db.retention import Ages, Done
from ones_db.retention import maintain as maintain_rows
from ones_db.user_files import export_user, export_users
from slurm_ones.cli.common import (
    UNITS,
    ConfigOption,
    DatabaseOption,
    bars,
    command,
    console,
    errors,
    grid,
    length,
    person,
    reading_store,
    record_action,
    say,
    settings_of,
    without_password,
)
from slurm_ones.cli.query import query
from slurm_ones.config import ConfigError, Settings

app = typer.Typer(add_completion=False, help="The job database.", no_args_is_help=True)
app.command()(query)


@app.command()
@command
def upgrade(config: ConfigOption = None, database: DatabaseOption = "") -> None:
    """Create the database, or upgrade its schema to this version. An SQLite file is first copied, next to it.

    The upgrade is one transaction. If it is interrupted, nothing has changed, and it can be run again.
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
    """Copy a database from SQLite to PostgreSQL or back, and compare each table's number of rows and checksum.

    The companion may run meanwhile. To move to the copy, stop the companion, run this command again to copy what is
    new, and name the new database in the settings. An interrupted copy continues if it is run again. Passwords come
    from ~/.pgpass, PGPASSWORD or a service file.
    """
    with bars(MofNCompleteColumn(), TimeRemainingColumn()) as shown:
        tasks: dict[tuple[str, str], TaskID] = {}

        def show(what: str, table: str, done: int, total: int) -> None:
            if (what, table) not in tasks:
                tasks[what, table] = shown.add_task(f"{table} {what}")
            shown.update(tasks[what, table], completed=done, total=max(total, done))

        moved = copy_rows(without_password(source), without_password(target), show)
    table = grid("table", "rows", "copied now", "SHA-256", right=("rows", "copied now"))
    for row in moved:
        table.add_row(row.table, str(row.rows), str(row.copied), row.checksum[:16])
    console.print(table)
    console.print(f"{backend_of(target).place} has the same rows as {backend_of(source).place}", markup=False)


@app.command()
@command
def export(
    file: Annotated[Path | None, typer.Argument(help="File to write, with --user.")] = None,
    user: Annotated[str, typer.Option(help="Login name of the user whose jobs to export.")] = "",
    to: Annotated[Path | None, typer.Option(help="Directory for one file USER.sqlite per user.")] = None,
    config: ConfigOption = None,
    database: DatabaseOption = "",
) -> None:
    """Copy the jobs of one user, or of each user, to a database file (SQLite, mode 0640).

    Only an older export is replaced, and only once the new one is complete. Run by root, each file belongs to its user.
    """
    if bool(user) != (file is not None) or bool(user) == (to is not None):
        raise ConfigError("name one user and a file (--user NAME FILE), or a directory for all (--to DIR)")
    url = settings_of(config, database).database_url
    if to is not None:
        done = export_users(url, to, person())
    else:
        assert file is not None
        done = [export_user(url, user, file, person())]
    for one in done:
        whose = "" if one.owned else "; it belongs to the user who ran this command"
        say(f"{one.path}: {one.jobs} jobs, only {one.user}'s{whose}", 1000)
    if not done:
        console.print("no jobs are known, so nothing was exported")


@app.command()
@command
def maintain(
    config: ConfigOption = None,
    database: DatabaseOption = "",
    older_than: Annotated[
        str, typer.Option(help="Keep one sample a minute of jobs that ended longer ago: 7d (default: settings).")
    ] = "",
    hours_older_than: Annotated[
        str, typer.Option(help="Keep one sample an hour of jobs that ended longer ago: 90d (default: settings).")
    ] = "",
    forget_older_than: Annotated[
        str, typer.Option(help="Delete decisions without effect and resize steps of older jobs (default: settings).")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
) -> None:
    """Reduce old rows, even while the companion runs. Rows from which curves are learned are kept.

    Only rows of jobs that have ended are reduced. The command may be stopped at any time; its next call continues. An
    SQLite file does not become smaller, but new rows use the space that is freed.
    """
    settings = settings_of(config, database)
    ages = ages_of(settings, older_than, hours_older_than, forget_older_than)
    with reading_store(settings) as known:
        cluster = known.cluster
    opened = reading_store(settings) if dry_run else Store.open(settings.database_url, cluster)
    with opened as store, bars(MofNCompleteColumn(), TimeRemainingColumn()) as shown:
        tasks = {what: shown.add_task(words, total=None) for what, words in _STEPS.items()}

        def show(what: str, finished: int, of: int) -> None:
            shown.update(tasks[what], completed=finished, total=of)

        done = maintain_rows(store, ages, dry=dry_run, progress=show)
        lines = summary(done, dry_run)
        if not dry_run and (done.removed or done.rows):
            record_action(store, "db maintain", "; ".join(lines))
    for line in lines:
        console.print(line)


_STEPS = {"hours": "runs, by the hour", "minutes": "runs, by the minute", "decisions": "jobs' decisions"}


def ages_of(settings: Settings, older_than: str, hours_older_than: str, forget_older_than: str) -> Ages:
    """Return the ages from the command line, or else from the settings."""
    kept, day = settings.retention, UNITS["d"]
    forget_s = None if kept.forget_after_days is None else kept.forget_after_days * day
    return Ages(
        length(older_than, "--older-than") if older_than else kept.minutes_after_days * day,
        length(hours_older_than, "--hours-older-than") if hours_older_than else kept.hours_after_days * day,
        length(forget_older_than, "--forget-older-than") if forget_older_than else forget_s,
    )


def summary(done: Done, dry: bool) -> list[str]:
    """Return lines that say what maintenance has done, or with `dry` would do."""
    if not (done.removed or done.rows):
        return ["nothing to do: no ended job has rows that are old enough"]
    were = "would be" if dry else "were"
    lines = [f"{done.removed} of {done.read} throughput samples {were} combined with others, in {done.runs} runs"]
    if done.rows:
        lines.append(f"{done.rows} rows of decisions and resize steps {were} deleted, of {done.jobs} jobs")
    return lines

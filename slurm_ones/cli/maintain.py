"""`slurm-ones db maintain`: old rows become fewer, beside the running companion."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ones_db import Store
from ones_db.maintenance import Ages, Done, maintain
from slurm_ones.cli.common import (
    ConfigOption,
    DatabaseOption,
    command,
    console,
    errors,
    reading_store,
    record_action,
    settings_of,
)
from slurm_ones.config import ConfigError, Settings

DAY_S = 86_400.0
_WORDS = {"hours": "runs, by the hour", "minutes": "runs, by the minute", "decisions": "jobs' decisions"}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}


def age(text: str, option: str) -> float:
    """Seconds in an age such as 36h, 7d or 2w; raises `ConfigError`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"{option}: {text[:40]!r} is no age; write a number and s, m, h, d or w, such as 7d")
    return float(found[1]) * _UNITS[found[2]]


def ages_of(settings: Settings, older_than: str, hours_older_than: str, forget_older_than: str) -> Ages:
    """The settings' own ages, save those that the command line names."""
    kept = settings.retention
    forget_s = None if kept.forget_after_days is None else kept.forget_after_days * DAY_S
    return Ages(
        minutes_s=age(older_than, "--older-than") if older_than else kept.minutes_after_days * DAY_S,
        hours_s=age(hours_older_than, "--hours-older-than") if hours_older_than else kept.hours_after_days * DAY_S,
        forget_s=age(forget_older_than, "--forget-older-than") if forget_older_than else forget_s,
    )


def summary(done: Done, dry: bool) -> list[str]:
    """What was done, or would be, in words."""
    if not (done.removed or done.rows):
        return ["nothing to do: no job that ended has rows that old"]
    were = "would be" if dry else "were"
    lines = [f"{done.removed} of {done.read} throughput samples {were} rolled up into the others, in {done.runs} runs"]
    if done.rows:
        lines.append(f"{done.rows} rows of decisions and resize steps {were} deleted, of {done.jobs} jobs")
    return lines


@command
def maintain_database(
    config: ConfigOption = None,
    database: DatabaseOption = "",
    older_than: Annotated[
        str,
        typer.Option(
            help="Reduce samples of jobs that ended longer ago to one a minute, e.g. 7d (default: the settings)."
        ),
    ] = "",
    hours_older_than: Annotated[
        str, typer.Option(help="Reduce samples of jobs that ended longer ago to one an hour (default: the settings).")
    ] = "",
    forget_older_than: Annotated[
        str,
        typer.Option(
            help="Delete decisions that led to nothing and the steps of resizes, of jobs that ended longer ago; kept "
            "unless this or the settings ask for it."
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
) -> None:
    """Reduce old rows, while the companion runs. What learning reads stays.

    May be stopped at any time, and goes on where it was. Jobs that have not ended are left alone. A file keeps its
    size: what becomes free in it is used for new rows.
    """
    settings = settings_of(config, database)
    ages = ages_of(settings, older_than, hours_older_than, forget_older_than)
    with reading_store(settings) as known:
        cluster = known.cluster
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    opened = reading_store(settings) if dry_run else Store.open(settings.database_url, cluster)
    with opened as store, Progress(*columns, console=errors, transient=True) as bars:
        tasks = {what: bars.add_task(words, total=None) for what, words in _WORDS.items()}

        def show(what: str, finished: int, of: int) -> None:
            bars.update(tasks[what], completed=finished, total=of)

        done = maintain(store, ages, dry=dry_run, progress=show)
        lines = summary(done, dry_run)
        if not dry_run and (done.removed or done.rows):
            record_action(store, "db maintain", "; ".join(lines))
    for line in lines:
        console.print(line)

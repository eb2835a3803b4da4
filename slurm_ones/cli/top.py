"""`slurm-ones top`: the elastic jobs, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import Annotated

import typer

from ones_db import Store
from slurm_ones.cli.common import (
    AccountsOption,
    ConfigOption,
    DatabaseOption,
    JobsOption,
    JsonOption,
    MeOption,
    PartitionsOption,
    StatesOption,
    UsersOption,
    command,
    console,
    print_json,
    selected,
    settings_of,
    store_of_reader,
)
from slurm_ones.config import Settings
from slurm_ones.show.columns import TOP
from slurm_ones.show.live import Live, read_live
from slurm_ones.show.table import BY_WORD, Choice, as_json, lines
from slurm_ones.text import plain


def reader(settings: Settings, *, named: bool, also: Collection[int] = ()) -> Callable[[], Live]:
    """What reads the jobs at each look, and `also` those with these ids. What the companion published is another file
    each time: it is opened anew."""

    def look() -> Live:
        with _opened(settings, named) as store:
            return read_live(store, also)

    return look


def _opened(settings: Settings, named: bool) -> Store:
    return store_of_reader(settings, named=named)


@command
def top(
    me: MeOption = False,
    user: UsersOption = "",
    partition: PartitionsOption = "",
    account: AccountsOption = "",
    states: StatesOption = "",
    job: JobsOption = "",
    sort: Annotated[
        str, typer.Option("--sort", "-S", help="Column to sort by; -COLUMN for the largest first.")
    ] = "job",
    every: Annotated[float, typer.Option(help="Seconds between two looks at the database.", min=0.5)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, and end.")] = False,
    config: ConfigOption = None,
    database: DatabaseOption = "",
    json: JsonOption = False,
) -> None:
    """Show the elastic jobs live: why each has what it has, its log, and who is on which node."""
    name = sort.removeprefix("-")
    if name not in BY_WORD:
        raise typer.BadParameter(f"{plain(name, 40)!r} is no column: {', '.join(column.title for column in TOP)}")
    selection = selected(me=me, user=user, partition=partition, account=account, states=states, jobs=job)
    choice = Choice(selection, bool(states or job), name, sort.startswith("-"))
    settings = settings_of(config, database)
    look = reader(settings, named=bool(database), also=selection.jobs)
    if json:
        live = look()
        print_json(as_json(live, choice.jobs(live)))
    elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in lines(look(), time.time(), choice, console.width):
            console.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)
    else:
        from slurm_ones.show.window import TopApp

        # What is wrong is said at once, not in a window that closes again.
        look()
        TopApp(settings, look, lambda: _opened(settings, bool(database)), choice, every).run()

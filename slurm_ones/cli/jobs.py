"""`slurm-ones jobs`: the elastic jobs, as the job database has them."""

from __future__ import annotations

from typing import Annotated

import typer

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
    errors,
    is_view,
    job_number,
    print_json,
    selected,
    settings_of,
    store_of_reader,
)
from slurm_ones.cli.unknown import unknown_job
from slurm_ones.show.columns import JOB, JOBS, ShownJob, record
from slurm_ones.show.live import NotSeenYet, counted, read_live
from slurm_ones.show.table import measured, notes


@command
def jobs(
    ids: Annotated[
        list[int] | None, typer.Argument(help="Job ids (default: all elastic jobs).", parser=job_number, metavar="JOB")
    ] = None,
    me: MeOption = False,
    user: UsersOption = "",
    partition: PartitionsOption = "",
    account: AccountsOption = "",
    states: StatesOption = "",
    job: JobsOption = "",
    config: ConfigOption = None,
    database: DatabaseOption = "",
    json: JsonOption = False,
) -> None:
    """Show state, shape, batch, throughput, progress and resizes of the jobs that opted in."""
    selection = selected(me=me, user=user, partition=partition, account=account, states=states, jobs=job)
    settings = settings_of(config, database)
    try:
        store = store_of_reader(settings, named=bool(database))
    except NotSeenYet:
        if json:
            print_json([])
        raise
    live = read_live(store, only=ids or (), whole=True)
    found = [live.shown(one) for one in live.jobs if ids or selection.takes(one)]
    if json:
        print_json([record(JOB, one) for one in found])
    elif found:
        _show(found)
    elif not ids and not selection.restricts:
        console.print("No job has opted in yet: `slurm-ones template` lists batch scripts that do.")
    unknown = sorted({*(ids or ())} - {one.job.job_id for one in found})
    for job_id in unknown:
        said = unknown_job(settings, job_id, store.place, own_only=is_view(settings, store))
        errors.print(f"slurm-ones: {said}", markup=False, soft_wrap=True)
    if unknown:
        raise typer.Exit(1)


def _show(found: list[ShownJob]) -> None:
    columns = [column for column in JOBS if column.name != "strategy" or any(one.job.strategy for one in found)]
    shown, width, left_out = measured(columns, found, console.width if console.is_terminal else None)
    console.print(shown, width=width, crop=False)
    if left_out:
        console.print(f"[dim]too narrow here for {', '.join(left_out)}; --json has all[/]", soft_wrap=True)
    if kept := counted(one.cause for one in found if one.cause):
        console.print(kept, soft_wrap=True)
    for note in notes(found):
        console.print(note, soft_wrap=True)

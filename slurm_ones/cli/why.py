"""`slurm-ones why JOB`: what was decided for a job, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ones_db import StoreError
from slurm_ones.cli.common import (
    ConfigOption,
    DatabaseOption,
    JsonOption,
    command,
    console,
    is_view,
    job_number,
    print_json,
    settings_of,
    store_of_reader,
)
from slurm_ones.cli.unknown import unknown_job
from slurm_ones.show.why import explain, told

if TYPE_CHECKING:
    pass


@command
def why(
    job: Annotated[int, typer.Argument(help="Job id; of a block, such as 4711_3, its job.", parser=job_number)],
    last: Annotated[int, typer.Option(help="Number of decisions to show.")] = 5,
    config: ConfigOption = None,
    database: DatabaseOption = "",
    json: JsonOption = False,
) -> None:
    """Show what was decided for a job and why, and how its resizes went."""
    settings = settings_of(config, database)
    store = store_of_reader(settings, named=bool(database))
    summaries = store.job_summaries([job])
    if not summaries:
        raise StoreError(unknown_job(settings, job, store.place, own_only=is_view(settings, store)))
    (summary,) = summaries
    if json:
        print_json(explain(store, job, last))
        return
    for line in told(store, summary, last):
        console.print(line, soft_wrap=True)

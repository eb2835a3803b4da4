"""`slurm-ones jobs`: the elastic jobs, as the job database has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ones_db import JobSummary, PromiseRecord
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
from slurm_ones.show.live import NotSeenYet, causes, counted, wrong
from slurm_ones.show.table import as_json
from slurm_ones.show.words import deadline
from slurm_ones.text import per_gpu, progress, safe, seconds, shape, troubles

_LEFT = ("job", "name", "user", "state", "shape", "strategy")
"""Columns that begin at the left."""
_LEFT_OUT = (
    "paused",
    "resizes",
    "accuracy",
    "JCT",
    "per GPU",
    "strategy",
    "user",
    "name",
    "samples/s",
    "epochs",
    "batch",
    "shape",
    "state",
)
"""Columns in the order in which they are left out where a terminal is too narrow for all; the job's number never is."""


def _cells(job: JobSummary) -> dict[str, str]:
    return {
        "job": str(job.job_id),
        "name": safe(job.name, 24),
        "user": safe(job.user, 16),
        "state": job.state + (f" ({job.resizing})" if job.resizing else ""),
        "shape": shape(job) or "–",
        "batch": str(job.batch or "–"),
        "per GPU": per_gpu(job),
        "samples/s": f"{job.samples_per_s:.1f}" if job.samples_per_s else "–",
        "strategy": safe(job.strategy, 16) if job.strategy else "–",
        "epochs": progress(job),
        "accuracy": f"{job.accuracy:.3f}" if job.accuracy is not None else "–",
        "resizes": str(job.resizes),
        "paused": seconds(job.pause_s) if job.resizes else "–",
        "JCT": seconds(job.jct_s),
    }


def table(jobs: list[JobSummary], width: int | None = None) -> tuple[Table, int, list[str]]:
    """The table that people read, its width in characters, and the columns that are left out so that it fits `width`;
    None leaves none out."""
    rows = [_cells(job) for job in jobs]
    if not any(job.strategy for job in jobs):
        rows = [{name: text for name, text in row.items() if name != "strategy"} for row in rows]
    widths = {name: max(cell_len(Text.from_markup(row[name]).plain) for row in rows) for name in rows[0]}
    widths = {name: max(most, len(name)) for name, most in widths.items()}
    left_out = []
    for name in _LEFT_OUT:
        if width is None or _width(widths) <= width:
            break
        if widths.pop(name, None) is not None:
            left_out.append(name)
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in widths:
        shown.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(row[name] for name in widths))
    return shown, _width(widths), left_out


def _width(widths: dict[str, int]) -> int:
    """Of a table with such columns, two characters between each."""
    return sum(widths.values()) + 2 * (len(widths) - 1)


def notes(jobs: list[JobSummary], wrong: Mapping[int, str], due: Mapping[int, PromiseRecord]) -> list[str]:
    """What people should know of single jobs, a line each: why one is left alone, what is `wrong` with how it was
    started, what of its reports was odd, what is wrong with its training, and what was said of its deadline (`due`)."""
    texts = [(job, (job.refusal, wrong.get(job.job_id), job.report_note, *troubles(job))) for job in jobs]
    texts += [(job, (deadline(due[job.job_id]),)) for job in jobs if job.job_id in due and job.end_time is None]
    found = [(job.job_id, text) for job, words in texts for text in words if text]
    return [f"job {job_id}: {safe(text, 300)}" for job_id, text in found]


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
    found = [one for one in store.job_summaries(ids or None) if one.job_id in (ids or ()) or selection.takes(one)]
    newest = store.newest_decisions()
    asked = bool(ids) or bool(selection.restricts)
    due = store.promises([one.job_id for one in found])
    _show(found, causes(found, newest), wrong(found, newest), due, json=json, asked=asked)
    unknown = sorted({*(ids or ())} - {job.job_id for job in found})
    for job_id in unknown:
        said = unknown_job(settings, job_id, store.place, own_only=is_view(settings, store))
        errors.print(f"slurm-ones: {said}", markup=False, soft_wrap=True)
    if unknown:
        raise typer.Exit(1)


def _show(
    found: list[JobSummary],
    why: dict[int, str],
    wrong: dict[int, str],
    due: Mapping[int, PromiseRecord],
    *,
    json: bool,
    asked: bool,
) -> None:
    if json:
        said = {job_id: {"deadline": one.deadline, "promised": one.given} for job_id, one in due.items()}
        none = {"deadline": None, "promised": None}
        print_json([{**as_json(job), "cause": why.get(job.job_id), **said.get(job.job_id, none)} for job in found])
    elif found:
        shown, width, left_out = table(found, console.width if console.is_terminal else None)
        console.print(shown, width=width, crop=False)
        if left_out:
            console.print(f"[dim]too narrow here for {', '.join(left_out)}; --json has all[/]", soft_wrap=True)
        if why:
            console.print(counted(why.values()), soft_wrap=True)
        for note in notes(found, wrong, due):
            console.print(note, soft_wrap=True)
    elif not asked:
        console.print("No job has opted in yet: `slurm-ones template` lists batch scripts that do.")

"""`slurm-ones jobs`: the elastic jobs, as the job database has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from ones_db import JobSummary, Store
from slurm_ones.cli.common import (
    ConfigOption,
    DatabaseOption,
    JsonOption,
    command,
    console,
    job_number,
    print_json,
    reading_store,
    settings_of,
)
from slurm_ones.reasons import CAUSES
from slurm_ones.report.text import per_gpu, safe, seconds, troubles

DECISIONS = 10
"""The newest decisions, of one partition each, in which a job's outcome is looked for."""


def as_json(job: JobSummary) -> dict[str, Any]:
    """A job as `--json` prints it."""
    return {**asdict(job), "shape": shape(job), "local_batch": job.local_batch, "jct_s": job.jct_s}


def causes(store: Store, jobs: Iterable[JobSummary]) -> dict[int, str]:
    """Of each job that has not ended why it does not get another size, as a code of `CAUSES`: its refusal, or the
    outcome of the newest decision about it. Jobs of which neither tells are left out."""
    outcomes: dict[int, str] = {}
    for decision in store.recent_decisions(DECISIONS):
        for job in decision.jobs:
            outcomes.setdefault(job.job_id, job.outcome.code)
    found = {job.job_id: job.refusal_code or outcomes.get(job.job_id, "") for job in jobs if job.end_time is None}
    return {job_id: code for job_id, code in found.items() if code in CAUSES}


def counted(codes: Iterable[str]) -> str:
    """How many jobs there are of each cause, most first: `18 jobs: capped by account; 1 job: held by the owner`."""
    counts = Counter(codes)
    shown = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{count} job{'s' * (count != 1)}: {CAUSES[code]}" for code, count in shown)


def shape(job: JobSummary) -> str | None:
    """Its shape while it runs, None while it waits or has ended."""
    return f"{job.nodes}x{job.gpus_per_node}" if job.running and job.nodes else None


def progress(job: JobSummary) -> str:
    """Epochs done, of how many, and how far into the present one."""
    if job.epoch is None:
        return "–"
    part = f" + {100 * job.cursor // job.dataset} %" if job.cursor and job.dataset and job.cursor < job.dataset else ""
    return f"{job.epoch}/{job.epochs}{part}" if job.epochs else f"{job.epoch}{part}"


def table(jobs: list[JobSummary]) -> Table:
    """The table that people read."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    left = ("job", "name", "user", "state", "shape")
    for column in (*left, "batch", "per GPU", "samples/s", "epochs", "accuracy", "resizes", "paused", "JCT"):
        shown.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for job in jobs:
        shown.add_row(
            str(job.job_id),
            safe(job.name, 24),
            safe(job.user, 16),
            job.state + (f" ({job.resizing})" if job.resizing else ""),
            shape(job) or "–",
            str(job.batch or "–"),
            per_gpu(job),
            f"{job.samples_per_s:.1f}" if job.samples_per_s else "–",
            progress(job),
            f"{job.accuracy:.3f}" if job.accuracy is not None else "–",
            str(job.resizes),
            seconds(job.pause_s) if job.resizes else "–",
            seconds(job.jct_s),
        )
    return shown


def notes(jobs: list[JobSummary]) -> list[str]:
    """What people should know of single jobs, a line each: why one is left alone, what of its reports was odd, what
    is wrong with its training."""
    found = [(job.job_id, text) for job in jobs for text in (job.refusal, job.report_note, *troubles(job)) if text]
    return [f"job {job_id}: {safe(text, 300)}" for job_id, text in found]


@command
def jobs(
    ids: Annotated[
        list[int] | None, typer.Argument(help="Job ids (default: all elastic jobs).", parser=job_number, metavar="JOB")
    ] = None,
    config: ConfigOption = None,
    database: DatabaseOption = "",
    json: JsonOption = False,
) -> None:
    """Show state, shape, batch, throughput, progress and resizes of the jobs that opted in."""
    store = reading_store(settings_of(config, database))
    found = store.job_summaries(ids or None)
    why = causes(store, found)
    if json:
        print_json([{**as_json(job), "cause": why.get(job.job_id)} for job in found])
    elif found:
        console.print(table(found))
        if why:
            console.print(counted(why.values()), soft_wrap=True)
        for note in notes(found):
            console.print(note, soft_wrap=True)
    else:
        console.print("No job has opted in yet: `slurm-ones template` lists batch scripts that do.")

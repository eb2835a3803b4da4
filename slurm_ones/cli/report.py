"""Command `slurm-ones report`: GPUs that jobs used, gains and costs of resizing, and advice."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ones_db import StoreError
from slurm_ones.cli.common import (
    JOB_ID,
    TIMES,
    ConfigOption,
    DatabaseOption,
    JsonOption,
    check_outputs,
    command,
    is_view,
    moment,
    print_json,
    say,
    settings_of,
    store_of_reader,
)
from slurm_ones.cli.jobs import slurm_now, unknown_job
from slurm_ones.show.live import as_of
from slurm_ones.show.usage import Usage, advised, of_job, of_jobs, usage
from slurm_ones.simulate import BadInput


@command
def report(
    job: Annotated[int | None, typer.Argument(help="Job id (default: all that the options select).", **JOB_ID)] = None,
    user: Annotated[str, typer.Option("--user", "-u", help="Only jobs of this user.")] = "",
    since: Annotated[str, typer.Option(help=f"Only jobs that had not ended at this time: {TIMES}.")] = "",
    until: Annotated[str, typer.Option(help="Only jobs that were submitted before this time.")] = "",
    html: Annotated[
        Path | None, typer.Option(help="Also write a page to this file, which needs no other file and no network.")
    ] = None,
    config: ConfigOption = None,
    database: DatabaseOption = "",
    json: JsonOption = False,
) -> None:
    """Report the GPUs that jobs used, what resizing gained and cost, and what to do better."""
    if job is not None and (user or since or until):
        raise BadInput("give either a job id or --user, --since and --until, not both")
    check_outputs(None, html)
    settings = settings_of(config, database)
    begin, end = moment(since, "--since") if since else None, moment(until, "--until") if until else None
    with store_of_reader(settings, named=bool(database)) as store:
        found = usage(store, job_id=job, user=user, since=begin, until=end)
        if job is not None and not found:
            raise StoreError(unknown_job(settings, job, store))
        if user and not found and is_view(settings, store):
            raise StoreError(f"jobs of {user} cannot be seen here: this site shows each user only their own jobs")
        found = found[-1:] if job is not None else found
        alive = [one.job.job_id for one in found if one.job.end_time is None]
        slurm = slurm_now(settings, store.job_summaries(alive) if alive else [])
        now = {job_id: one.first.state.value for job_id, one in slurm.items()}
        found = [replace(one, job=replace(one.job, state=now.get(one.job.job_id, one.job.state))) for one in found]
        told, seen = advised(store, found), as_of(store.health(), time.time(), asked=bool(now))
    title = f"Job {job}" if job is not None else _title(user, since, until)
    texts = [of_job(one, told[one.job.job_id]) for one in found]
    totals = of_jobs(found, title)
    if json:
        print_json([{**_plain(one), "advice": told[one.job.job_id]} for one in found])
    else:
        for line in texts[0] if job is not None else [*totals, *_counted(told)]:
            say(line)
        if job is None or alive:
            say(f"  {seen}")
    if html is not None:
        # Reports without a page need no Jinja2.
        from slurm_ones.show.pages import write_usage

        write_usage(html, title, [] if job is not None else totals, list(zip(found, texts, strict=True)))


def _title(user: str, since: str, until: str) -> str:
    parts = [f"of {user}" if user else "", f"since {since}" if since else "", f"until {until}" if until else ""]
    return " ".join(["Jobs", *filter(None, parts)]) if any(parts) else "All jobs"


def _counted(told: dict[int, list[str]]) -> list[str]:
    jobs = [str(job_id) for job_id, texts in told.items() if texts]
    if not jobs:
        return []
    more = f" and {len(jobs) - 10} more" if len(jobs) > 10 else ""
    return [f"  advice     for {len(jobs)} of them (slurm-ones report JOB): {', '.join(jobs[:10])}{more}"]


def _plain(one: Usage) -> dict[str, Any]:
    found = asdict(one) | {"time": time.time()}
    found["gpus_over_time"] = found.pop("stretches")
    return found

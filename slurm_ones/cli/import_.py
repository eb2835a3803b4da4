"""Commands `slurm-ones import …`, which read a site's past from other sources into the job database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.progress import Progress, TimeRemainingColumn

from ones_db import Imported, Store
from slurm_ones.cli.common import (
    ConfigOption,
    DatabaseOption,
    JsonOption,
    bars,
    command,
    complain,
    own_store,
    print_json,
    record_action,
    say,
    settings_of,
    span,
)
from slurm_ones.jobs.past_jobs import PastJobs
from slurm_ones.learn.workload import PastWorkload, workload
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.workloads.formats import STEP, days, sacct_rows
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.sacct import AccountingRow, Rejected, Sacct
from slurm_ones.text import minute, seconds

app = typer.Typer(add_completion=False, help="Import the past from other sources.", no_args_is_help=True)

SINCE = "90d"
"""Default of the option `--since`."""
AT_ONCE = 500
"""Number of jobs stored in one transaction; few, so that the companion never waits long for the database."""
SHOWN, MOST_BAD = 20, 10_000
"""Largest numbers of bad rows that are printed, and that are kept in memory."""

LEARNED = (
    "These jobs are used in the figures above and in the views, but not for predictions: accounting has neither "
    "throughput nor loss."
)


@dataclass
class Read:
    """Result of an import."""

    stored: Imported = field(default_factory=Imported)
    rows: int = 0
    bad: dict[tuple[str, str], str] = field(default_factory=dict)
    """One message for each distinct bad row, by (reason, beginning of the row)."""
    left: int = 0
    """Number of requeued jobs that have not ended yet."""
    first: float = inf
    last: float = -inf
    """Latest submission in Unix seconds; `first` is the earliest."""


class AccountingPiece(NamedTuple):
    """Accounting rows that are read together, of one day or one file."""

    rows: Iterable[AccountingRow | Rejected]
    end: float
    """Unix time before which every ended run is in this piece or in an earlier one."""
    place: str
    """Text that says where a bad row is; `{}` becomes the row's number."""


def pieces_of(sacct: Sacct, since: float, until: float) -> Iterator[AccountingPiece]:
    """Yield the accounting of each day from `since` to `until`."""
    for start, end in days(since, until):
        # A job that ends in the last second of the last piece ended before now.
        by = end if end < until else end + 1.0
        yield AccountingPiece(sacct.rows(start, end), by, f"row {{}} of sacct from {minute(start)} on")


def bring(pieces: Sequence[AccountingPiece], store: Store, shown: Progress) -> Read:
    """Read the pieces of accounting in order, and store the jobs that have ended."""
    read, past = Read(), PastJobs(lambda array: bool(store.jobs([array]) and store.blocks(array)))
    task = shown.add_task("accounting", total=len(pieces))
    for piece in pieces:
        good: list[AccountingRow] = []
        for row in piece.rows:
            if isinstance(row, Rejected) and row.why == STEP:
                continue
            read.rows += 1
            if isinstance(row, AccountingRow):
                good.append(row)
                read.first, read.last = min(read.first, row.submit), max(read.last, row.submit)
            elif len(read.bad) < MOST_BAD:
                read.bad.setdefault((row.why, row.text), f"{piece.place.format(row.row)}: {row.why}: {row.text}")
        ended = iter(past.take(good, piece.end))
        while some := list(islice(ended, AT_ONCE)):
            read.stored = read.stored.plus(store.add_accounting(some))
        shown.update(task, advance=1, description=f"accounting, {read.rows} rows")
    read.left = past.open
    return read


@app.callback()
def _imports() -> None:
    pass


@app.command()
@command
def sacct(
    file: Annotated[
        Path | None, typer.Argument(help="sacct --parsable2 with header, from any machine (default: run sacct).")
    ] = None,
    since: Annotated[str, typer.Option(help=f"Start: 2026-01-31, or an age such as 30d (default: {SINCE}).")] = "",
    until: Annotated[str, typer.Option(help="End (default: now).")] = "",
    cluster: Annotated[
        str, typer.Option(help="Import this other cluster of the same accounting, under its name (default: this one).")
    ] = "",
    config: ConfigOption = None,
    database: DatabaseOption = "",
    json: JsonOption = False,
) -> None:
    """Read Slurm's accounting, so that a new site knows its own arrival rate and run times.

    All jobs that have ended are read, of all users whose jobs you may see. The command may be repeated. Jobs that are
    stored already, or that the companion has seen, stay as they are. Rows that cannot be right are listed, not stored.
    """
    settings, (began, ended) = settings_of(config, database), span(since or SINCE, until)
    if file is not None and (since or until):
        raise BadInput(f"--since and --until are for sacct; {file} is read as a whole")
    own = cluster or (settings.cluster if file is not None else "")
    own = own or CommandClient(timeout_s=settings.timeout_s).config().get("ClusterName", "")
    if file is not None:
        pieces = [AccountingPiece(sacct_rows(file, cluster=cluster, local=True), inf, f"{file.name}: line {{}}")]
    else:
        pieces = list(pieces_of(Sacct(own), began, ended))
    with own_store(settings, cluster or settings.cluster or own) as store:
        with bars(TimeRemainingColumn()) as shown:
            read = bring(pieces, store, shown)
        if read.stored.new or read.stored.changed:
            counts = f"{read.stored.new} jobs new, {read.stored.changed} changed"
            record_action(store, "import sacct", f"{file.name if file else f'since {since or SINCE}'}: {counts}")
        if file is not None:
            began, ended = read.first, read.last
        found = workload(store.past_jobs(began, ended + 1.0))
    for line in islice(read.bad.values(), SHOWN):
        complain(line)
    if len(read.bad) > SHOWN:
        complain(f"and {len(read.bad) - SHOWN} more bad rows")
    if json:
        counts_of = {**read.stored._asdict(), "rows": read.rows, "bad_rows": len(read.bad), "requeued": read.left}
        print_json({"imported": counts_of, "workload": found})
    else:
        for line in [summary(read), *(described(found) if found else [])]:
            say(line)


def summary(read: Read) -> str:
    """Return a sentence about the result of an import."""
    done, bad = read.stored, f", {len(read.bad)} of them bad" if read.bad else ""
    return (
        f"{read.rows} rows{bad}: {done.new} jobs new, {done.changed} changed, {done.same} unchanged, "
        f"{done.companion} that the companion has seen; {read.left} were requeued and have not ended"
    )


def described(work: PastWorkload) -> list[str]:
    """Return lines that describe the imported jobs: arrivals, run times, waiting times and GPUs."""
    kind = "jobs with GPUs" if work.gpu_jobs else "jobs"
    lines = [
        f"submitted from {minute(work.first)} to {minute(work.last)}: {work.jobs} jobs, {work.gpu_jobs} with GPUs ("
        + ", ".join(f"{count} {state}" for state, count in work.states.items())
        + ")",
        f"arrivals: {work.per_hour:.2f} {kind} an hour, most ({work.busiest_per_hour:.2f}) at {work.busiest_hour} h",
    ]
    if work.run_s is not None and work.wait_s is not None:
        lines.append(
            f"run time: median {seconds(work.run_s.median)}, nine in ten within {seconds(work.run_s.most)}; "
            f"waiting: {seconds(work.wait_s.median)}, {seconds(work.wait_s.most)}; {work.restarted} ran several times"
        )
    if (gpus := work.gpus) is not None:
        hours = f"{work.gpu_hours:.1f} GPU-hours"
        lines.append(f"GPUs: median {gpus.median:.0f}, nine in ten at most {gpus.most:.0f}; {hours}")
    else:
        lines.append("GPUs: none. If jobs had GPUs, accounting does not count them: set AccountingStorageTRES=gres/gpu")
    lines += [
        f"  {one.user}'s {one.name}: {one.jobs} jobs, median {seconds(one.run_s.median)} on {one.gpus.median:.0f} GPUs"
        for one in work.namesakes
    ]
    return [*lines, LEARNED]

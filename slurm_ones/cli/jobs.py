"""Commands `slurm-ones jobs`, `top` and `why`, which show elastic jobs in the job database."""

from __future__ import annotations

import getpass
import json as json_lib
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from ones_db import JobSummary, Store, StoreError
from ones_wrapper.protocol.choices import listed, near
from ones_wrapper.protocol.optin import BadComment, parse_comment
from slurm_ones.cli.common import (
    JOB_ID,
    ConfigOption,
    DatabaseOption,
    JobArgument,
    JsonOption,
    command,
    complain,
    console,
    is_terminal,
    is_view,
    job_number,
    print_json,
    settings_of,
    store_of_reader,
    tick_s,
)
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, WholeJob, arrays, whole_job
from slurm_ones.show.columns import CODES, JOB, JOBS, TOP, ShownJob, record
from slurm_ones.show.live import Live, NotSeenYet, as_of, counted, read_live
from slurm_ones.show.table import BY_WORD, JobFilter, JobOrder, as_json, lines, measured, notes, takes
from slurm_ones.show.why import explain, why_lines
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.command import MOST_NAMED, CommandClient
from slurm_ones.slurm.connect import connect
from slurm_ones.slurm.model import JobState, SlurmJob
from slurm_ones.slurm.parse import parse_jobs
from slurm_ones.text import plain

MeOption = Annotated[bool, typer.Option("--me", help="Only your own jobs.")]
UsersOption = Annotated[str, typer.Option("--user", "-u", help="Jobs of these users: names, separated by commas.")]
PartitionsOption = Annotated[str, typer.Option("--partition", "-p", help="Jobs in these partitions.")]
AccountsOption = Annotated[str, typer.Option("--account", "-A", help="Jobs that are charged to these accounts.")]
StatesOption = Annotated[str, typer.Option("--states", "-t", help="Jobs in these states: PD,R, COMPLETED, or all.")]
JobsOption = Annotated[str, typer.Option("--job", "-j", help="These jobs: ids, separated by commas.")]


def selected(
    *, me: bool = False, user: str = "", partition: str = "", account: str = "", states: str = "", jobs: str = ""
) -> JobFilter:
    """Return the filter that a command's options describe. Raises `typer.BadParameter` for an unknown word."""
    wanted: JobFilter = {
        "user": _words(user) | ({getpass.getuser()} if me else frozenset()),
        "partition": _words(partition),
        "account": _words(account),
        "state": _states(states),
        "job_id": frozenset(map(job_number, _words(jobs))),
    }
    return {name: values for name, values in wanted.items() if values}


def _words(text: str) -> frozenset[str]:
    return frozenset(word for part in text.split(",") if (word := part.strip()))


def _states(text: str) -> frozenset[str]:
    words = frozenset(word.upper() for word in _words(text))
    if "ALL" in words:
        return frozenset()
    names = frozenset(CODES.get(word, word) for word in words)
    known = {state.value for state in JobState}
    for name in sorted(names - known):
        codes = f"{', '.join(CODES)} or their long names{near(name, known)}"
        raise typer.BadParameter(f"{plain(name, 40)!r} is no state of a job: {codes}")
    return names


@command
def jobs(
    ids: Annotated[list[int] | None, typer.Argument(help="Job ids (default: all elastic jobs).", **JOB_ID)] = None,
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
    if ids and selection:
        raise BadInput("give either job ids or options that select jobs, not both")
    settings = settings_of(config, database)
    try:
        store = store_of_reader(settings, named=bool(database))
    except NotSeenYet:
        if json:
            print_json([])
        raise
    live = read_live(store, only=ids or (), whole=True)
    live = _in_states(live, slurm_now(settings, _alive(live)))
    found = [one for one in live.jobs if takes(selection, one.job)]
    if json:
        print_json([record(JOB, one) for one in found])
    elif found:
        _show(found)
        console.print(f"[dim]{as_of(live.health, time.time(), asked=live.asked)}[/]", soft_wrap=True)
    elif not ids and not selection:
        console.print("No job has opted in yet: `slurm-ones template` lists batch scripts that do.")
    unknown = sorted({*(ids or ())} - {one.job.job_id for one in found})
    for job_id in unknown:
        complain(unknown_job(settings, job_id, store))
    if unknown:
        raise typer.Exit(1)


def _alive(live: Live) -> list[JobSummary]:
    return [one.job for one in live.jobs if one.job.end_time is None]


def _in_states(live: Live, slurm: Mapping[int, WholeJob]) -> Live:
    """Return the jobs, with state and shape from Slurm for those that are in `slurm`."""
    jobs = []
    for one in live.jobs:
        job = _as_in(slurm, one.job)
        # The reason that is known is one for the other state.
        jobs.append(replace(one, job=job) if job.state == one.job.state else ShownJob(job, promise=one.promise))
    return replace(live, jobs=tuple(jobs), asked=bool(slurm))


def _as_in(slurm: Mapping[int, WholeJob], job: JobSummary) -> JobSummary:
    """Return the job with its state and shape from Slurm, if it is in `slurm`.

    A running job of blocks keeps its reported shape, since a block that Slurm runs may not train yet.
    """
    now = slurm.get(job.job_id)
    if now is None or (now.by_blocks and now.running and job.running):
        return job
    each, whole_nodes = job.shape.gpus_per_node if job.shape else 0, not now.first.gpus_per_node
    shape = Elastic(now, None, each, whole_nodes).shape
    known = shape if now.running and shape.gpus else job.shape
    speed = job.samples_per_s if job.shape == known else None  # it was measured at that shape
    return replace(job, state=now.first.state.value, running=now.running, shape=known, samples_per_s=speed)


def _show(found: list[ShownJob]) -> None:
    columns = [column for column in JOBS if column.name != "strategy" or any(one.job.strategy for one in found)]
    shown, width, left_out = measured(columns, found, console.width if console.is_terminal else None)
    console.print(shown, width=width, crop=False)
    if left_out:
        narrow = f"the terminal is too narrow for {', '.join(left_out)}; --json has all columns"
        console.print(f"[dim]{narrow}[/]", soft_wrap=True)
    if kept := counted(one.cause for one in found if one.cause):
        console.print(kept, soft_wrap=True)
    for note in notes(found):
        console.print(note, soft_wrap=True)


def reader(settings: Settings, *, named: bool, also: Collection[int] = ()) -> Callable[[], Live]:
    """Return a function that reads the jobs `also`, those that have not ended, and those that ended last.

    Each call opens the database, since its file may have been replaced. Slurm is asked at most every `STATES_S`
    seconds; its answer is used until the companion's next tick.
    """
    asked, slurm = -math.inf, dict[int, WholeJob]()

    def look() -> Live:
        nonlocal asked, slurm
        with store_of_reader(settings, named=named) as store:
            live = read_live(store, also)
        if abs(time.time() - asked) >= STATES_S:
            asked, slurm = time.time(), slurm_now(settings, _alive(live))
        tick = live.health.tick_time if live.health is not None else None
        return _in_states(live, slurm if tick is None or tick < asked else {})

    return look


@command
def top(
    me: MeOption = False,
    user: UsersOption = "",
    partition: PartitionsOption = "",
    account: AccountsOption = "",
    states: StatesOption = "",
    job: JobsOption = "",
    sort: Annotated[str, typer.Option("--sort", "-S", help="Column to sort by; -COLUMN: largest first.")] = "job",
    every: Annotated[float, typer.Option(help="Seconds between two reads of the database.", min=0.5)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, and end.")] = False,
    config: ConfigOption = None,
    database: DatabaseOption = "",
    json: JsonOption = False,
) -> None:
    """Show elastic jobs live. For a selected job, show the reason for its size, its log, or its nodes."""
    name = sort.removeprefix("-")
    if name not in BY_WORD:
        raise typer.BadParameter(f"{plain(name, 40)!r} is no column: {listed((column.title for column in TOP), name)}")
    selection = selected(me=me, user=user, partition=partition, account=account, states=states, jobs=job)
    choice = JobOrder(selection, bool(states or job), name, sort.startswith("-"))
    settings = settings_of(config, database)
    look = reader(settings, named=bool(database), also=selection.get("job_id", ()))
    if json:
        live = look()
        print_json(as_json(live, choice.jobs(live)))
    elif once or not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        for line in lines(look(), time.time(), choice, console.width):
            console.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)
    else:
        from slurm_ones.show.window import TopApp

        # What is wrong is reported at once, not in a window that closes again.
        look()
        TopApp(settings, look, lambda: store_of_reader(settings, named=bool(database)), choice, every).run()


@command
def why(
    job: JobArgument,
    last: Annotated[int, typer.Option(min=1, help="Number of decisions to show.")] = 5,
    config: ConfigOption = None,
    database: DatabaseOption = "",
    json: JsonOption = False,
) -> None:
    """Show what was decided for a job and why, and how its resizes went."""
    settings = settings_of(config, database)
    store = store_of_reader(settings, named=bool(database))
    summaries = store.job_summaries([job])
    if not summaries:
        raise StoreError(unknown_job(settings, job, store))
    (summary,) = summaries
    if json:
        print_json(explain(store, job, last))
        return
    slurm = slurm_now(settings, [summary] if summary.end_time is None else [])
    for line in why_lines(store, _as_in(slurm, summary), last):
        console.print(line, soft_wrap=True)
    console.print(f"[dim]{as_of(store.health(), time.time(), asked=bool(slurm))}[/]", soft_wrap=True)


def slurm_now(settings: Settings, jobs: Sequence[JobSummary]) -> dict[int, WholeJob]:
    """Return these jobs as Slurm shows them now, by job id, without those that it does not show within `ASK_S`."""
    question = ["squeue", "--json", "--states=all", f"--jobs={','.join(str(job.job_id) for job in jobs[-MOST_NAMED:])}"]
    try:
        text = CommandClient(timeout_s=min(settings.timeout_s, ASK_S)).run(question) if jobs else "{}"
        found = parse_jobs(json_lib.loads(text))
    except (ValueError, SlurmError):
        return {}
    whole = {job_id: WholeJob.of(job) for job_id, job in found.items()}
    whole |= {array: whole_job(array, records) for array, records in arrays(found.values()).items()}
    # A database of another cluster has other jobs by these ids.
    return {job.job_id: whole[job.job_id] for job in jobs if job.job_id in whole and whole[job.job_id].user == job.user}


ASK_S = 3.0
"""Longest time, in seconds, that a command waits for Slurm's answer."""
STATES_S = 30.0
"""Seconds between two queries of `top` to Slurm."""

HOW = '#SBATCH --comment="ones: gpus=1-16"'


def unknown_job(settings: Settings, job_id: int, store: Store) -> str:
    """Return a sentence that says why a job is not in the database. It asks Slurm once."""
    own_only = is_view(settings, store)
    head = f"job {job_id} is not {'among your jobs there' if own_only else f'in the database {store.place}'}"
    try:
        job = connect(settings).details([job_id]).get(job_id)
    except SlurmError:
        return f"{head}, and Slurm cannot be asked: it has not opted in ({HOW}), or the companion has not seen it"
    return f"{head}: {_why(job, settings, own_only, tick_s(settings, store))}"


def _why(job: SlurmJob | None, settings: Settings, own_only: bool, every_s: float) -> str:
    if job is None:
        also = ", or it is another user's" if own_only else ""
        return (
            "Slurm does not know it. It never existed, or it has ended: it had not opted in "
            f"({HOW}), no companion saw it, or its rows were removed since{also}"
        )
    user = getpass.getuser()
    if job.user != user and own_only:
        return f"it belongs to {plain(job.user, 40)}, and each user sees only their own jobs"
    if job.user != user and settings.scope == "own":
        return f"it belongs to {plain(job.user, 40)}, and this companion acts only on {user}'s own jobs"
    try:
        opted_in = parse_comment(job.comment) is not None
    except BadComment:
        opted_in = True
    if opted_in:
        ended = "it has ended before a companion saw it" if job.ended else "the companion has not seen it yet"
        return f"{ended}, and looks every {every_s:.0f} s: is it running? (slurm-ones status)"
    comment = f"its comment is {plain(job.comment, 80)!r}" if job.comment else "it has no comment"
    return f"it has not opted in: {comment} ({HOW})"

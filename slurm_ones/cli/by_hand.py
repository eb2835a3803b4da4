"""Commands with which owners change their jobs' sizes: `resize`, `pin`, `release`, `guests`, `estimate`, `rehearse`.

`resize` and `pin` write the size into the job's comment (`size=8`), where the companion reads it; `release` removes it.
Every site lets owners change their jobs' comments. The remaining commands need no companion. `guests` moves a job's
waiting blocks to the guests' queue. `estimate` asks Slurm when a similar job would start. `rehearse` makes a job write
a checkpoint and restart at its present size, and reads from its reports how long that took.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, NamedTuple

import typer

from ones_db import ReportLine, StoreError
from ones_db.rows import flat
from ones_db.shape import Shape
from ones_wrapper.protocol import LOOK_SIGNAL, Checkpoint, First, Hello, Order, Throughput
from ones_wrapper.protocol.optin import MAX_GPUS, BadComment, OptIn, parse_comment, with_size
from ones_wrapper.protocol.slurm_commands import requeue_command
from ones_wrapper.protocol.standing import ORDER as STANDING
from ones_wrapper.protocol.standing import StandingGuests, is_companions
from slurm_ones.act.orders import OrderError, OrderWriter
from slurm_ones.cli.common import (
    JobArgument,
    JsonOption,
    command,
    console,
    ended_by_signals,
    grid,
    print_json,
    say,
    settings_of,
    store_of_reader,
)
from slurm_ones.cli.status import of_companion
from slurm_ones.config import ConfigError
from slurm_ones.jobs.elastic import WholeJob, arrays, whole_job
from slurm_ones.jobs.other_companion import OtherCompanion
from slurm_ones.jobs.reports import JobDirectories, read_reports
from slurm_ones.service import wake
from slurm_ones.show.live import NotSeenYet, read_live
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import Refused, SlurmError, UnknownJob
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.model import SlurmJob

POLL_S = 2.0
SHOWN_S = 30.0
"""Seconds between two lines of progress."""
WAKES_S = wake.GAP_S + 2 * wake.LOOK_S + 1
"""Longest time, in seconds, from waking the companion to its tick; it takes longer if it was woken often."""

SizeArgument = Annotated[str, typer.Argument(metavar="SIZE", help="GPUs, such as 8, or nodes × GPUs, such as 2x4.")]


def gpus_of(size: str) -> int:
    """Return the number of GPUs in a size that a user wrote. Raises `BadInput`."""
    nodes, gpus = shape_of(size)
    return (nodes or 1) * gpus


def shape_of(size: str) -> tuple[int, int]:
    """Return (nodes, GPUs per node) of a size that a user wrote; (0, N) for a number N. Raises `BadInput`."""
    match = re.fullmatch(r"(?:([0-9]{1,5})[x×])?([0-9]{1,6})", size.strip())
    if match is None or not 1 <= int(match[1] or 1) * int(match[2]) <= MAX_GPUS:
        raise BadInput(f"{size!r} is no size: write GPUs, such as 8, or nodes x GPUs of each, such as 2x4")
    return int(match[1] or 0), int(match[2])


def look(client: CommandClient, job_id: int) -> WholeJob:
    """Return the job, read from Slurm now. Raises `BadInput` if Slurm does not know it, and `SlurmError`."""
    tasks: Sequence[SlurmJob] = ()
    with suppress(SlurmError):
        tasks = client.tasks(job_id)
    found = arrays(tasks)
    if job_id in found:
        return whole_job(job_id, found[job_id])
    try:
        return WholeJob.of(client.job(job_id))
    except UnknownJob:
        problem = "Slurm does not know it: it never existed, or it ended some time ago (see squeue --me)"
        raise BadInput(f"job {job_id}: {problem}") from None


def _whole_node(job: WholeJob) -> int:
    with suppress(ConfigError):
        return settings_of(None).whole_node_gpus.get(job.home.partition, 0)
    return 0


def _gpus_now(job: WholeJob) -> int:
    return job.gpus or (_whole_node(job) * len(job.node_list) if job.running_blocks else 0)


def opted_in(job: WholeJob) -> OptIn:
    """Return the opt-in in the job's comment. Raises `BadInput` if the job cannot be resized."""
    try:
        optin = parse_comment(job.home.comment)
    except BadComment as error:
        raise BadInput(f"job {job.job_id}: its comment is not understood: {error}") from None
    if optin is None:
        wanted = f"scontrol update JobId={job.job_id} Comment='ones: gpus=1-16'"
        raise BadInput(f"job {job.job_id} did not opt in, so nothing resizes it: allow sizes by {wanted}")
    if not optin.resize:
        raise BadInput(f"job {job.job_id} has resize=off in its comment: remove it first")
    if job.ended:
        raise BadInput(f"job {job.job_id} is {job.first.state.value}: it has ended")
    return optin


def ask(client: CommandClient, job: WholeJob, gpus: int | None) -> None:
    """Write a size into the job's comment; None removes it. Raises `BadInput` if it is forbidden, and `SlurmError`."""
    opted_in(job)
    comment = with_size(job.home.comment, gpus)
    try:
        parse_comment(comment)
    except BadComment as error:
        raise BadInput(f"job {job.job_id}: {error}; change the range in its comment first") from None
    if comment != job.home.comment:
        client.run(["scontrol", "update", f"JobId={job.job_id}", f"Comment={comment}"])


def _why(job_id: int, asked: float) -> str:
    """Return the reason for the job's size if there was a tick after the Unix time `asked`; else an empty text."""
    try:
        with store_of_reader(settings_of(None)) as store:
            live = read_live(store, only=[job_id])
    except (ConfigError, NotSeenYet, StoreError):
        return ""
    seen = live.health is not None and (live.health.tick_time or 0.0) > asked
    return live.jobs[0].why if seen and live.jobs else ""


def next_look() -> str:
    """Wake the companion, and return a sentence that says when its next tick is."""
    woken = False
    try:
        settings = settings_of(None)
        woken = wake.wake(settings)
        with store_of_reader(settings) as store:
            now, leader, last = time.time(), store.leader(), store.health()
    except (ConfigError, NotSeenYet, StoreError):
        return "the companion's state is unknown; if none runs here (slurm-ones status), nothing resizes the job"
    if problems := of_companion(now, leader, last):
        return f"nothing resizes the job now: {problems[0]}"
    assert last is not None
    if last.tick_time is None:
        return f"the companion has just started, and looks within {last.interval_s:.0f} s"
    due_s = max(last.tick_time + last.interval_s - now, 0.0)
    if due_s > WAKES_S and woken:
        return f"the companion was woken: it looks within {WAKES_S:.0f} s, or in {due_s:.0f} s if it was woken often"
    return f"the companion looks in {due_s:.0f} s"


@command
@ended_by_signals()
def resize(
    job: JobArgument,
    size: SizeArgument,
    timeout: Annotated[float, typer.Option(help="Seconds after which the request is withdrawn.")] = 600.0,
) -> None:
    """Give a job this size. Wait until it has it; then the companion chooses its size again."""
    client, gpus = CommandClient(), gpus_of(size)
    now = look(client, job)
    if pinned := opted_in(now).size:
        raise BadInput(
            f"job {job} is pinned to {pinned} GPUs: pin it to {size} (slurm-ones pin {job} {size}), or run "
            f"slurm-ones release {job} first"
        )
    ask(client, now, gpus)
    asked = time.time()
    begun = shown = time.monotonic()
    try:
        console.print(f"job {job}: asked for {gpus} GPUs; it has {_gpus_now(now)}. Ctrl-C withdraws the request.")
        console.print(f"job {job}: {next_look()}", soft_wrap=True)
        while _gpus_now(now) != gpus:
            if time.monotonic() - begun > timeout:
                raise BadInput(
                    f"job {job}: it has {_gpus_now(now)} GPUs after {timeout:.0f} s, and the request was withdrawn: "
                    f"see slurm-ones why {job}"
                )
            if time.monotonic() - shown > SHOWN_S:
                shown = time.monotonic()
                why = _why(job, asked)
                state = now.first.state.value.lower()
                say(f"{shown - begun:5.0f} s: {state}, {_gpus_now(now)} GPUs{why and f': {why}'}")
            time.sleep(POLL_S)
            now = look(client, job)
            if now.ended:
                raise BadInput(f"job {job}: it ended ({now.first.state.value}) before it was resized")
    except KeyboardInterrupt:
        raise BadInput(f"job {job}: the request was withdrawn; it has {_gpus_now(now)} GPUs") from None
    finally:
        if not now.ended:
            _take_back(client, job)
    console.print(f"job {job}: {gpus} GPUs after {time.monotonic() - begun:.0f} s")


def _take_back(client: CommandClient, job: int) -> None:
    try:
        ask(client, look(client, job), None)
    except SlurmError as error:
        raise BadInput(f"job {job}: the request was not withdrawn: {error}: run slurm-ones release {job}") from None


@command
def pin(
    job: JobArgument,
    size: Annotated[str, typer.Argument(metavar="[SIZE]", help="GPUs, or nodes × GPUs (default: as now).")] = "",
) -> None:
    """Keep a job at a size until `slurm-ones release`."""
    client = CommandClient()
    now = look(client, job)
    if not size and not _gpus_now(now):
        raise BadInput(f"job {job} does not run: give a size, such as slurm-ones pin {job} 4")
    gpus = gpus_of(size) if size else _gpus_now(now)
    ask(client, now, gpus)
    console.print(f"job {job}: stays at {gpus} GPUs until slurm-ones release {job}")
    console.print(f"job {job}: {next_look()}", soft_wrap=True)


@command
def release(job: JobArgument) -> None:
    """Let the companion choose a job's size again."""
    client = CommandClient()
    ask(client, look(client, job), None)
    console.print(f"job {job}: the companion chooses its size again; {next_look()}", soft_wrap=True)


@command
def guests(job: JobArgument) -> None:
    """Move the waiting blocks of your job to the queue that its comment names (guests=partition:NAME).

    They start there, and join the job. If compute nodes have Slurm's commands, `ones-run` does this itself.
    """
    client = CommandClient()
    whole = look(client, job)
    if whole.uid != os.geteuid():
        raise BadInput(f"job {job} is {whole.user}'s: only its owner can move its blocks")
    if not (whole.by_blocks and whole.running):
        raise BadInput(f"job {job} is not a running job of blocks, and guests join only such a job")
    orders = OrderWriter(client, None, time.time)
    other = OtherCompanion(os.geteuid(), JobDirectories(None).hello, time.time).refusal(whole)
    if other is not None or is_companions(orders.last_number(whole)):
        raise BadInput(f"job {job}: a companion decides about its guests already, by the companion's settings")

    def run(argv: list[str]) -> tuple[str, str]:
        try:
            return client.run(argv), ""
        except SlurmError as error:
            return "", str(error)

    def order(tasks: tuple[int, ...]) -> str:
        with suppress(OrderError):
            if not orders.last_number(whole):
                orders.write(whole, Order(STANDING, 0, blocks=tasks))
            return ""
        return "the order cannot be written into the job's directory"

    shape = whole.home.nodes, whole.home.gpus_per_node
    if not StandingGuests(job, shape, run, order, console.print, time.time).look():
        raise BadInput(f"job {job}: its comment names no queue for guests, or allows no more GPUs")


_START = re.compile(r"to start at (\S+)")


class Wait(NamedTuple):
    """Slurm's estimate of how long a new job of one shape would wait."""

    shape: Shape
    wait_s: float | None
    """Seconds until the job would start; None if Slurm does not say."""
    note: str = ""


def start_of(answer: str) -> float | None:
    """Return the start time in the output of `sbatch --test-only`, in Unix seconds; None without one."""
    match = _START.search(answer)
    if match is None:
        return None
    try:
        return float(match[1]) if match[1].isdecimal() else datetime.fromisoformat(match[1]).timestamp()
    except ValueError:
        return None


def test_command(job: WholeJob, shape: Shape) -> list[str]:
    """Return the command that asks Slurm when a similar job of another shape would start. It submits nothing."""
    home = job.home
    kind = f"{home.kind}:" if home.kind and home.of_one_kind else ""
    argv = ["sbatch", "--test-only", f"--partition={','.join(home.partitions)}", f"--nodes={shape.nodes}"]
    argv += [f"--gres=gpu:{kind}{shape.gpus_per_node}"] if home.gpus_per_node else []
    named = {"account": home.account, "qos": home.qos, "reservation": home.reservation}
    argv += [f"--{option}={name}" for option, name in named.items() if name]
    argv += [f"--time={max(int(home.time_limit_s // 60), 1)}"] if home.time_limit_s else []
    return [*argv, "--wrap=true"]


def wait_of(client: CommandClient, job: WholeJob, shape: Shape) -> Wait:
    """Return Slurm's estimate for a similar job of this shape."""
    try:
        start = start_of(client.run(test_command(job, shape), said=True))
    except SlurmError as error:
        return Wait(shape, None, str(error).partition(": ")[2])
    return Wait(shape, None, "Slurm does not say") if start is None else Wait(shape, max(start - time.time(), 0.0))


@command
def estimate(
    job: JobArgument,
    sizes: Annotated[list[str], typer.Argument(metavar="SIZE…", help="GPUs, such as 8, or nodes × GPUs, such as 2x4.")],
    as_json: JsonOption = False,
) -> None:
    """Ask Slurm when a job like this one would start at other sizes. No job is submitted.

    A resize by requeue would wait about as long. With blocks, the job trains on while the new blocks wait.
    """
    client = CommandClient()
    now = look(client, job)
    opted_in(now)
    each = _whole_node(now) or client.snapshot().gpus_of_node.get(now.home.partition, 0) or 1
    asked = map(shape_of, sizes)
    shapes = [Shape(nodes or -(-gpus // each), gpus if nodes else min(gpus, each)) for nodes, gpus in asked]
    found = [wait_of(client, now, shape) for shape in shapes]
    if as_json:
        listed = [{"gpus": one.shape.gpus, **flat(one)} for one in found]
        print_json({"job": job, "gpus": _gpus_now(now), "sizes": listed})
        return
    table = grid("GPUs", "shape", "would start", right=("GPUs",))
    for one in found:
        when = one.note if one.wait_s is None else "now" if one.wait_s < 1 else f"in {one.wait_s:.0f} s"
        table.add_row(str(one.shape.gpus), str(one.shape), when)
    console.print(table)


REPORTS_S = 0.2
LOOK_S = 1.0
"""Seconds between two queries to Slurm."""


BILL = {
    "checkpoint_s": "checkpoint",
    "end_s": "the run ends",
    "queue_s": "queue",
    "launch_s": "launch, with imports",
    "import_s": "  imports",
    "group_s": "process group",
    "load_s": "checkpoint loaded",
    "first_step_s": "first step",
    "standstill_s": "pause of training",
}
"""Phases of a checkpoint and restart, with their titles. The checkpoint is timed from the order. The launch lasts from
the batch script's start to the ranks' first report. The pause lasts from the last step's end to the next step's end."""


class OwnReports:
    """Reader of a job's reports, for a command that the job's owner calls."""

    def __init__(self) -> None:
        self._lines: dict[int, list[ReportLine]] = {}
        self._at: dict[int, tuple[int, int]] = {}

    def of(self, job: WholeJob, restart: int) -> list[ReportLine]:
        """Return all reports so far of the run with this restart count. Raises `BadInput` if they cannot be read."""
        offset, number = self._at.get(restart, (0, 0))
        found, _ = read_reports(job, restart, offset, number, now=time.time())
        lines = self._lines.setdefault(restart, [])
        lines += found.lines
        self._at[restart] = (found.offset, max(found.number or 0, number))
        return lines


def _wait(what: str, seconds: float, holds: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise BadInput(f"{what} did not come within {seconds:.0f} s; the job continues without this command")
        time.sleep(REPORTS_S)


def rehearsed(client: CommandClient, job: WholeJob, timeout_s: float, say: Callable[[str], None]) -> dict[str, float]:
    """Make the job write a checkpoint and restart. Return the seconds of each phase in `BILL`, and the bytes written.

    Raises `BadInput` if the job writes no checkpoint or does not restart, and `SlurmError`.
    """
    reports, before = OwnReports(), job.restart
    orders = OrderWriter(client, None, time.time)
    number = orders.next_number(job)
    ordered = time.time()
    try:
        orders.write(job, Order(number, before, drain=True))
    except OrderError as error:
        raise BadInput(f"job {job.job_id}: {error}") from None
    client.signal(job.key, LOOK_SIGNAL)
    say("ordered a checkpoint")

    def checkpoints() -> list[tuple[float, int]]:
        made = ((line.time, line.report) for line in reports.of(job, before))
        return [(at, one.bytes) for at, one in made if isinstance(one, Checkpoint) and one.order == number]

    _wait("the checkpoint", timeout_s, lambda: bool(checkpoints()))
    saved, size = checkpoints()[0]
    say(f"checkpoint of {size / 1e6:.1f} MB is durable; requeueing")
    client.run(requeue_command(job.key, hold=False))
    now, asked = job, 0.0

    def refresh() -> WholeJob:
        nonlocal now, asked
        if time.monotonic() - asked > LOOK_S:
            now, asked = WholeJob.of(client.job(job.key)), time.monotonic()
            if now.ended:
                raise BadInput(f"job {job.job_id} has ended ({now.first.state.value}): see slurm-ones why {job.job_id}")
        return now

    _wait("the requeue", timeout_s, lambda: refresh().restart > before)
    waiting = time.time()
    if now.pending:
        # Slurm may let a requeued job wait for a minute or two; it may also have started it meanwhile.
        with suppress(Refused):
            client.release(job.key)
    say("in the queue")

    def started(*kinds: type[Hello | First | Throughput]) -> ReportLine | None:
        lines = reports.of(refresh(), before + 1) if refresh().restart > before else []
        return next((line for line in lines if isinstance(line.report, kinds)), None)

    _wait("the new run's first report", timeout_s, lambda: started(Hello) is not None)
    say("the ranks have started")
    _wait("the new run's first step", timeout_s, lambda: started(First, Throughput) is not None)
    hello, first = started(Hello), started(First, Throughput)
    assert hello is not None and first is not None and isinstance(hello.report, Hello)
    trained = [line.time for line in reports.of(job, before) if isinstance(line.report, Throughput)]
    last = max((at for at in trained if at <= saved), default=ordered)
    return {
        "checkpoint_s": saved - ordered,
        "bytes": size,
        "end_s": max(waiting - saved, 0.0),
        "queue_s": max(now.start_time - waiting, 0.0),
        **{name: getattr(hello.report, name) for name in ("launch_s", "import_s", "group_s", "load_s")},
        "first_step_s": first.time - hello.time,
        "standstill_s": first.time - last,
    }


@command
def rehearse(
    job: JobArgument,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each part.")] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Try one checkpoint and restart of a running job at its present size, and print how long each part takes."""
    client = CommandClient()
    now = look(client, job)
    opted_in(now)
    if now.by_blocks:
        raise BadInput(f"job {job} is made of blocks, which change while it trains: see slurm-ones resize {job} N")
    if not now.running:
        raise BadInput(f"job {job} is {now.first.state.value}: only a running job can be rehearsed")
    if now.uid != os.geteuid():
        raise BadInput(f"job {job} is {now.user}'s: only its owner can rehearse it")
    if not now.first.requeue:
        raise BadInput(f"job {job} cannot be requeued: run scontrol update JobId={job} Requeue=1")
    begun = time.monotonic()

    def say(text: str) -> None:
        if not as_json:
            console.print(f"{time.monotonic() - begun:6.1f} s  {text}", markup=False)

    try:
        bill = rehearsed(client, now, timeout, say)
    except KeyboardInterrupt:
        raise BadInput(f"job {job}: interrupted; the job continues from its checkpoint without this command") from None
    except SlurmError as error:
        raise BadInput(f"job {job} continues without this command: {error}") from None
    if as_json:
        print_json({"job": job, **bill})
        return
    for part, name in BILL.items():
        console.print(f"{name:21} {bill[part]:8.2f} s")

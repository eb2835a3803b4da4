"""`slurm-ones rehearse`: what a resize would cost a job, by one checkpoint and restart at the size that it has.

No companion is needed: the job's owner orders the checkpoint, requeues the job, and reads what it reports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.table import Table

from ones_db import ReportLine
from ones_wrapper.protocol import LOOK_SIGNAL, Checkpoint, First, Hello, Order, Throughput
from slurm_ones.act.orders import OrderError, last_number, write_order
from slurm_ones.cli.by_hand import JobArgument, look, opted_in
from slurm_ones.cli.common import JsonOption, command, console, job_number, print_json
from slurm_ones.observe.report_reader import read_reports
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import Refused, SlurmError
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.model import Job

POLL_S = 0.2
LOOK_S = 1.0
"""Between two questions to Slurm."""


@dataclass(frozen=True)
class Bill:
    """What one checkpoint and restart cost, in seconds."""

    checkpoint_s: float
    """From the order until the checkpoint was durable."""
    bytes: int
    end_s: float
    """From there until Slurm had ended the run."""
    queue_s: float
    """In the queue."""
    launch_s: float
    """From the batch script to the ranks' first line, imports included."""
    import_s: float
    """What imports took of that."""
    group_s: float
    load_s: float
    first_step_s: float
    standstill_s: float
    """From the last step before to the end of the first step after."""


class Reports:
    """The reports of a job's runs, as its owner reads them."""

    def __init__(self) -> None:
        self._lines: dict[int, list[ReportLine]] = {}
        self._at: dict[int, tuple[int, int]] = {}

    def of(self, job: Job, restart: int) -> list[ReportLine]:
        """All of a run so far. Raises `BadInput` where they cannot be read."""
        offset, number = self._at.get(restart, (0, 0))
        found = read_reports(job, restart, offset, number, now=time.time())
        lines = self._lines.setdefault(restart, [])
        lines += found.lines
        self._at[restart] = (found.offset, max(found.last, number))
        return lines


def _wait(what: str, seconds: float, holds: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise BadInput(f"{what} did not come within {seconds:.0f} s; the job is left to itself and goes on")
        time.sleep(POLL_S)


def rehearsed(client: CommandClient, job: Job, timeout_s: float, say: Callable[[str], None]) -> Bill:
    """Carry it out. Raises `BadInput` where the job does not take part, `SlurmError` where Slurm does not."""
    reports, before = Reports(), job.restart
    number = max(round(time.time() * 1000), last_number(job, None) + 1)
    ordered = time.time()
    try:
        write_order(job, Order(number, before, drain=True), None)
    except OrderError as error:
        raise BadInput(f"job {job.job_id}: {error}") from None
    client.signal(job.key, LOOK_SIGNAL)
    say("ordered a checkpoint")

    def checkpoint() -> ReportLine | None:
        made = (line for line in reports.of(job, before) if isinstance(line.report, Checkpoint))
        return next(
            (line for line in made if isinstance(line.report, Checkpoint) and line.report.order == number), None
        )

    _wait("the checkpoint", timeout_s, lambda: checkpoint() is not None)
    saved = checkpoint()
    assert saved is not None and isinstance(saved.report, Checkpoint)
    say(f"checkpoint of {saved.report.bytes / 1e6:.1f} MB is durable; requeueing")
    client.run(["scontrol", "requeue", str(job.key)])
    now, asked = job, 0.0

    def refresh() -> Job:
        nonlocal now, asked
        if time.monotonic() - asked > LOOK_S:
            now, asked = client.job(job.key), time.monotonic()
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
    say("the ranks are there")
    _wait("the new run's first step", timeout_s, lambda: started(First, Throughput) is not None)
    hello, first = started(Hello), started(First, Throughput)
    assert hello is not None and first is not None and isinstance(hello.report, Hello)
    trained = [line.time for line in reports.of(job, before) if isinstance(line.report, Throughput)]
    last = max((time_ for time_ in trained if time_ <= saved.time), default=ordered)
    told = hello.report
    return Bill(
        checkpoint_s=saved.time - ordered,
        bytes=saved.report.bytes,
        end_s=max(waiting - saved.time, 0.0),
        queue_s=max(now.start_time - waiting, 0.0),
        launch_s=told.launch_s,
        import_s=told.import_s,
        group_s=told.group_s,
        load_s=told.load_s,
        first_step_s=first.time - hello.time,
        standstill_s=first.time - last,
    )


_ROWS = (
    ("checkpoint", "checkpoint_s"),
    ("the run ends", "end_s"),
    ("queue", "queue_s"),
    ("launch, with imports", "launch_s"),
    ("  imports", "import_s"),
    ("process group", "group_s"),
    ("checkpoint loaded", "load_s"),
    ("first step", "first_step_s"),
    ("training stood still", "standstill_s"),
)


@command
def rehearse(
    job: JobArgument,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each part.")] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Try a resize: one checkpoint and restart of a running job at the size that it has, and the bill."""
    client, job_id = CommandClient(), job_number(job)
    now = look(client, job_id)
    opted_in(now)
    if now.array_id:
        raise BadInput(
            f"job {job_id} is made of blocks, which change while it trains: see slurm-ones resize {job_id} N"
        )
    if not now.running:
        raise BadInput(f"job {job_id} is {now.state.value}: only a running job can be rehearsed")
    if now.uid != os.geteuid():
        raise BadInput(f"job {job_id} is {now.user}'s: only its owner can rehearse it")
    if not now.requeue:
        raise BadInput(f"job {job_id} cannot be requeued: run scontrol update JobId={job_id} Requeue=1")
    begun = time.monotonic()

    def say(text: str) -> None:
        if not as_json:
            console.print(f"{time.monotonic() - begun:6.1f} s  {text}", markup=False)

    try:
        bill = rehearsed(client, now, timeout, say)
    except KeyboardInterrupt:
        raise BadInput(f"job {job_id}: it is left to itself and goes on from its checkpoint") from None
    except SlurmError as error:
        raise BadInput(f"job {job_id} is left to itself and goes on: {error}") from None
    if as_json:
        print_json({"job": job_id, **asdict(bill)})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, field in _ROWS:
        table.add_row(name, f"{getattr(bill, field):.2f} s")
    console.print(table)

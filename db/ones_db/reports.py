"""What runs reported, each row keyed by the number of its report, so that replaying a file changes
nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, func, select

from ones_db.jobs import JOBS, RUNS, key_of, newest
from ones_db.models import Base
from ones_db.records import (
    BatchRecord,
    ByeRecord,
    CheckpointRecord,
    EpochRecord,
    HelloRecord,
    ThroughputRecord,
)
from ones_db.upsert import add_new

THROUGHPUT: Table = Base.metadata.tables["throughput"]
EPOCHS: Table = Base.metadata.tables["epochs"]
CHECKPOINTS: Table = Base.metadata.tables["checkpoints"]
BATCHES: Table = Base.metadata.tables["batch_changes"]

AnyReport = HelloRecord | ThroughputRecord | EpochRecord | CheckpointRecord | BatchRecord | ByeRecord


@dataclass(frozen=True)
class Reports:
    """The reports of one run that were read in one look, each kind in the order of its numbers."""

    hello: HelloRecord | None = None
    throughput: Sequence[ThroughputRecord] = ()
    epochs: Sequence[EpochRecord] = ()
    checkpoints: Sequence[CheckpointRecord] = ()
    batches: Sequence[BatchRecord] = ()
    bye: ByeRecord | None = None

    def all(self) -> list[AnyReport]:
        ends = [report for report in (self.hello, self.bye) if report is not None]
        return [*self.throughput, *self.epochs, *self.checkpoints, *self.batches, *ends]


def add_reports(
    connection: Connection,
    cluster: int,
    job_id: int,
    restart: int,
    reports: Reports,
    offset: int,
    number: int | None,
) -> None:
    run = _run(connection, cluster, job_id, restart, reports)
    for table, records in (
        (THROUGHPUT, reports.throughput),
        (EPOCHS, reports.epochs),
        (CHECKPOINTS, reports.checkpoints),
        (BATCHES, reports.batches),
    ):
        add_new(connection, table, [{**vars(record), "run_id": run["id"]} for record in records])
    after = {
        "report_offset": max(run["report_offset"], offset),
        "report_number": max(run["report_number"], number or 0),
        **_reached(run, reports),
        **_words(run, reports),
    }
    if any(run[name] != value for name, value in after.items()):
        connection.execute(RUNS.update().where(RUNS.c.id == run["id"]).values(after))


def _run(connection: Connection, cluster: int, job_id: int, restart: int, reports: Reports) -> Mapping[Any, Any]:
    """The row of the run, made where no snapshot saw the run (it was too short, or the companion was
    away)."""
    job = key_of(connection, cluster, job_id)
    query = select(RUNS).where(RUNS.c.job_id == job, RUNS.c.restart == restart)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        start = min((report.time for report in reports.all()), default=None)
        empty = {"nodes": 0, "gpus_per_node": 0, "report_offset": 0, "report_number": 0}
        connection.execute(RUNS.insert().values(job_id=job, restart=restart, start_time=start, **empty))
        row = connection.execute(query).mappings().one()
    return row


def _reached(run: Mapping[Any, Any], reports: Reports) -> dict[str, Any]:
    """How far the run has come. Within a run the position only grows; the next may begin further back."""
    after: dict[str, Any] = {}
    places = [(report.epoch, report.cursor) for report in reports.throughput]
    places += [(report.epoch, report.cursor) for report in reports.checkpoints]
    places += [(report.epoch + 1, 0) for report in reports.epochs]
    if reports.hello is not None:
        places.append((reports.hello.epoch, reports.hello.cursor))
    if places:
        after["epoch"], after["cursor"] = max([(run["epoch"] or 0, run["cursor"] or 0), *places])
    times = [report.time for report in reports.all()]
    if times:
        after["report_time"] = max([run["report_time"] or 0.0, *times])
    steps = [report.step for report in reports.all()]
    if steps:
        after["step"] = max([run["step"] or 0, *steps])
    losses = [report.loss for report in reports.throughput] + [report.loss for report in reports.epochs]
    if run["first_loss"] is None:
        after["first_loss"] = next((loss for loss in losses if loss is not None), None)
    return after


def _words(run: Mapping[Any, Any], reports: Reports) -> dict[str, Any]:
    """What the run said of itself in its first and last report."""
    after: dict[str, Any] = {}
    hello, bye = reports.hello, reports.bye
    if hello is not None:
        names = ("batch", "lr_factor", "checkpoint", "launch_s", "group_s", "load_s")
        after |= {name: getattr(hello, name) for name in names} | {"hello_time": hello.time}
        # Slurm's word on the shape comes first.
        after |= {name: run[name] or getattr(hello, name) for name in ("nodes", "gpus_per_node")}
    if bye is not None:
        after |= {"end_reason": bye.reason, "exit_code": bye.exit_code}
    note = run["note"] or ""
    for report in (hello, bye):
        if report is not None and report.note not in note:
            note = f"{note}; {report.note}" if note else report.note
    return after | {"note": note or None}


def report_position(connection: Connection, cluster: int, job_id: int, restart: int) -> tuple[int, int]:
    query = (
        select(RUNS.c.report_offset, RUNS.c.report_number)
        .join(JOBS, JOBS.c.id == RUNS.c.job_id)
        .where(newest(cluster), JOBS.c.job_id == job_id, RUNS.c.restart == restart)
    )
    row = connection.execute(query).one_or_none()
    return (row[0], row[1]) if row else (0, 0)


def checkpoint_for_order(
    connection: Connection, cluster: int, job_id: int, restart: int, order: int
) -> CheckpointRecord | None:
    query = (
        select(CHECKPOINTS)
        .join(RUNS, RUNS.c.id == CHECKPOINTS.c.run_id)
        .where(
            RUNS.c.job_id == key_of(connection, cluster, job_id),
            RUNS.c.restart == restart,
            CHECKPOINTS.c.order_number == order,
        )
        .order_by(CHECKPOINTS.c.number.desc())
        .limit(1)
    )
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        return None
    return CheckpointRecord(**{name: row[name] for name in CheckpointRecord.__dataclass_fields__})


def pause_after(connection: Connection, cluster: int, job_id: int, restart: int) -> float | None:
    job = key_of(connection, cluster, job_id)
    spoke = select(RUNS).where(RUNS.c.job_id == job, RUNS.c.hello_time.is_not(None))
    after = spoke.where(RUNS.c.restart > restart).order_by(RUNS.c.restart).limit(1)
    before = spoke.where(RUNS.c.restart <= restart).order_by(RUNS.c.restart.desc()).limit(1)
    new = connection.execute(after).mappings().one_or_none()
    if new is None:
        return None
    old = connection.execute(before).mappings().one_or_none()
    stopped = _last_step(connection, old) if old is not None else new["start_time"]
    return float(max(0.0, new["hello_time"] - stopped))


def _last_step(connection: Connection, run: Mapping[Any, Any]) -> float:
    """When the run's last known step ended. A checkpoint begins at a step's end; a drained job then only waits."""
    times: list[float | None] = [
        connection.scalar(select(func.max(time)).where(table.c.run_id == run["id"]))
        for table, time in (
            (THROUGHPUT, THROUGHPUT.c.time),
            (EPOCHS, EPOCHS.c.time),
            (CHECKPOINTS, CHECKPOINTS.c.time - CHECKPOINTS.c.seconds),
        )
    ]
    return max([time for time in times if time is not None], default=float(run["hello_time"]))

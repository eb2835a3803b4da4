"""What runs reported, each row keyed by the number of its report, so that replaying a file changes
nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Table, bindparam, func, select

from ones_db.jobs import JOBS, RUNS, among, key_of, known, newest
from ones_db.models import Base
from ones_db.records import CheckpointRecord, RunReports, SpecRecord
from ones_db.upsert import add_new

THROUGHPUT: Table = Base.metadata.tables["throughput"]
EPOCHS: Table = Base.metadata.tables["epochs"]
CHECKPOINTS: Table = Base.metadata.tables["checkpoints"]
BATCHES: Table = Base.metadata.tables["batch_changes"]

Row = Mapping[Any, Any]

_SPEC = tuple(SpecRecord.__dataclass_fields__)
_TOLD = (
    "nodes",
    "gpus_per_node",
    "batch",
    "lr_factor",
    "checkpoint",
    "launch_s",
    "group_s",
    "load_s",
    "end_reason",
    "exit_code",
    "note",
    "epoch",
    "cursor",
    "step",
    "first_loss",
    "hello_time",
    "report_time",
    "report_offset",
    "report_number",
    "noise",
    "progress",
)
"""Columns of a run that its reports decide."""


def add_reports(connection: Connection, cluster: int, told: Sequence[RunReports]) -> None:
    jobs = _jobs(connection, cluster, {reports.job_id for reports in told})
    _set_specs(connection, jobs, {reports.job_id: reports.spec for reports in told if reports.spec is not None})
    # A spec alone does not make a run: the job may be waiting.
    told = [reports for reports in told if reports.offset > 0 or reports.all()]
    runs = _runs(connection, jobs, told)
    tables: dict[str, list[dict[str, Any]]] = {"throughput": [], "epochs": [], "checkpoints": [], "batches": []}
    changed = []
    for reports in told:
        run = runs[jobs[reports.job_id]["id"], reports.restart]
        # Numbers rise within a run: what is not above the last one is stored already, or not believed.
        new: dict[str, Any] = {
            name: [r for r in getattr(reports, name) if r.number > run["report_number"]] for name in tables
        }
        for name, records in new.items():
            tables[name] += [{**vars(record), "run_id": run["id"]} for record in records]
        after = _after(run, replace(reports, **new))
        if any(run[name] != value for name, value in after.items()):
            changed.append({**{name: run[name] for name in _TOLD}, **after, "key": run["id"]})
    for table, name in ((THROUGHPUT, "throughput"), (EPOCHS, "epochs"), (CHECKPOINTS, "checkpoints")):
        add_new(connection, table, tables[name])
    add_new(connection, BATCHES, tables["batches"])
    if changed:
        update = RUNS.update().where(RUNS.c.id == bindparam("key"))
        connection.execute(update.values({name: bindparam(name) for name in _TOLD}), changed)


def _jobs(connection: Connection, cluster: int, job_ids: Collection[int]) -> dict[int, Row]:
    """The key and the spec of the newest submission with each job id; raises `UnknownRecord`."""
    query = select(JOBS.c.job_id, JOBS.c.id, *(JOBS.c[name] for name in _SPEC))
    query = query.where(newest(cluster), among(JOBS.c.job_id, job_ids))
    return known({row["job_id"]: row for row in connection.execute(query).mappings()}, job_ids)


def _set_specs(connection: Connection, jobs: Mapping[int, Row], specs: Mapping[int, SpecRecord]) -> None:
    rows = [
        {**vars(spec), "key": jobs[job_id]["id"]}
        for job_id, spec in specs.items()
        if any(jobs[job_id][name] != value for name, value in vars(spec).items())
    ]
    if rows:
        update = JOBS.update().where(JOBS.c.id == bindparam("key"))
        connection.execute(update.values({name: bindparam(name) for name in _SPEC}), rows)


def _runs(connection: Connection, jobs: Mapping[int, Row], told: Sequence[RunReports]) -> dict[tuple[int, int], Row]:
    """The rows of the runs, made where no snapshot saw the run (it was too short, or the companion was
    away)."""
    asked = {(jobs[reports.job_id]["id"], reports.restart): reports for reports in told}
    query = select(RUNS).where(
        among(RUNS.c.job_id, {job for job, _ in asked}), among(RUNS.c.restart, {restart for _, restart in asked})
    )

    def found() -> dict[tuple[int, int], Row]:
        return {(row["job_id"], row["restart"]): row for row in connection.execute(query).mappings()}

    runs = found()
    missing = [
        {
            "job_id": job,
            "restart": restart,
            "start_time": min((report.time for report in reports.all()), default=None),
            "nodes": 0,
            "gpus_per_node": 0,
            "report_offset": 0,
            "report_number": 0,
        }
        for (job, restart), reports in asked.items()
        if (job, restart) not in runs
    ]
    if missing:
        connection.execute(RUNS.insert(), missing)
        runs = found()
    return runs


def _after(run: Row, reports: RunReports) -> dict[str, Any]:
    """What the run's row says once the reports are stored."""
    numbers = [report.number for report in reports.all()]
    return {
        "report_offset": max(run["report_offset"], reports.offset),
        "report_number": max([run["report_number"], reports.number or 0, *numbers]),
        **_reached(run, reports),
        **_words(run, reports),
    }


def _reached(run: Row, reports: RunReports) -> dict[str, Any]:
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
    hello = () if reports.hello is None or reports.hello.number <= run["report_number"] else (reports.hello,)
    for report in (*hello, *reports.throughput):
        after |= {name: value for name in ("noise", "progress") if (value := getattr(report, name)) is not None}
    return after


def _words(run: Row, reports: RunReports) -> dict[str, Any]:
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


def report_positions(
    connection: Connection, cluster: int, job_ids: Collection[int]
) -> dict[tuple[int, int], tuple[int, int]]:
    query = (
        select(JOBS.c.job_id, RUNS.c.restart, RUNS.c.report_offset, RUNS.c.report_number)
        .join(JOBS, JOBS.c.id == RUNS.c.job_id)
        .where(newest(cluster), among(JOBS.c.job_id, job_ids))
        .where(RUNS.c.report_offset > 0, RUNS.c.restart >= JOBS.c.restart - 1)
    )
    return {(job_id, restart): (offset, number) for job_id, restart, offset, number in connection.execute(query)}


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

"""What runs reported, each row keyed by the number of its report, so that replaying a file changes
nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, bindparam, func, select

from ones_db.engine import add_new, add_rows
from ones_db.jobs import among, key_of, known, newest
from ones_db.records import CheckpointRecord, EpochRecord, HelloRecord, RunReports, SpecRecord, ThroughputRecord
from ones_db.tables import BATCHES, CHECKPOINTS, EPOCHS, JOBS, RUNS, THROUGHPUT

Row = Mapping[Any, Any]

_sample, _epoch = (attrgetter(*(c.name for c in table.columns if c.name != "run_id")) for table in (THROUGHPUT, EPOCHS))
"""The columns of a report in their tables' order, but the first."""

MOST = 2**53
"""No count grows beyond this, whatever a job says."""
MAX_NOTE = 4_000
"""Characters kept of what a run says in words; the newest."""

_SPEC = tuple(SpecRecord.__dataclass_fields__)
_HELLO = (
    "batch",
    "lr_factor",
    "checkpoint",
    "queue_s",
    "launch_s",
    "import_s",
    "group_s",
    "load_s",
    "resizes",
)
"""Columns of a run that each hello says anew."""
_MANY = ("throughput", "epochs", "checkpoints", "batches")
_ONCE = ("hello", "first", "bye")
"""Reports that are stored in the run's row alone."""


def add_reports(connection: Connection, cluster: int, told: Sequence[RunReports]) -> None:
    jobs = _jobs(connection, cluster, {reports.job_id for reports in told})
    _set_specs(connection, jobs, {reports.job_id: reports.spec for reports in told if reports.spec is not None})
    # A spec alone does not make a run: the job may be waiting.
    told = [reports for reports in told if reports.offset > 0 or reports.all()]
    runs = _runs(connection, jobs, told)
    samples: list[tuple[Any, ...]] = []
    epochs: list[tuple[Any, ...]] = []
    checkpoints: list[dict[str, Any]] = []
    batches: list[dict[str, Any]] = []
    changed: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for reports in told:
        run = runs[jobs[reports.job_id]["id"], reports.restart]
        new, key = _new(reports, run["report_number"]), run["id"]
        samples += [(key, *_sample(record)) for record in new.throughput]
        epochs += [(key, *_epoch(record)) for record in new.epochs]
        checkpoints += [{**vars(record), "run_id": key} for record in new.checkpoints]
        batches += [{**vars(record), "run_id": key} for record in new.batches]
        after = {name: value for name, value in _after(run, new).items() if run[name] != value}
        changed[tuple(after)].append({**after, "key": key})
    add_rows(connection, THROUGHPUT, samples)
    add_rows(connection, EPOCHS, epochs)
    add_new(connection, CHECKPOINTS, checkpoints)
    add_new(connection, BATCHES, batches)
    for names, rows in changed.items():
        if names:
            update = RUNS.update().where(RUNS.c.id == bindparam("key"))
            connection.execute(update.values({name: bindparam(name) for name in names}), rows)


def _new(reports: RunReports, seen: int) -> RunReports:
    """Numbers rise within a run: what is not above the last one is stored already, or not believed."""
    found: dict[str, Any] = {name: [r for r in getattr(reports, name) if r.number > seen] for name in _MANY}
    for name in _ONCE:
        report = getattr(reports, name)
        found[name] = report if report is not None and report.number > seen else None
    same = all(len(found[name]) == len(getattr(reports, name)) for name in _MANY)
    if same and all(found[name] is getattr(reports, name) for name in _ONCE):
        return reports
    return replace(reports, **found)


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
    """What the run's row says once these reports, all of them new, are stored."""
    numbers = [report.number for report in reports.last()]
    return {
        "report_offset": max(run["report_offset"], reports.offset),
        "report_number": max([run["report_number"], reports.number or 0, *numbers]),
        **_reached(run, reports),
        **_measured(run, reports),
        **_words(run, reports),
    }


def _reached(run: Row, reports: RunReports) -> dict[str, Any]:
    """How far the run has come. The position only grows, so that the last report of each kind tells it; but a start of
    the ranks goes on where its checkpoint was taken."""
    after: dict[str, Any] = {}
    begun = reports.hello
    last = [report for report in reports.last() if begun is None or report.number >= begun.number]
    places = []
    for report in last:
        if isinstance(report, EpochRecord):
            places.append((report.epoch + 1, 0))
        elif isinstance(report, (HelloRecord, ThroughputRecord, CheckpointRecord)):
            places.append((report.epoch, report.cursor))
    if places:
        before = [] if begun is not None else [(run["epoch"] or 0, run["cursor"] or 0)]
        after["epoch"], after["cursor"] = max([*before, *places])
    if last:
        after["report_time"] = max([run["report_time"] or 0.0, *(report.time for report in last)])
        after["step"] = max([0 if begun is not None else run["step"] or 0, *(report.step for report in last)])
    return after


def _measured(run: Row, reports: RunReports) -> dict[str, Any]:
    """What the run found of its losses and gradients."""
    after: dict[str, Any] = {}
    if run["first_loss"] is None:
        losses = chain((r.loss for r in reports.throughput), (r.loss for r in reports.epochs))
        after["first_loss"] = next((loss for loss in losses if loss is not None), None)
    said: Sequence[HelloRecord | ThroughputRecord] = reports.throughput
    if reports.hello is not None:
        said = sorted([*said, reports.hello], key=lambda report: report.number)
    for name in ("noise", "progress"):
        newest = next((value for report in reversed(said) if (value := getattr(report, name)) is not None), None)
        if newest is not None:
            after[name] = newest
    odd = [report for report in reports.throughput if report.nonfinite]
    if odd:
        after["nonfinite"] = min((run["nonfinite"] or 0) + sum(report.nonfinite for report in odd), MOST)
        after["nonfinite_step"] = odd[-1].step
    return after


def _words(run: Row, reports: RunReports) -> dict[str, Any]:
    """What the run said of itself at its starts and its end."""
    after: dict[str, Any] = {}
    hello, first, bye = reports.hello, reports.first, reports.bye
    if (hello, first, bye) == (None, None, None):
        return after
    since = hello.number if hello is not None else 0
    if hello is not None:
        after |= {name: getattr(hello, name) for name in _HELLO}
        after |= {"hello_number": hello.number, "first_step_s": None}
        if run["hello_time"] is None:
            after["hello_time"] = hello.time if reports.begun is None else reports.begun
        after["attempts"] = max(run["attempts"] or 0, hello.attempt)
        # Slurm's word on the shape comes first.
        after |= {name: run[name] or getattr(hello, name) for name in ("nodes", "gpus_per_node")}
        if run["end_time"] is None:
            # The ranks ended before, and were started again.
            after |= {"end_reason": None, "exit_code": None}
    if first is not None and first.number > since:
        after["first_step_s"] = first.seconds
    if bye is not None and bye.number > since:
        after |= {"end_reason": bye.reason, "exit_code": bye.exit_code}
    note = run["note"] or ""
    for report in (hello, bye):
        if report is not None and report.note not in note:
            note = f"{note}; {report.note}"[-MAX_NOTE:] if note else report.note
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

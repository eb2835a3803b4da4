"""What learning needs of many jobs, in a number of queries that does not depend on how many they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from ones_db.jobs import JOBS, RUNS, among, job_record, newest, run_end, spec_record
from ones_db.records import RESIZE_DONE, EpochPoint, JobHistory, SpecRecord, ThroughputPoint
from ones_db.reports import BATCHES, EPOCHS, THROUGHPUT
from ones_db.resizes import RESIZES

Row = Mapping[Any, Any]


def histories(connection: Connection, cluster: int, job_ids: Sequence[int] | None, last: int) -> dict[int, JobHistory]:
    query = select(JOBS).where(newest(cluster)).order_by(JOBS.c.submit_time, JOBS.c.job_id)
    if job_ids is None:
        query = query.where(JOBS.c.elastic, JOBS.c.end_time.is_(None))
    else:
        query = query.where(among(JOBS.c.job_id, job_ids))
    return {history.job.job_id: history for history in _of(connection, query, last)}


def finished_histories(connection: Connection, cluster: int, limit: int, last: int) -> list[JobHistory]:
    trained = select(EPOCHS.c.run_id).join(RUNS, RUNS.c.id == EPOCHS.c.run_id).where(RUNS.c.job_id == JOBS.c.id)
    query = (
        select(JOBS)
        .where(JOBS.c.cluster_id == cluster, JOBS.c.end_time.is_not(None), JOBS.c.state == "COMPLETED")
        .where(JOBS.c.elastic, trained.exists())
        .order_by(JOBS.c.end_time.desc(), JOBS.c.id.desc())
        .limit(limit)
    )
    return _of(connection, query, last)


def _of(connection: Connection, query: Any, last: int) -> list[JobHistory]:
    jobs = connection.execute(query).mappings().all()
    keys = [row["id"] for row in jobs]
    if not keys:
        return []
    runs = _runs(connection, keys)
    epochs = _epochs(connection, keys)
    throughput = _throughput(connection, keys, last)
    resizes = _resizes(connection, keys)
    return [
        _history(row, runs[row["id"]], epochs[row["id"]], throughput[row["id"]], resizes[row["id"]]) for row in jobs
    ]


def _runs(connection: Connection, keys: Sequence[int]) -> dict[int, list[Row]]:
    """The runs of each job in order, each with its end and with the global batch last in force."""
    changed = (
        select(BATCHES.c.batch)
        .where(BATCHES.c.run_id == RUNS.c.id)
        .order_by(BATCHES.c.number.desc())
        .limit(1)
        .scalar_subquery()
    )
    query = (
        select(RUNS, func.coalesce(changed, RUNS.c.batch).label("batch_now"), run_end().label("ended"))
        .join(JOBS, JOBS.c.id == RUNS.c.job_id)
        .where(among(RUNS.c.job_id, keys))
        .order_by(RUNS.c.job_id, RUNS.c.restart)
    )
    return _by_job(connection, query)


def _epochs(connection: Connection, keys: Sequence[int]) -> dict[int, list[Row]]:
    query = (
        select(EPOCHS, RUNS.c.job_id, RUNS.c.restart)
        .join(RUNS, RUNS.c.id == EPOCHS.c.run_id)
        .where(among(RUNS.c.job_id, keys))
        .order_by(RUNS.c.job_id, RUNS.c.restart, EPOCHS.c.number)
    )
    return _by_job(connection, query)


def _throughput(connection: Connection, keys: Sequence[int], last: int) -> dict[int, list[Row]]:
    """The newest `last` samples of each job, shape and batch, oldest first."""
    kind = (RUNS.c.job_id, RUNS.c.nodes, RUNS.c.gpus_per_node, THROUGHPUT.c.batch)
    age = func.row_number().over(partition_by=kind, order_by=(RUNS.c.restart.desc(), THROUGHPUT.c.number.desc()))
    speed = THROUGHPUT.c.samples / THROUGHPUT.c.seconds
    ranked = (
        select(*kind, speed.label("samples_per_s"), THROUGHPUT.c.time, age.label("age"))
        .join(RUNS, RUNS.c.id == THROUGHPUT.c.run_id)
        .where(among(RUNS.c.job_id, keys), THROUGHPUT.c.seconds > 0, RUNS.c.nodes * RUNS.c.gpus_per_node > 0)
        .subquery()
    )
    query = select(ranked).where(ranked.c.age <= last).order_by(ranked.c.job_id, ranked.c.time, ranked.c.age.desc())
    return _by_job(connection, query)


def _resizes(connection: Connection, keys: Sequence[int]) -> dict[int, list[Row]]:
    """The resizes of each job that ended, in the order in which they did."""
    query = (
        select(RESIZES.c.job_id, RESIZES.c.state, RESIZES.c.ended)
        .where(among(RESIZES.c.job_id, keys), RESIZES.c.ended.is_not(None))
        .order_by(RESIZES.c.ended, RESIZES.c.id)
    )
    return _by_job(connection, query)


def _by_job(connection: Connection, query: Any) -> dict[int, list[Row]]:
    rows: dict[int, list[Row]] = defaultdict(list)
    for row in connection.execute(query).mappings():
        rows[row["job_id"]].append(row)
    return rows


def _history(
    row: Row, runs: Sequence[Row], epoch_rows: Sequence[Row], throughput: Sequence[Row], resizes: Sequence[Row]
) -> JobHistory:
    job, spec = job_record(row), spec_record(row)
    epoch, cursor = next(((run["epoch"], run["cursor"]) for run in reversed(runs) if run["epoch"] is not None), (0, 0))
    # Later runs come last and overwrite what they did anew; beyond the position, a lost checkpoint undid it.
    latest = {point["epoch"]: point for point in epoch_rows if point["epoch"] < epoch}
    epochs = tuple(
        EpochPoint(point["epoch"], point["loss"], point["accuracy"], point["time"], point["restart"])
        for _, point in sorted(latest.items())
    )
    changed = resizes[-1]["ended"] if resizes else None
    done = [number for number, resize in enumerate(resizes, 1) if resize["state"] == RESIZE_DONE]
    started = [run for run in runs if run["start_time"] is not None]
    return JobHistory(
        job=job,
        spec=spec,
        epochs=epochs,
        throughput=tuple(ThroughputPoint(*(sample[name] for name in ThroughputPoint._fields)) for sample in throughput),
        samples=_samples(spec, epoch, cursor, latest),
        batch=next((run["batch_now"] for run in reversed(runs) if run["batch_now"] is not None), None),
        first_start=min((run["start_time"] for run in started), default=None),
        ended_runs_s=sum(max(0.0, run["ended"] - run["start_time"]) for run in started if run["ended"] is not None),
        running_since=next((run["start_time"] for run in reversed(started) if run["ended"] is None), None),
        resizes=len(done),
        failures=len(resizes) - (done[-1] if done else 0),
        last_resize_end=changed,
        epochs_since_change=sum(changed is None or point.time > changed for point in epochs),
        first_loss=next((run["first_loss"] for run in runs if run["first_loss"] is not None), None),
    )


def _samples(spec: SpecRecord | None, epoch: int, cursor: int, epochs: Mapping[int, Row]) -> float:
    if spec is not None:
        return float(epoch * spec.dataset + cursor)
    return float(sum(point["samples"] for point in epochs.values()) + cursor)

"""Resizes and the states they go through. The intent comes first: each is stored before it is acted on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, select, text

from ones_db.errors import ResizeConflict, UnknownRecord
from ones_db.jobs import key_of
from ones_db.reasons import NO_REASON, Reason
from ones_db.records import ResizeRecord, ResizeStepRecord
from ones_db.rows import reason_columns, record_of, row_of
from ones_db.tables import JOBS, RESIZES, STEPS


def begin_resize(connection: Connection, cluster: int, record: ResizeRecord) -> ResizeRecord:
    job = key_of(connection, cluster, record.job_id)
    values = {**row_of(record), "job_id": job}
    del values["id"]
    query = select(RESIZES).where(RESIZES.c.job_id == job)
    again = connection.execute(query.where(RESIZES.c.started == record.started)).mappings().one_or_none()
    if again is not None:
        fixed = ("restart", "new_nodes", "new_gpus_per_node", "new_batch", "mechanism", "added", "dropped", "new_kind")
        if all(again[name] == values[name] for name in fixed):
            return _record(_row(connection, cluster, again["id"]))
        raise ResizeConflict(f"job {record.job_id}: another resize began at the same moment")
    running = connection.execute(query.where(RESIZES.c.ended.is_(None))).mappings().one_or_none()
    if running is not None:
        raise ResizeConflict(
            f"job {record.job_id}: resize {running['id']} is open (state {running['state']}); end it first"
        )
    result = connection.execute(RESIZES.insert().values(values))
    key = int(result.inserted_primary_key[0])  # type: ignore[index]
    _step(connection, key, 0, record.state, record.started, NO_REASON)
    return replace(record, id=key)


def step_resize(
    connection: Connection,
    cluster: int,
    resize_id: int,
    state: str,
    detail: Reason,
    time: float,
    order_number: int | None,
    deadline: float | None,
) -> ResizeRecord:
    row = _row(connection, cluster, resize_id)
    if row["ended"] is not None:
        raise ResizeConflict(f"resize {resize_id} of job {row['slurm_id']} has ended (state {row['state']})")
    values: dict[str, Any] = {"state": state, "deadline": deadline}
    if order_number is not None:
        values["order_number"] = order_number
    connection.execute(RESIZES.update().where(RESIZES.c.id == resize_id).values(values))
    _next_step(connection, resize_id, state, time, detail)
    return _record(_row(connection, cluster, resize_id))


def end_resize(
    connection: Connection,
    cluster: int,
    resize_id: int,
    state: str,
    outcome: Reason,
    time: float,
    pause_s: float | None,
) -> ResizeRecord:
    row = _row(connection, cluster, resize_id)
    if row["ended"] is not None:
        if (row["state"], row["ended"]) == (state, time):
            return _record(row)
        raise ResizeConflict(f"resize {resize_id} of job {row['slurm_id']} has ended (state {row['state']})")
    end = {"state": state, "ended": time, "pause_s": pause_s, "deadline": None, **reason_columns("outcome", outcome)}
    connection.execute(RESIZES.update().where(RESIZES.c.id == resize_id).values(end))
    _next_step(connection, resize_id, state, time, outcome)
    return _record(_row(connection, cluster, resize_id))


def note_held(connection: Connection, cluster: int, resize_id: int, tasks: Sequence[int]) -> ResizeRecord:
    return _note(connection, cluster, resize_id, held=tasks)


def note_let_go(connection: Connection, cluster: int, resize_id: int, tasks: Sequence[int]) -> ResizeRecord:
    return _note(connection, cluster, resize_id, let_go=tasks)


def _note(connection: Connection, cluster: int, resize_id: int, **tasks: Sequence[int]) -> ResizeRecord:
    _row(connection, cluster, resize_id)
    values = {name: ",".join(map(str, some)) for name, some in tasks.items()}
    connection.execute(RESIZES.update().where(RESIZES.c.id == resize_id).values(values))
    return _record(_row(connection, cluster, resize_id))


def set_pause(connection: Connection, cluster: int, resize_id: int, pause_s: float) -> None:
    _row(connection, cluster, resize_id)
    connection.execute(RESIZES.update().where(RESIZES.c.id == resize_id).values(pause_s=pause_s))


def open_resizes(connection: Connection, cluster: int) -> list[ResizeRecord]:
    query = _with_job(cluster).where(RESIZES.c.ended.is_(None)).order_by(RESIZES.c.started)
    return [_record(row) for row in connection.execute(query).mappings()]


def resizes(connection: Connection, cluster: int, job_id: int | None) -> list[ResizeRecord]:
    query = _with_job(cluster).order_by(RESIZES.c.started)
    if job_id is not None:
        query = query.where(RESIZES.c.job_id == key_of(connection, cluster, job_id))
    return [_record(row) for row in connection.execute(query).mappings()]


def resize_steps(connection: Connection, cluster: int, resize_id: int) -> list[ResizeStepRecord]:
    _row(connection, cluster, resize_id)
    query = select(STEPS).where(STEPS.c.resize_id == resize_id).order_by(STEPS.c.sequence)
    return [record_of(ResizeStepRecord, row) for row in connection.execute(query).mappings()]


PHASES = (
    "pause_s",
    "checkpoint_s",
    "stall_s",
    "queue_s",
    "launch_s",
    "import_s",
    "group_s",
    "load_s",
    "first_step_s",
    "ready_s",
    "transfer_s",
)
"""Columns of the view `resize_cost` that say how long something took."""


def resize_phases(connection: Connection, cluster: str, ended: Iterable[ResizeRecord]) -> dict[int, dict[str, float]]:
    query = text(
        f"SELECT {', '.join(PHASES)} FROM resize_cost "
        "WHERE cluster = :cluster AND job_id = :job_id AND start_time = :started"
    )
    found = {}
    for one in ended:
        asked = {"cluster": cluster, "job_id": one.job_id, "started": one.started}
        for row in connection.execute(query, asked).mappings():
            found[one.id] = {name: float(row[name]) for name in PHASES if row[name] is not None}
    return found


def _with_job(cluster: int) -> Any:
    return (
        select(RESIZES, JOBS.c.job_id.label("slurm_id"))
        .join(JOBS, JOBS.c.id == RESIZES.c.job_id)
        .where(JOBS.c.cluster_id == cluster)
    )


def _row(connection: Connection, cluster: int, resize_id: int) -> Mapping[Any, Any]:
    row = connection.execute(_with_job(cluster).where(RESIZES.c.id == resize_id)).mappings().one_or_none()
    if row is None:
        raise UnknownRecord(f"resize {resize_id} is not in the database")
    return row


def _next_step(connection: Connection, resize_id: int, state: str, time: float, detail: Reason) -> None:
    """Write the step, unless the last one is just that: a call made again after a crash changes nothing."""
    query = select(STEPS).where(STEPS.c.resize_id == resize_id).order_by(STEPS.c.sequence.desc()).limit(1)
    last = connection.execute(query).mappings().one()
    step = {"state": state, "time": time, **reason_columns("detail", detail)}
    if any(last[name] != value for name, value in step.items()):
        _step(connection, resize_id, last["sequence"] + 1, state, time, detail)


def _step(connection: Connection, key: int, sequence: int, state: str, time: float, detail: Reason) -> None:
    connection.execute(STEPS.insert().values(row_of(ResizeStepRecord(key, sequence, state, time, detail))))


def _record(row: Mapping[Any, Any]) -> ResizeRecord:
    return record_of(ResizeRecord, row, job_id=row["slurm_id"])

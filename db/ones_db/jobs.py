"""Jobs and their runs: what the snapshots of the cluster say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Float, bindparam, case, exists, func, select, union_all

from ones_db.engine import add_or_replace
from ones_db.errors import UnknownRecord
from ones_db.limits import decode_limits, encode_limits
from ones_db.records import JobRecord, RunRecord
from ones_db.rows import record_of, row_of, shape_names
from ones_db.tables import ACCOUNTING, JOBS, RUNS
from ones_wrapper.protocol import ProtocolError, Spec

# Made once: an alias copies every column.
_LATER = JOBS.alias("later")

T = TypeVar("T")

_FIRST = ("submit_time", *shape_names("requested_shape"))
"""What the first snapshot of a job decides for good."""


def among(column: ColumnElement[Any], values: Collection[int]) -> ColumnElement[bool]:
    """`column IN (…)` with the numbers written out, since databases limit the parameters of a statement."""
    return column.in_(bindparam(None, list(map(int, values)), expanding=True, literal_execute=True, unique=True))


@cache
def newest(cluster: int) -> ColumnElement[bool]:
    """The condition that a row of jobs belongs to the cluster and is the newest submission with its job
    id."""
    return (JOBS.c.cluster_id == cluster) & latest(cluster)


@cache
def latest(cluster: int) -> ColumnElement[bool]:
    """The condition that a row of jobs, which belongs to the cluster, is the newest submission with its job id."""
    return ~exists().where(
        _LATER.c.cluster_id == cluster,
        _LATER.c.job_id == JOBS.c.job_id,
        _LATER.c.submit_time > JOBS.c.submit_time,
    )


def alive(cluster: int, since: ColumnElement[float] | None = None) -> ColumnElement[bool]:
    """The condition that a job of the cluster has not ended, or not before `since`.

    By its key, so that databases find it by the index of ends however many jobs have ended; say no more of the cluster
    beside it, since SQLite would rather look at all its jobs.
    """
    key = select(JOBS.c.id).where(JOBS.c.cluster_id == cluster)
    keys = [key.where(JOBS.c.end_time.is_(None))]
    if since is not None:
        keys.append(key.where(JOBS.c.end_time >= since))
    return JOBS.c.id.in_(union_all(*keys))


def run_end() -> ColumnElement[float | None]:
    """When a run ended, in a query of runs joined with jobs; null while it goes on.

    Slurm does not tell when a run ended that it then requeued: the run's newest report is the nearest that is known.
    """
    requeued = JOBS.c.restart > RUNS.c.restart
    nearest = func.coalesce(RUNS.c.report_time, RUNS.c.start_time)
    return func.coalesce(RUNS.c.end_time, case((requeued, nearest)), JOBS.c.end_time)


def lasted(cluster: int) -> ColumnElement[bool]:
    """Whether a run of the cluster goes on, or ended after `since`, a parameter; in a query as of `run_end`."""
    since = bindparam("since", type_=Float())
    return alive(cluster, since) & (func.coalesce(run_end(), since) >= since)


def key_of(connection: Connection, cluster: int, job_id: int) -> int:
    """The key of the newest submission with this job id; raises `UnknownRecord`."""
    return keys_of(connection, cluster, [job_id])[job_id]


def keys_of(connection: Connection, cluster: int, job_ids: Collection[int]) -> dict[int, int]:
    """The keys of many; raises `UnknownRecord` naming the first that is not there."""
    query = select(JOBS.c.job_id, JOBS.c.id).where(newest(cluster), among(JOBS.c.job_id, job_ids))
    return known({row.job_id: row.id for row in connection.execute(query)}, job_ids)


def known(found: dict[int, T], job_ids: Iterable[int]) -> dict[int, T]:
    """What was found, when all were; raises `UnknownRecord`."""
    for job_id in job_ids:
        if job_id not in found:
            raise UnknownRecord(f"job {job_id} is not in the database; record_jobs stores it first")
    return found


def run_key(connection: Connection, cluster: int, job_id: int, restart: int) -> int:
    """The key of one run; raises `UnknownRecord`."""
    job = key_of(connection, cluster, job_id)
    found = connection.scalar(select(RUNS.c.id).where(RUNS.c.job_id == job, RUNS.c.restart == restart))
    if found is None:
        raise UnknownRecord(f"run {restart} of job {job_id} is not in the database; record_runs stores it first")
    return int(found)


def _same(row: Mapping[Any, Any], record: JobRecord) -> bool:
    """Whether the record speaks of the submission in the row, and not of a later one with the same job id.

    Slurm gives a requeued job a new submission time, after it raised the restart count; a new job starts from
    0.
    """
    return bool(row["submit_time"] == record.submit_time or 0 < record.restart >= row["restart"])


def record_jobs(connection: Connection, cluster: int, records: Iterable[JobRecord]) -> None:
    given = {record.job_id: record for record in records}
    query = select(JOBS).where(newest(cluster), among(JOBS.c.job_id, given))
    known = {row["job_id"]: row for row in connection.execute(query).mappings()}
    rows = []
    changed = []
    for job_id, record in given.items():
        values = {**row_of(record), "cluster_id": cluster}
        row = known.get(job_id)
        if row is not None and _same(row, record):
            values.update({name: row[name] for name in _FIRST})
            if all(row[name] == value for name, value in values.items()):
                continue
            changed.append(row["id"])
        rows.append(values)
    add_or_replace(connection, JOBS, ("cluster_id", "job_id", "submit_time"), rows)
    if changed:
        # Whatever accounting had of them before: they are the companion's from now on.
        connection.execute(ACCOUNTING.delete().where(among(ACCOUNTING.c.job_id, changed)))


def set_deferral(connection: Connection, cluster: int, job_id: int, until: float | None) -> None:
    key = key_of(connection, cluster, job_id)
    connection.execute(JOBS.update().where(JOBS.c.id == key).values(deferred_until=until))


def observed() -> ColumnElement[bool]:
    """The condition that a companion has seen the job, in a query of jobs: it is not from accounting alone."""
    return ~exists().where(ACCOUNTING.c.job_id == JOBS.c.id)


def deferrals(connection: Connection, cluster: int) -> dict[int, float]:
    query = select(JOBS.c.job_id, JOBS.c.deferred_until).where(newest(cluster), JOBS.c.deferred_until.is_not(None))
    return {row.job_id: row.deferred_until for row in connection.execute(query)}


def spec_record(row: Mapping[Any, Any]) -> Spec | None:
    values = {name: row[name] for name in SPEC_COLUMNS if name != "strategy"}
    # Of jobs that said what they can do before schemas 0010, 0012 and 0018.
    later = (("term", 0), ("hot", False), ("multiple_of", 1), ("gradient_bytes", 0))
    values |= {name: value for name, value in later if values[name] is None}
    text = values.pop("limits")
    try:
        limits = decode_limits(text) if text is not None else None
    except ProtocolError:
        return None  # rather nothing known of the job than sizes that its strategy cannot use
    return None if None in values.values() else Spec(**values, limits=limits)


def spec_columns(spec: Spec) -> dict[str, Any]:
    """The columns of `jobs` that hold a spec."""
    limits = spec.limits
    told = {"strategy": limits and limits.strategy, "limits": limits and encode_limits(limits)}
    return {**{name: getattr(spec, name) for name in SPEC_COLUMNS if name not in told}, **told}


SPEC_COLUMNS = (*(field.name for field in fields(Spec)), "strategy")
"""Those columns."""


def jobs(connection: Connection, cluster: int, job_ids: Collection[int] | None) -> dict[int, JobRecord]:
    query = select(JOBS).where(newest(cluster)).order_by(JOBS.c.submit_time, JOBS.c.job_id)
    if job_ids is not None:
        query = query.where(among(JOBS.c.job_id, job_ids))
    return {row["job_id"]: record_of(JobRecord, row) for row in connection.execute(query).mappings()}


def live_jobs(connection: Connection, cluster: int) -> set[int]:
    return set(connection.scalars(select(JOBS.c.job_id).where(newest(cluster), JOBS.c.end_time.is_(None))))


def _told(record: RunRecord) -> dict[str, Any]:
    """The columns that the record knows a value of."""
    unknown: dict[str, Any] = {"nodes": 0, "gpus_per_node": 0, "node_list": ""}
    apart = ("job_id", "report_offset", "report_number")
    return {
        name: value
        for name, value in row_of(record).items()
        if name not in apart and value is not None and value != unknown.get(name)
    }


def record_runs(connection: Connection, cluster: int, records: Iterable[RunRecord]) -> None:
    given = {(record.job_id, record.restart): record for record in records}
    keys = keys_of(connection, cluster, {job_id for job_id, _ in given})
    restarts = {restart for _, restart in given}
    query = select(RUNS).where(among(RUNS.c.job_id, keys.values()), among(RUNS.c.restart, restarts))
    stored = {(row["job_id"], row["restart"]): dict(row) for row in connection.execute(query).mappings()}
    blank: dict[str, Any] = {column.name: None for column in RUNS.c if column.name != "id"}
    blank |= {"nodes": 0, "gpus_per_node": 0, "report_offset": 0, "report_number": 0}
    rows = []
    for (job_id, restart), record in given.items():
        before = stored.get((keys[job_id], restart), {})
        after = {**blank, **before, **_told(record), "job_id": keys[job_id]}
        if after != before:
            after.pop("id", None)
            rows.append(after)
    add_or_replace(connection, RUNS, ("job_id", "restart"), rows)


def end_run(connection: Connection, cluster: int, job_id: int, restart: int, end_time: float, reason: str) -> None:
    key = run_key(connection, cluster, job_id, restart)
    update = RUNS.update().where(RUNS.c.id == key)
    connection.execute(update.values(end_time=end_time))
    if reason:
        connection.execute(update.where(RUNS.c.end_reason.is_(None)).values(end_reason=reason))


def runs(connection: Connection, cluster: int, job_id: int) -> list[RunRecord]:
    key = key_of(connection, cluster, job_id)
    query = select(RUNS).where(RUNS.c.job_id == key).order_by(RUNS.c.restart)
    return [record_of(RunRecord, row, job_id=job_id) for row in connection.execute(query).mappings()]

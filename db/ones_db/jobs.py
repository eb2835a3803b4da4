"""Jobs and their runs, promises of deadlines, blocks (tasks of job arrays), and the memberships that jobs report."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache, lru_cache
from typing import Any, TypeVar

from sqlalchemy import BindParameter, ColumnElement, Connection, Row, Select, Table, and_, bindparam, exists, select

from ones_db.backend import UnknownRecord
from ones_db.engine import OF_JOBS, Transactions, add_or_replace, noting, reading, remembering
from ones_db.records import BlockRecord, GuestRun, HeldRecord, JobRecord, MembershipRecord, PromiseRecord, RunRecord
from ones_db.rows import record_of, row_of, shape_names
from ones_db.tables import ACCOUNTING, BLOCKS, JOBS, MEMBERSHIPS, PROMISES, RUNS
from ones_wrapper.protocol import Membership, Spec
from ones_wrapper.protocol.fields import ProtocolError, build, object_of, types_of
from ones_wrapper.protocol.limits import StrategyLimits

# Made once: an alias copies every column.
_LATER = JOBS.alias("later")

T = TypeVar("T")

_FIRST = ("submit_time", *shape_names("requested_shape"))
"""Columns that are stored at a job's first snapshot and then never change."""


def among(column: ColumnElement[Any], values: Collection[int]) -> ColumnElement[bool]:
    """Return the condition `column IN (…)`, with the numbers in the SQL: databases limit a statement's parameters."""
    return column.in_(bindparam(None, list(map(int, values)), expanding=True, literal_execute=True, unique=True))


def keyed(column: ColumnElement[Any], name: str = "keys") -> ColumnElement[bool]:
    """Return the condition `column IN` whose numbers are given at each execution, so that it is compiled only once.

    SQLAlchemy takes longer to compile a statement than the database takes to answer it.
    """
    return column.in_(bindparam(name, expanding=True, literal_execute=True))


CLUSTER: BindParameter[int] = bindparam("cluster")
"""Parameter `cluster` of queries that are compiled once: the key of a cluster (clusters.id)."""


@cache
def newest(cluster: int | BindParameter[int]) -> ColumnElement[bool]:
    """Return the condition that a job belongs to the cluster, and is the newest submission with its id."""
    return (JOBS.c.cluster_id == cluster) & latest(cluster)


@cache
def latest(cluster: int | BindParameter[int]) -> ColumnElement[bool]:
    """Return the condition that no job of the cluster with the same id was submitted later.

    It does not check that the job itself is of the cluster.
    """
    return ~exists().where(
        _LATER.c.cluster_id == cluster,
        _LATER.c.job_id == JOBS.c.job_id,
        _LATER.c.submit_time > JOBS.c.submit_time,
    )


ALIVE = JOBS.c.id.in_(select(JOBS.c.id).where(JOBS.c.cluster_id == CLUSTER, JOBS.c.end_time.is_(None)))
"""Condition that a job is of the cluster and has not ended.

It is `id IN (…)`, so that databases find the jobs by the index on end times, fast even with many ended jobs. Do not add
a condition on the cluster to it: SQLite would then read all jobs of the cluster.
"""


def with_job(table: Table, cluster: int | BindParameter[int]) -> Select[Any]:
    """Return the query of a table's rows for jobs of the cluster. Its column `slurm_job` has Slurm's job id."""
    query = select(table, JOBS.c.job_id.label("slurm_job")).join(JOBS, JOBS.c.id == table.c.job_id)
    return query.where(JOBS.c.cluster_id == cluster)


def key_of(connection: Connection, cluster: int, job_id: int) -> int:
    """Return the key (jobs.id) of the newest submission with this job id. Raises `UnknownRecord`."""
    return keys_of(connection, cluster, [job_id])[job_id]


def keys_of(connection: Connection, cluster: int, job_ids: Collection[int]) -> dict[int, int]:
    """Return {job id: jobs.id} for the newest submissions with these ids. Raises `UnknownRecord`."""
    rows = connection.execute(_KEYS, {"cluster": cluster, "keys": [*job_ids]})
    return known({row.job_id: row.id for row in rows}, job_ids)


_NEWEST = newest(CLUSTER) & keyed(JOBS.c.job_id)
_KEYS = select(JOBS.c.job_id, JOBS.c.id).where(_NEWEST)
WITH_IDS = select(JOBS).where(_NEWEST).order_by(JOBS.c.submit_time, JOBS.c.job_id)
"""Query of the jobs of `CLUSTER` whose ids are in the parameter `keys`, in order of submission."""
STARTS = select(RUNS).where(keyed(RUNS.c.job_id), keyed(RUNS.c.restart, "restarts"))
"""Query of the runs whose jobs (jobs.id) are in the parameter `keys`, and whose restart counts are in `restarts`."""


def known(found: dict[int, T], job_ids: Iterable[int]) -> dict[int, T]:
    """Return `found` if all these job ids are in it, else raise `UnknownRecord`."""
    for job_id in job_ids:
        if job_id not in found:
            raise UnknownRecord(f"job {job_id} is not in the database; record_jobs stores it first")
    return found


def _same(row: Mapping[Any, Any], record: JobRecord) -> bool:
    """Return True if row and record are of the same job, and not of two jobs that got the same id.

    A requeue changes a job's submission time and raises its restart count, which is 0 in a new job. A killed slurmctld
    may forget requeues, or the end of a job.
    """
    if row["submit_time"] == record.submit_time:
        return True
    end = row["end_time"]
    return record.restart > 0 and bool(record.restart >= row["restart"] or end is None or record.submit_time <= end)


def observed() -> ColumnElement[bool]:
    """Return the condition that a companion has seen the job: it is not known only from an import of accounting."""
    return ~exists().where(ACCOUNTING.c.job_id == JOBS.c.id)


def encode_limits(limits: StrategyLimits) -> str:
    """Return a strategy's limits as JSON for the column `limits`."""
    return json.dumps(asdict(limits), allow_nan=False, separators=(",", ":"))


@lru_cache(maxsize=256)
def decode_limits(text: str) -> StrategyLimits:
    """Return a strategy's limits from the JSON in the column `limits`, cached. Raises `ProtocolError` for bad JSON."""
    return build(StrategyLimits, types_of(StrategyLimits), object_of(text))


def spec_record(row: Mapping[Any, Any]) -> Spec | None:
    values = {name: row[name] for name in SPEC_COLUMNS if name != "strategy"}
    text = values.pop("limits")
    try:
        limits = decode_limits(text) if text is not None else None
    except ProtocolError:
        return None  # rather nothing known of the job than sizes that its strategy cannot use
    return None if None in values.values() else Spec(**values, limits=limits)


def spec_columns(spec: Spec) -> dict[str, Any]:
    """Return the columns of `jobs` that hold a spec, with their values."""
    limits = spec.limits
    told = {"strategy": limits and limits.strategy, "limits": limits and encode_limits(limits)}
    return {**{name: getattr(spec, name) for name in SPEC_COLUMNS if name not in told}, **told}


SPEC_COLUMNS = (*(field.name for field in fields(Spec)), "strategy")
"""Names of the columns of `jobs` that hold a spec."""


NEW_RUN = {"nodes": 0, "gpus_per_node": 0, "report_offset": 0, "report_number": 0}
"""Values of a new row of `runs` in the columns that cannot be null, besides its key."""


def _known_columns(record: RunRecord) -> dict[str, Any]:
    """Return the columns of a run for which the record has a value."""
    unknown: dict[str, Any] = {"nodes": 0, "gpus_per_node": 0, "node_list": ""}
    apart = ("job_id", "report_offset", "report_number")
    return {
        name: value
        for name, value in row_of(record).items()
        if name not in apart and value is not None and value != unknown.get(name)
    }


class JobStore(Transactions):
    """Part of a `Store`: jobs with their runs, deferrals and promises."""

    @noting
    def record_jobs(self, connection: Connection, records: Iterable[JobRecord]) -> None:
        """Store the present state of jobs. Jobs that have not changed are not written.

        A record with restart count 0 and a new submission time is a new job that got the same id. The requested shape
        and the submission time of a known job stay as first stored.
        """
        given = {record.job_id: record for record in records}
        found = connection.execute(WITH_IDS, {"cluster": self._cluster, "keys": [*given]})
        known = {row["job_id"]: row for row in found.mappings()}
        rows = []
        changed = []
        new = set()
        for job_id, record in given.items():
            values = {**row_of(record), "cluster_id": self._cluster}
            row = known.get(job_id)
            if row is None or not _same(row, record):
                new.add(job_id)
            else:
                values.update({name: row[name] for name in _FIRST})
                if all(row[name] == value for name, value in values.items()):
                    continue
                changed.append(row["id"])
            rows.append(values)
        self._forget("live", "deferrals", "finished")
        self._forget("histories", of={row["job_id"] for row in rows}.__contains__)
        self._forget(*OF_JOBS, of=new.__contains__)
        add_or_replace(connection, JOBS, ("cluster_id", "job_id", "submit_time"), rows)
        if changed:
            # Whatever accounting had of them before: they are the companion's from now on.
            connection.execute(ACCOUNTING.delete().where(among(ACCOUNTING.c.job_id, changed)))

    @noting
    def record_runs(self, connection: Connection, records: Iterable[RunRecord]) -> None:
        """Store runs as Slurm shows them. Unknown values (None, 0 nodes) and report positions are ignored."""
        given = {(record.job_id, record.restart): record for record in records}
        keys = keys_of(connection, self._cluster, {job_id for job_id, _ in given})
        found = connection.execute(STARTS, {"keys": [*keys.values()], "restarts": [restart for _, restart in given]})
        stored = {(row["job_id"], row["restart"]): dict(row) for row in found.mappings()}
        blank = {column.name: None for column in RUNS.c if column.name != "id"} | NEW_RUN
        rows = []
        for (job_id, restart), record in given.items():
            before = stored.get((keys[job_id], restart), {})
            after = {**blank, **before, **_known_columns(record), "job_id": keys[job_id]}
            if after != before:
                after.pop("id", None)
                rows.append(after)
        self._forget("histories", of=keys.__contains__)
        add_or_replace(connection, RUNS, ("job_id", "restart"), rows)

    @noting
    def set_deferral(self, connection: Connection, job_id: int, until: float | None) -> None:
        """Store the time until which the companion defers a pending job, in Unix seconds; None for no deferral."""
        key = key_of(connection, self._cluster, job_id)
        self._forget("histories", of=job_id.__eq__)
        self._forget("deferrals")
        connection.execute(JOBS.update().where(JOBS.c.id == key).values(deferred_until=until))

    @reading
    def jobs(self, connection: Connection, job_ids: Sequence[int] | None = None) -> dict[int, JobRecord]:
        """Return these jobs by job id, in order of submission; without `job_ids`, all jobs of the cluster."""
        if job_ids is None:
            query = select(JOBS).where(newest(self._cluster)).order_by(JOBS.c.submit_time, JOBS.c.job_id)
            found = connection.execute(query)
        else:
            found = connection.execute(WITH_IDS, {"cluster": self._cluster, "keys": [*job_ids]})
        return {row["job_id"]: record_of(JobRecord, row) for row in found.mappings()}

    @remembering("live")
    def live_jobs(self, connection: Connection) -> frozenset[int]:
        """Return the ids of jobs that have not ended."""
        query = select(JOBS.c.job_id).where(newest(self._cluster), JOBS.c.end_time.is_(None))
        live = frozenset(connection.scalars(query))
        self._forget(*OF_JOBS, of=lambda job_id: job_id not in live)
        return live

    @reading
    def runs(self, connection: Connection, job_id: int) -> list[RunRecord]:
        """Return the runs of a job in order."""
        key = key_of(connection, self._cluster, job_id)
        query = select(RUNS).where(RUNS.c.job_id == key).order_by(RUNS.c.restart)
        return [record_of(RunRecord, row, job_id=job_id) for row in connection.execute(query).mappings()]

    @remembering("deferrals")
    def deferrals(self, connection: Connection) -> dict[int, float]:
        """Return a dict from the id of each deferred job to the Unix time until which the companion defers it."""
        until = JOBS.c.deferred_until
        query = select(JOBS.c.job_id, until).where(newest(self._cluster), until.is_not(None))
        return {row.job_id: row.deferred_until for row in connection.execute(query)}

    @noting
    def record_promises(self, connection: Connection, records: Iterable[PromiseRecord]) -> None:
        """Store which deadlines were promised or refused. An earlier answer for the same job is replaced."""
        given = list(records)
        keys = keys_of(connection, self._cluster, {record.job_id for record in given})
        rows = [{**row_of(record), "job_id": keys[record.job_id]} for record in given]
        add_or_replace(connection, PROMISES, ("job_id",), rows)

    @reading
    def promises(self, connection: Connection, job_ids: Collection[int] | None = None) -> dict[int, PromiseRecord]:
        """Return the promised and refused deadlines by job id: of these jobs, or of all that have not ended."""
        which = JOBS.c.end_time.is_(None) if job_ids is None else among(JOBS.c.job_id, job_ids)
        query = with_job(PROMISES, self._cluster).where(latest(self._cluster), which).order_by(JOBS.c.job_id)
        found = connection.execute(query).mappings()
        return {row["slurm_job"]: record_of(PromiseRecord, row, job_id=row["slurm_job"]) for row in found}


_HELD = (
    select(JOBS.c.job_id, RUNS.c.node_list, RUNS.c.gpus_per_node)
    .join(RUNS, and_(RUNS.c.job_id == JOBS.c.id, RUNS.c.restart == JOBS.c.restart))
    .where(ALIVE, latest(CLUSTER), RUNS.c.end_time.is_(None))
    .where(~select(BLOCKS.c.job_id).where(BLOCKS.c.job_id == JOBS.c.id).exists())
    .order_by(JOBS.c.job_id),
    select(JOBS.c.job_id, BLOCKS.c.node_list, BLOCKS.c.gpus_per_node)
    .join(BLOCKS, BLOCKS.c.job_id == JOBS.c.id)
    .where(ALIVE, latest(CLUSTER), BLOCKS.c.end_time.is_(None))
    .order_by(JOBS.c.id, BLOCKS.c.start_time, BLOCKS.c.task),
)
"""Queries for `held`: the first for jobs without blocks, the second for blocks."""


def started_blocks(connection: Connection, cluster: int, slurm_ids: Collection[int]) -> dict[int, list[float]]:
    """Return the start times of blocks by their Slurm job id, for these ids."""
    found: dict[int, list[float]] = defaultdict(list)
    query = (
        select(BLOCKS.c.slurm_id, BLOCKS.c.start_time)
        .join(JOBS, JOBS.c.id == BLOCKS.c.job_id)
        .where(JOBS.c.cluster_id == cluster, among(BLOCKS.c.slurm_id, slurm_ids))
    )
    for slurm_id, start in connection.execute(query):
        found[slurm_id].append(start)
    return found


_MEMBERS: Any = select(MEMBERSHIPS, RUNS.c.restart.label("term")).join(RUNS, RUNS.c.id == MEMBERSHIPS.c.run_id)
_WITH_JOBS = _MEMBERS.add_columns(JOBS.c.job_id.label("slurm_id")).join(JOBS, JOBS.c.id == RUNS.c.job_id)
MEMBERS = str(_WITH_JOBS)
"""SQL for `rows_after`: memberships with their term (`term`) and Slurm's job id (`slurm_id`)."""


CHUNK = 250
"""Largest number of runs that one query selects by their ids."""


def rows_after(connection: Connection, table: Table, query: str, runs: Sequence[tuple[int, int]]) -> Iterator[Row[Any]]:
    """Yield the reports in a table that are newer than a given report of their run, in the run's order.

    `runs` lists (runs.id, number of the given report). `query` is a SELECT from `table` without WHERE.
    """
    newer = f"{table.name}.run_id = since.run_id AND {table.name}.number > since.number"
    # Written out, and past SQLAlchemy: it would compile it at each look, since the numbers differ, and keep hundreds.
    # Joined, since PostgreSQL may answer many conditions by OR with a scan that tries all of them on each row.
    query = f"{query} JOIN since ON {newer} ORDER BY {table.name}.number"
    for first in range(0, len(runs), CHUNK):
        since = ", ".join(f"({key:d}, {number:d})" for key, number in runs[first : first + CHUNK])
        yield from connection.exec_driver_sql(f"WITH since (run_id, number) AS (VALUES {since}) {query}").all()


def membership_record(row: Mapping[Any, Any], job_id: int) -> MembershipRecord:
    """Return the record of a row of `memberships`. The row must also have the column `term`."""
    return MembershipRecord(job_id, row["term"], row["number"], row["time"], record_of(Membership, row))


class BlockStore(Transactions):
    """Part of a `Store`: blocks and memberships."""

    @noting
    def record_blocks(self, connection: Connection, records: Iterable[BlockRecord]) -> None:
        """Store starts of blocks, as Slurm shows them."""
        given = list(records)
        keys = keys_of(connection, self._cluster, {record.job_id for record in given})
        rows = [{**row_of(record), "job_id": keys[record.job_id]} for record in given]
        self._forget("histories", of=keys.__contains__)
        add_or_replace(connection, BLOCKS, ("job_id", "task", "restart"), rows)

    @reading
    def blocks(self, connection: Connection, job_id: int) -> list[BlockRecord]:
        """Return the starts of a job's blocks, in order."""
        query = select(BLOCKS).where(BLOCKS.c.job_id == key_of(connection, self._cluster, job_id))
        query = query.order_by(BLOCKS.c.start_time, BLOCKS.c.task, BLOCKS.c.restart)
        return [record_of(BlockRecord, row, job_id=job_id) for row in connection.execute(query).mappings()]

    @reading
    def open_blocks(self, connection: Connection) -> list[BlockRecord]:
        """Return the blocks that run."""
        query = with_job(BLOCKS, self._cluster).where(latest(self._cluster), BLOCKS.c.end_time.is_(None))
        query = query.order_by(JOBS.c.id, BLOCKS.c.start_time, BLOCKS.c.task)
        return [record_of(BlockRecord, row, job_id=row["slurm_job"]) for row in connection.execute(query).mappings()]

    @reading
    def guest_runs(self, connection: Connection, since: float) -> list[GuestRun]:
        """Return the guest blocks that ran at time `since` or later, in order."""
        query = (
            select(JOBS.c.partition, BLOCKS.c.start_time, BLOCKS.c.end_time, BLOCKS.c.state == "PREEMPTED")
            .join(JOBS, JOBS.c.id == BLOCKS.c.job_id)
            .where(JOBS.c.cluster_id == self._cluster, BLOCKS.c.guest)
            .where(BLOCKS.c.end_time.is_(None) | (BLOCKS.c.end_time > since))
            .order_by(BLOCKS.c.start_time, BLOCKS.c.job_id, BLOCKS.c.task)
        )
        return [GuestRun(*row) for row in connection.execute(query)]

    @reading
    def held(self, connection: Connection) -> list[HeldRecord]:
        """Return the GPUs that running jobs hold: a record for each node of a job, or of one of its blocks."""
        found = [row for query in _HELD for row in connection.execute(query, {"cluster": self._cluster})]
        rows = [(job_id, nodes.split(",") if nodes else [], gpus) for job_id, nodes, gpus in found]
        return [HeldRecord(job_id, node, gpus or 0) for job_id, nodes, gpus in rows for node in nodes]

    @remembering("members")
    def membership(self, _: Connection, job_id: int, order: int | None = None) -> MembershipRecord | None:
        """Return a job's newest membership, or None. With `order`, return the newest that this order caused."""
        return next(iter(self.memberships(job_id, 1, order)), None)

    @reading
    def memberships(
        self, connection: Connection, job_id: int, limit: int = 100, order: int | None = None
    ) -> list[MembershipRecord]:
        """Return a job's memberships, newest first. With `order`, only memberships that this order caused."""
        query = (
            _MEMBERS.where(RUNS.c.job_id == key_of(connection, self._cluster, job_id))
            .order_by(RUNS.c.restart.desc(), MEMBERSHIPS.c.number.desc())
            .limit(limit)
        )
        if order is not None:
            query = query.where(MEMBERSHIPS.c.order_number == order)
        return [membership_record(row, job_id) for row in connection.execute(query).mappings()]

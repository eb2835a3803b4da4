"""Records besides the jobs that the companion looks after: nodes, people's actions, the companion's health, and jobs
that have ended as Slurm's accounting has them. `ones_db.tables` says what their fields mean."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, and_, func, select

from ones_db.engine import LeaderRecord, Transactions, add_new, add_or_replace, leader_of, noting, reading, writing
from ones_db.jobs import among, run_end, started_blocks
from ones_db.records import JobRecord, RunRecord
from ones_db.rows import record_of, row_of
from ones_db.tables import ACCOUNTING, ACTIONS, CHANGES, HEALTH, JOBS, NODES, RUNS


class NodeRecord(NamedTuple):
    """A node as it is now."""

    name: str
    state: str
    usable: bool
    gpus: int
    partitions: str = ""


class ActionRecord(NamedTuple):
    """Action of a person on the companion, its database or its jobs."""

    time: float
    user: str
    action: str
    detail: str = ""


class HealthRecord(NamedTuple):
    """Health of the companion that acted last, at its last tick."""

    time: float
    mode: str
    interval_s: float
    tick_time: float | None = None
    tick_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    gpus: int | None = None
    error: str = ""
    error_time: float | None = None


GONE = "GONE"
"""State of a node that Slurm no longer knows."""


def _last(connection: Connection, cluster: int) -> dict[str, NodeRecord]:
    return {row.name: NodeRecord(*row) for row in connection.execute(_last_of(cluster))}


@cache
def _last_of(cluster: int) -> Select[Any]:
    newest = (
        select(CHANGES.c.node_id, func.max(CHANGES.c.time).label("time"))
        .join(NODES, NODES.c.id == CHANGES.c.node_id)
        .where(NODES.c.cluster_id == cluster)
        .group_by(CHANGES.c.node_id)
        .subquery()
    )
    return (
        select(NODES.c.name, *(CHANGES.c[name] for name in NodeRecord._fields if name != "name"))
        .join(CHANGES, CHANGES.c.node_id == NODES.c.id)
        .join(newest, and_(newest.c.node_id == CHANGES.c.node_id, newest.c.time == CHANGES.c.time))
    )


class SiteStore(Transactions):
    """The nodes, actions, health and leader of a `Store`."""

    @noting
    def record_nodes(self, connection: Connection, time: float, nodes_now: Collection[NodeRecord]) -> None:
        """Store the nodes as they are now: those that changed, and those that are gone."""
        last = _last(connection, self._cluster)
        there = {node.name for node in nodes_now}
        lost = [node for name, node in last.items() if name not in there and node.state != GONE]
        changed = [node for node in nodes_now if last.get(node.name) != node]
        changed += [node._replace(state=GONE, usable=False) for node in lost]
        if not changed:
            return
        add_new(connection, NODES, [{"cluster_id": self._cluster, "name": node.name} for node in changed])
        keys = {
            row.name: row.id for row in connection.execute(select(NODES).where(NODES.c.cluster_id == self._cluster))
        }
        rows = [{**node._asdict(), "node_id": keys[node.name], "time": time} for node in changed]
        for row in rows:
            del row["name"]
        add_or_replace(connection, CHANGES, ("node_id", "time"), rows)

    @reading
    def nodes(self, connection: Connection) -> list[NodeRecord]:
        """The nodes as they are now, by their names."""
        return [node for _, node in sorted(_last(connection, self._cluster).items()) if node.state != GONE]

    @noting
    def add_action(self, connection: Connection, record: ActionRecord) -> None:
        """Store an action; the same action of a person at the same moment is stored once."""
        add_new(connection, ACTIONS, [{**row_of(record), "cluster_id": self._cluster}])

    @noting
    def record_health(self, connection: Connection, record: HealthRecord) -> None:
        """Store the health of the companion."""
        add_or_replace(connection, HEALTH, ("cluster_id",), [{"cluster_id": self._cluster, **record._asdict()}])

    @reading
    def health(self, connection: Connection) -> HealthRecord | None:
        """Health of the companion that acted last, at its last tick; None if there was none."""
        columns = [HEALTH.c[name] for name in HealthRecord._fields]
        row = connection.execute(select(*columns).where(HEALTH.c.cluster_id == self._cluster)).first()
        return None if row is None else HealthRecord(*row)

    @reading
    def leader(self, connection: Connection) -> LeaderRecord | None:
        """The companion that leads, or did last; None if none ever did."""
        return leader_of(connection, self._cluster)


@dataclass(frozen=True)
class AccountingJob:
    """A job that has ended, as Slurm's accounting has it."""

    job: JobRecord
    runs: tuple[RunRecord, ...]
    """Runs by their start; empty if it never started."""
    time_limit_s: float | None = None


class Imported(NamedTuple):
    """Result of reading jobs from accounting."""

    new: int = 0
    changed: int = 0
    """Jobs known from accounting before, with more details now."""
    same: int = 0
    companion: int = 0
    """Jobs that the companion has seen; they stay as they are."""

    def plus(self, other: Imported) -> Imported:
        """Return the sum of both results."""
        return Imported(*(a + b for a, b in zip(self, other, strict=True)))


class PastJob(NamedTuple):
    """A job that has ended, by accounting or the companion; times in seconds."""

    job_id: int
    name: str
    user: str
    account: str
    partition: str
    state: str
    submit_time: float
    start_time: float | None
    """Start of its first run; None if it never started."""
    end_time: float
    runs: int
    run_s: float
    """Seconds in all its runs."""
    gpus: int
    """GPUs of its largest run."""
    gpu_s: float
    """GPU-seconds of all its runs."""


SAME_JOB_S = 86_400.0
"""Two stays of one job id less than this apart are of one job: Slurm lets a job that ended be requeued for less than
this, and takes far longer to come round to the same id."""

SAME_START_S = 5.0
"""Largest difference between the start of one task in Slurm's controller and in its accounting."""

Row = Mapping[Any, Any]


def _known(
    connection: Connection, cluster: int, job_ids: Sequence[int]
) -> tuple[dict[int, list[Row]], dict[int, list[RunRecord]]]:
    """The stored jobs with these ids, and the runs (by jobs.id) of those that came from accounting."""
    known: dict[int, list[Row]] = defaultdict(list)
    query = (
        select(JOBS, ACCOUNTING.c.import_time)
        .outerjoin(ACCOUNTING, ACCOUNTING.c.job_id == JOBS.c.id)
        .where(JOBS.c.cluster_id == cluster, among(JOBS.c.job_id, job_ids))
    )
    slurm_ids = {}
    for row in connection.execute(query).mappings():
        known[row["job_id"]].append(row)
        if row["import_time"] is not None:
            slurm_ids[row["id"]] = row["job_id"]
    runs: dict[int, list[RunRecord]] = defaultdict(list)
    stored = select(RUNS).where(among(RUNS.c.job_id, slurm_ids)).order_by(RUNS.c.restart)
    for row in connection.execute(stored).mappings():
        runs[row["job_id"]].append(record_of(RunRecord, row, job_id=slurm_ids[row["job_id"]]))
    return known, runs


def _same(row: Row, read: AccountingJob) -> bool:
    """Tell whether a stored job is the one that accounting has: its time and the other's meet, or nearly."""
    if row["submit_time"] == read.job.submit_time:
        return True
    if row["import_time"] is not None and row["user_name"] != read.job.user:
        return False
    end = row["end_time"]
    after = end is not None and read.job.submit_time - end > SAME_JOB_S
    return not after and row["submit_time"] - (read.job.end_time or 0.0) <= SAME_JOB_S


def _is_block(one: AccountingJob, blocks: Mapping[int, Sequence[float]]) -> bool:
    """Tell whether it is a start of a block that the companion has seen, by the starts of blocks that there are."""
    starts = ((run.start_time or 0.0, start) for run in one.runs for start in blocks[run.job_id])
    return any(abs(known - start) <= SAME_START_S for known, start in starts)


def _joined(row: Row, before: Sequence[RunRecord], read: AccountingJob) -> AccountingJob | None:
    """Return stored and read runs merged; None if nothing new was read.

    An import of a later span knows only a requeued job's later runs.
    """
    job = read.job
    runs = {run.start_time: run for run in [*before, *read.runs]}
    numbered = tuple(runs[start] for start in sorted(runs, key=lambda start: start or 0.0))
    if len({run.restart for run in numbered}) < len(numbered):
        numbered = tuple(replace(run, restart=number) for number, run in enumerate(numbered))
    first = row["submit_time"] <= job.submit_time
    if first:
        job = replace(job, submit_time=row["submit_time"], requested_shape=record_of(JobRecord, row).requested_shape)
    if row["end_time"] > (job.end_time or 0.0):
        names = ("name", "account", "partition", "state", "end_time", "exit_code")
        job = replace(job, **{name: row[name] for name in names})
    job = replace(job, restart=max([job.restart, row["restart"], *(run.restart for run in numbered)]))
    stored = {name: row[name] for name in row_of(job)}
    if numbered == tuple(before) and stored == row_of(job):
        return None
    return AccountingJob(job, numbered, read.time_limit_s)


def _insert(connection: Connection, cluster: int, one: AccountingJob) -> int:
    result = connection.execute(JOBS.insert().values(cluster_id=cluster, **row_of(one.job)))
    key = int(result.inserted_primary_key[0])  # type: ignore[index]
    _insert_runs(connection, key, one.runs)
    return key


def _replace(connection: Connection, cluster: int, key: int, one: AccountingJob) -> None:
    connection.execute(JOBS.update().where(JOBS.c.id == key).values(**row_of(one.job)))
    # Nobody reported on them, so that nothing hangs on them.
    connection.execute(RUNS.delete().where(RUNS.c.job_id == key))
    _insert_runs(connection, key, one.runs)


def _insert_runs(connection: Connection, key: int, runs: Sequence[RunRecord]) -> None:
    rows = [{**row_of(run), "job_id": key} for run in runs]
    if rows:
        connection.execute(RUNS.insert(), rows)


class AccountingStore(Transactions):
    """The jobs of a `Store` that Slurm's accounting knows."""

    @writing
    def add_accounting(self, connection: Connection, jobs: Sequence[AccountingJob]) -> Imported:
        """Store jobs that have ended, as accounting has them, in one transaction.

        A job that the companion has seen stays as it is; of one that is known from accounting, what is new is added.
        """
        known, runs = _known(connection, self._cluster, [one.job.job_id for one in jobs])
        blocks = started_blocks(connection, self._cluster, [one.job.job_id for one in jobs])
        done, marks, now = Counter[str](), [], time.time()
        for one in jobs:
            row = next((row for row in known[one.job.job_id] if _same(row, one)), None)
            if _is_block(one, blocks) or (row is not None and row["import_time"] is None):
                done["companion"] += 1
                continue
            if row is None:
                done["new"] += 1
                key = _insert(connection, self._cluster, one)
            elif (after := _joined(row, runs[row["id"]], one)) is not None:
                done["changed"] += 1
                key = row["id"]
                _replace(connection, self._cluster, key, after)
            else:
                done["same"] += 1
                continue
            marks.append({"job_id": key, "time_limit_s": one.time_limit_s, "import_time": now})
        add_or_replace(connection, ACCOUNTING, ("job_id",), marks)
        return Imported(**done)

    @reading
    def past_jobs(self, connection: Connection, since: float, until: float) -> list[PastJob]:
        """The jobs that were submitted in that span and have ended, by their submission."""
        ended = run_end()
        length = ended - RUNS.c.start_time
        gpus = RUNS.c.nodes * RUNS.c.gpus_per_node
        of_job = ("job_id", "name", "user_name", "account", "partition", "state", "submit_time")
        query = (
            select(
                *(JOBS.c[name] for name in of_job),
                func.min(RUNS.c.start_time),
                JOBS.c.end_time,
                func.count(RUNS.c.start_time),
                func.coalesce(func.sum(length), 0.0),
                func.coalesce(func.max(gpus), 0),
                func.coalesce(func.sum(length * gpus), 0.0),
            )
            .select_from(JOBS)
            .outerjoin(RUNS, RUNS.c.job_id == JOBS.c.id)
            .where(JOBS.c.cluster_id == self._cluster, JOBS.c.end_time.is_not(None))
            .where(JOBS.c.submit_time >= since, JOBS.c.submit_time < until)
            .group_by(JOBS.c.id)
            .order_by(JOBS.c.submit_time, JOBS.c.job_id)
        )
        return [PastJob._make(row) for row in connection.execute(query)]

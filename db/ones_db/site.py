"""Records of a site: nodes, actions of people, the companion's health, and ended jobs in Slurm's accounting.

A field means the same as the column with its name in `ones_db.tables`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, func, select, text

from ones_db.engine import LeaderRecord, Transactions, add_new, add_or_replace, leader_of, noting, reading
from ones_db.jobs import CLUSTER, among, started_blocks
from ones_db.records import JobRecord, RunRecord
from ones_db.rows import record_of, row_of
from ones_db.tables import ACCOUNTING, ACTIONS, CHANGES, HEALTH, JOBS, NODES, OTHER_GPUS, RUNS


class NodeRecord(NamedTuple):
    """Present state of a node."""

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
    """Health of the leading companion at its last tick."""

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
"""State of a node that Slurm does not list any more."""


_NEWEST = (
    select(CHANGES.c.node_id, func.max(CHANGES.c.time).label("time"))
    .join(NODES, NODES.c.id == CHANGES.c.node_id)
    .where(NODES.c.cluster_id == CLUSTER)
    .group_by(CHANGES.c.node_id)
    .subquery()
)
_LAST = (
    select(NODES.c.name, *(CHANGES.c[name] for name in NodeRecord._fields if name != "name"))
    .join(CHANGES, CHANGES.c.node_id == NODES.c.id)
    .join(_NEWEST, and_(_NEWEST.c.node_id == CHANGES.c.node_id, _NEWEST.c.time == CHANGES.c.time))
)


def _last(connection: Connection, cluster: int) -> dict[str, NodeRecord]:
    return {row.name: NodeRecord(*row) for row in connection.execute(_LAST, {"cluster": cluster})}


class SiteStore(Transactions):
    """Part of a `Store`: nodes, actions, the companion's health and the leader."""

    @noting
    def record_nodes(self, connection: Connection, time: float, nodes_now: Collection[NodeRecord]) -> None:
        """Store the state of each node that has changed. A node that Slurm no longer lists becomes `GONE`."""
        last = _last(connection, self._cluster)
        there = {node.name for node in nodes_now}
        lost = [node for name, node in last.items() if name not in there and node.state != GONE]
        changed = [node for node in nodes_now if last.get(node.name) != node]
        changed += [node._replace(state=GONE, usable=False) for node in lost]
        if not changed:
            return
        add_new(connection, NODES, [{"cluster_id": self._cluster, "name": node.name} for node in changed])
        known = connection.execute(select(NODES).where(NODES.c.cluster_id == self._cluster))
        keys = {row.name: row.id for row in known}
        newest = connection.scalar(select(func.max(CHANGES.c.time)).where(among(CHANGES.c.node_id, keys.values())))
        # After the clock was set back the state before must not count as the newest.
        time = time if newest is None or time >= newest else newest + 0.001
        rows = [{**node._asdict(), "node_id": keys[node.name], "time": time} for node in changed]
        for row in rows:
            del row["name"]
        add_or_replace(connection, CHANGES, ("node_id", "time"), rows)

    @reading
    def nodes(self, connection: Connection) -> list[NodeRecord]:
        """Return the present state of each node, by name."""
        return [node for _, node in sorted(_last(connection, self._cluster).items()) if node.state != GONE]

    @noting
    def record_other_gpus(self, connection: Connection, time: float, gpus: int) -> None:
        """Store how many GPUs are held by jobs that did not opt in, from this time on."""
        row = {"cluster_id": self._cluster, "time": time, "gpus": gpus}
        add_or_replace(connection, OTHER_GPUS, ("cluster_id", "time"), [row])

    @reading
    def other_gpus(self, connection: Connection, since: float) -> list[tuple[float, int]]:
        """Return (time, GPUs of jobs that did not opt in) for each change since a time and the last one before."""
        own, time = OTHER_GPUS.c.cluster_id == self._cluster, OTHER_GPUS.c.time
        first = select(func.max(time)).where(own, time <= since).scalar_subquery()
        query = select(time, OTHER_GPUS.c.gpus).where(own, time >= func.coalesce(first, since)).order_by(time)
        return [(at, gpus) for at, gpus in connection.execute(query)]

    @noting
    def add_action(self, connection: Connection, record: ActionRecord) -> None:
        """Store an action. If the same person, action and time are stored already, store nothing."""
        add_new(connection, ACTIONS, [{**row_of(record), "cluster_id": self._cluster}])

    @noting
    def record_health(self, connection: Connection, record: HealthRecord) -> None:
        """Store the companion's health in place of the last."""
        add_or_replace(connection, HEALTH, ("cluster_id",), [{"cluster_id": self._cluster, **record._asdict()}])

    @reading
    def health(self, connection: Connection) -> HealthRecord | None:
        """Return the health of the companion that led last; None if there was never one."""
        columns = [HEALTH.c[name] for name in HealthRecord._fields]
        row = connection.execute(select(*columns).where(HEALTH.c.cluster_id == self._cluster)).first()
        return None if row is None else HealthRecord(*row)

    @reading
    def leader(self, connection: Connection) -> LeaderRecord | None:
        """Return the companion that leads or led last; None if there was never one."""
        return leader_of(connection, self._cluster)


@dataclass(frozen=True)
class AccountingJob:
    """An ended job in Slurm's accounting."""

    job: JobRecord
    runs: tuple[RunRecord, ...]
    """Runs of the job in order of their starts; empty if it never started."""
    time_limit_s: float | None = None


class Imported(NamedTuple):
    """Numbers of jobs in an import of accounting."""

    new: int = 0
    changed: int = 0
    """Number of jobs that an earlier import had stored, and to which this import added something."""
    same: int = 0
    companion: int = 0
    """Number of jobs that the companion has seen. An import does not change them."""

    def plus(self, other: Imported) -> Imported:
        """Return the sum of two imports."""
        return Imported(*(a + b for a, b in zip(self, other, strict=True)))


class PastJob(NamedTuple):
    """An ended job, from accounting or from the companion. Times are in seconds."""

    job_id: int
    name: str
    user: str
    account: str
    partition: str
    state: str
    submit_time: float
    start_time: float | None
    """Start of the job's first run; None if the job never started."""
    end_time: float
    runs: int
    run_s: float
    """Sum of the seconds of all runs."""
    gpus: int
    """Number of GPUs of the largest run."""
    gpu_s: float
    """Sum of the GPU-seconds of all runs."""


SAME_JOB_S = 86_400.0
"""Longest time between two records of the same job, in seconds. Records with the same id that are further apart are of
two jobs. Slurm requeues an ended job only sooner than this, and reuses an id only much later."""

SAME_START_S = 5.0
"""Largest difference, in seconds, between the start of a task in slurmctld and in accounting."""

Row = Mapping[Any, Any]


def _known(
    connection: Connection, cluster: int, job_ids: Sequence[int]
) -> tuple[dict[int, list[Row]], dict[int, list[RunRecord]]]:
    """Return the stored jobs by job id, and by jobs.id the runs of jobs that are known only from accounting."""
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
    """Return True if the stored job is the one read from accounting: their times are at most `SAME_JOB_S` apart."""
    if row["submit_time"] == read.job.submit_time:
        return True
    if row["import_time"] is not None and row["user_name"] != read.job.user:
        return False
    end = row["end_time"]
    after = end is not None and read.job.submit_time - end > SAME_JOB_S
    return not after and row["submit_time"] - (read.job.end_time or 0.0) <= SAME_JOB_S


def _is_block(one: AccountingJob, blocks: Mapping[int, Sequence[float]]) -> bool:
    starts = ((run.start_time or 0.0, start) for run in one.runs for start in blocks[run.job_id])
    return any(abs(known - start) <= SAME_START_S for known, start in starts)


def _joined(row: Row, before: Sequence[RunRecord], read: AccountingJob) -> AccountingJob | None:
    """Return the job with its stored and its imported runs, since either may lack some; None if nothing is new."""
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


def _put(connection: Connection, cluster: int, key: int | None, one: AccountingJob) -> int:
    """Store a job. If `key` (jobs.id) is given, replace the job with this key. Return its key."""
    if key is None:
        result = connection.execute(JOBS.insert().values(cluster_id=cluster, **row_of(one.job)))
        key = int(result.inserted_primary_key[0])  # type: ignore[index]
    else:
        connection.execute(JOBS.update().where(JOBS.c.id == key).values(**row_of(one.job)))
        # Nobody reported on them, so that nothing hangs on them.
        connection.execute(RUNS.delete().where(RUNS.c.job_id == key))
    if one.runs:
        connection.execute(RUNS.insert(), [{**row_of(run), "job_id": key} for run in one.runs])
    return key


class AccountingStore(Transactions):
    """Part of a `Store`: jobs from Slurm's accounting."""

    @noting
    def add_accounting(self, connection: Connection, jobs: Sequence[AccountingJob]) -> Imported:
        """Store ended jobs of accounting in one transaction. Return how many were new or changed.

        A job that the companion has seen is not changed. A job known from accounting gets only what is new.
        """
        self._forget()
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
                key = _put(connection, self._cluster, None, one)
            elif (after := _joined(row, runs[row["id"]], one)) is not None:
                done["changed"] += 1
                key = _put(connection, self._cluster, row["id"], after)
            else:
                done["same"] += 1
                continue
            marks.append({"job_id": key, "time_limit_s": one.time_limit_s, "import_time": now})
        add_or_replace(connection, ACCOUNTING, ("job_id",), marks)
        return Imported(**done)

    @reading
    def past_jobs(self, connection: Connection, since: float, until: float) -> list[PastJob]:
        """Return the ended jobs that were submitted from `since` until before `until`, in order of submission."""
        query = text(
            "SELECT job_id, name, user_name, account, partition, state, submit_time, start_time, end_time, runs,"
            " COALESCE(running_s, 0.0), COALESCE(largest_gpus, 0), COALESCE(gpu_hours, 0.0) * 3600.0 FROM job_summary"
            " WHERE cluster = :cluster AND end_time IS NOT NULL AND submit_time >= :since AND submit_time < :until"
            " ORDER BY submit_time, job_id"
        )
        given = {"cluster": self.cluster, "since": since, "until": until}
        return [PastJob._make(row) for row in connection.execute(query, given)]

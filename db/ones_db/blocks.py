"""Blocks of jobs that are job arrays, as Slurm has them, and their memberships, as the jobs report them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, select

from ones_db.engine import add_or_replace
from ones_db.jobs import alive, among, key_of, keys_of, lasted, latest, newest
from ones_db.records import BlockRecord, HeldRecord, MembershipRecord
from ones_db.rows import record_of, row_of
from ones_db.tables import BLOCKS, JOBS, MEMBERSHIPS, RUNS
from ones_wrapper.protocol import Membership


def record_blocks(connection: Connection, cluster: int, records: Iterable[BlockRecord]) -> None:
    given = list(records)
    keys = keys_of(connection, cluster, {record.job_id for record in given})
    rows = [{**row_of(record), "job_id": keys[record.job_id]} for record in given]
    add_or_replace(connection, BLOCKS, ("job_id", "task", "restart"), rows)


def blocks(connection: Connection, cluster: int, job_id: int) -> list[BlockRecord]:
    query = select(BLOCKS).where(BLOCKS.c.job_id == key_of(connection, cluster, job_id))
    query = query.order_by(BLOCKS.c.start_time, BLOCKS.c.task, BLOCKS.c.restart)
    return [record_of(BlockRecord, row, job_id=job_id) for row in connection.execute(query).mappings()]


def open_blocks(connection: Connection, cluster: int) -> list[BlockRecord]:
    query = (
        select(BLOCKS, JOBS.c.job_id.label("slurm_job"))
        .join(JOBS, JOBS.c.id == BLOCKS.c.job_id)
        .where(newest(cluster), BLOCKS.c.end_time.is_(None))
        .order_by(JOBS.c.id, BLOCKS.c.start_time, BLOCKS.c.task)
    )
    return [record_of(BlockRecord, row, job_id=row["slurm_job"]) for row in connection.execute(query).mappings()]


def held(connection: Connection, cluster: int) -> list[HeldRecord]:
    """What jobs hold on each node now: by their open blocks, and by the open runs of jobs that have none."""
    found = [row for query in _held(cluster) for row in connection.execute(query)]
    rows = [(job_id, nodes.split(",") if nodes else [], gpus) for job_id, nodes, gpus in found]
    return [HeldRecord(job_id, node, gpus or 0) for job_id, nodes, gpus in rows for node in nodes]


@cache
def _held(cluster: int) -> tuple[Select[Any], Select[Any]]:
    has_blocks = select(BLOCKS.c.job_id).where(BLOCKS.c.job_id == JOBS.c.id).exists()
    runs = (
        select(JOBS.c.job_id, RUNS.c.node_list, RUNS.c.gpus_per_node)
        .join(RUNS, and_(RUNS.c.job_id == JOBS.c.id, RUNS.c.restart == JOBS.c.restart))
        .where(alive(cluster), latest(cluster), RUNS.c.end_time.is_(None), ~has_blocks)
        .order_by(JOBS.c.job_id)
    )
    blocks = (
        select(JOBS.c.job_id, BLOCKS.c.node_list, BLOCKS.c.gpus_per_node)
        .join(BLOCKS, BLOCKS.c.job_id == JOBS.c.id)
        .where(alive(cluster), latest(cluster), BLOCKS.c.end_time.is_(None))
        .order_by(JOBS.c.id, BLOCKS.c.start_time, BLOCKS.c.task)
    )
    return runs, blocks


def started_blocks(connection: Connection, cluster: int, slurm_ids: Collection[int]) -> dict[int, list[float]]:
    """When blocks started whose tasks Slurm knows by these ids."""
    found: dict[int, list[float]] = defaultdict(list)
    query = (
        select(BLOCKS.c.slurm_id, BLOCKS.c.start_time)
        .join(JOBS, JOBS.c.id == BLOCKS.c.job_id)
        .where(JOBS.c.cluster_id == cluster, among(BLOCKS.c.slurm_id, slurm_ids))
    )
    for slurm_id, start in connection.execute(query):
        found[slurm_id].append(start)
    return found


def memberships(
    connection: Connection, cluster: int, job_id: int, limit: int, order: int | None = None
) -> list[MembershipRecord]:
    query = (
        _memberships()
        .where(RUNS.c.job_id == key_of(connection, cluster, job_id))
        .order_by(RUNS.c.restart.desc(), MEMBERSHIPS.c.number.desc())
        .limit(limit)
    )
    if order is not None:
        query = query.where(MEMBERSHIPS.c.order_number == order)
    return [membership_record(row, job_id) for row in connection.execute(query).mappings()]


def _memberships() -> Any:
    return select(MEMBERSHIPS, RUNS.c.restart.label("term")).join(RUNS, RUNS.c.id == MEMBERSHIPS.c.run_id)


def members_after(connection: Connection, runs: Iterable[tuple[int, int]]) -> Iterable[Row[Any]]:
    """The memberships of runs (runs.id) after a report each, with their jobs' ids, in order."""
    # Written out, and past SQLAlchemy: it would compile it at each look, since the numbers differ, and keep hundreds.
    new = " OR ".join(f"(memberships.run_id = {key:d} AND memberships.number > {number:d})" for key, number in runs)
    return connection.exec_driver_sql(f"{_WITH_JOBS} WHERE {new} ORDER BY memberships.number")


def all_members(
    connection: Connection, cluster: int, since: float | None = None, job_id: int | None = None
) -> dict[int, list[MembershipRecord]]:
    """All memberships of a cluster's jobs, by the run (runs.id), in order; of runs that lasted until `since` alone, and
    of jobs with that id alone, where these are given."""
    found: dict[int, list[MembershipRecord]] = defaultdict(list)
    query, given = _all_members(cluster, recent=since is not None), {} if since is None else {"since": since}
    if job_id is not None:
        query = query.where(JOBS.c.job_id == job_id)
    for row in connection.execute(query, given).mappings():
        found[row["run_id"]].append(membership_record(row, row["slurm_id"]))
    return found


@cache
def _all_members(cluster: int, *, recent: bool) -> Any:
    query = _with_jobs().order_by(MEMBERSHIPS.c.run_id, MEMBERSHIPS.c.number)
    return query.where(lasted(cluster) if recent else JOBS.c.cluster_id == cluster)


def _with_jobs() -> Any:
    return _memberships().add_columns(JOBS.c.job_id.label("slurm_id")).join(JOBS, JOBS.c.id == RUNS.c.job_id)


def membership_record(row: Mapping[Any, Any], job_id: int) -> MembershipRecord:
    """The record of a row of memberships, with its term."""
    return MembershipRecord(job_id, row["term"], row["number"], row["time"], record_of(Membership, row))


_WITH_JOBS = str(_with_jobs())

"""Decisions, with the reason for each job."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, case, func, or_, select

from ones_db.errors import UnknownRecord
from ones_db.jobs import alive, among, key_of, keys_of, latest, newest
from ones_db.reasons import Reason
from ones_db.records import AlternativeRecord, DecisionJobRecord, DecisionRecord
from ones_db.rows import reason_columns, record_of, row_of
from ones_db.tables import ALTERNATIVES, DECISION_JOBS, DECISIONS, JOBS


def add_decision(connection: Connection, cluster: int, record: DecisionRecord) -> int:
    keys = keys_of(connection, cluster, {job.job_id for job in record.jobs})
    known = connection.scalar(
        select(DECISIONS.c.id).where(
            DECISIONS.c.cluster_id == cluster,
            DECISIONS.c.time == record.time,
            DECISIONS.c.policy == record.policy,
        )
    )
    if known is not None:
        return int(known)
    values = row_of(record)
    del values["id"]
    if record.score is not None and math.isnan(record.score):
        values["score"] = None
    result = connection.execute(DECISIONS.insert().values(cluster_id=cluster, **values))
    key = int(result.inserted_primary_key[0])  # type: ignore[index]
    rows = [{**row_of(job), "decision_id": key, "job_id": keys[job.job_id]} for job in record.jobs]
    weighed = [
        {**row_of(one), "decision_id": key, "job_id": keys[job.job_id], "rank": rank}
        for job in record.jobs
        for rank, one in enumerate(job.alternatives)
    ]
    if rows:
        connection.execute(DECISION_JOBS.insert(), rows)
    if weighed:
        connection.execute(ALTERNATIVES.insert(), weighed)
    return key


def set_outcome(
    connection: Connection, cluster: int, decision_id: int, job_id: int, acted: bool, outcome: Reason
) -> None:
    job = key_of(connection, cluster, job_id)
    changed = connection.execute(
        DECISION_JOBS.update()
        .where(DECISION_JOBS.c.decision_id == decision_id, DECISION_JOBS.c.job_id == job)
        .values(acted=acted, **reason_columns("outcome", outcome))
    )
    if not changed.rowcount:
        raise UnknownRecord(f"decision {decision_id} says nothing of job {job_id}")


def decisions(connection: Connection, cluster: int, job_id: int, limit: int) -> list[DecisionRecord]:
    job = key_of(connection, cluster, job_id)
    query = (
        select(DECISIONS, DECISION_JOBS)
        .join(DECISION_JOBS, DECISION_JOBS.c.decision_id == DECISIONS.c.id)
        .where(DECISION_JOBS.c.job_id == job)
        .order_by(DECISIONS.c.time.desc(), DECISIONS.c.id.desc())
        .limit(limit)
    )
    rows = connection.execute(query).mappings().all()
    weighed = _alternatives(connection, [row["id"] for row in rows], [job])
    return [
        record_of(
            DecisionRecord,
            row,
            jobs=(record_of(DecisionJobRecord, row, job_id=job_id, alternatives=weighed.get((row["id"], job), ())),),
        )
        for row in rows
    ]


def newest_decisions(connection: Connection, cluster: int) -> dict[int, DecisionJobRecord]:
    found = connection.execute(_newest_decisions(cluster))
    names = tuple(found.keys())
    rows = (dict(zip(names, row, strict=True)) for row in found)
    return {row["slurm_id"]: record_of(DecisionJobRecord, row, job_id=row["slurm_id"]) for row in rows}


@cache
def _newest_decisions(cluster: int) -> Select[Any]:
    of_job = DECISION_JOBS.alias("of_job")
    last = select(func.max(of_job.c.decision_id)).where(of_job.c.job_id == JOBS.c.id).correlate(JOBS)
    return (
        select(DECISION_JOBS, JOBS.c.job_id.label("slurm_id"))
        .select_from(JOBS)
        .join(DECISION_JOBS, DECISION_JOBS.c.job_id == JOBS.c.id)
        .where(alive(cluster), latest(cluster), DECISION_JOBS.c.decision_id == last.scalar_subquery())
    )


def recent_decisions(
    connection: Connection, cluster: int, limit: int, most: int | None = None, user: str = ""
) -> list[DecisionRecord]:
    query = (
        select(DECISIONS)
        .where(DECISIONS.c.cluster_id == cluster)
        .order_by(DECISIONS.c.time.desc(), DECISIONS.c.id.desc())
        .limit(limit)
    )
    heads = connection.execute(query).mappings().all()
    lines = (
        select(DECISION_JOBS, JOBS.c.job_id.label("slurm_id"))
        .join(JOBS, JOBS.c.id == DECISION_JOBS.c.job_id)
        # What was decided of an earlier job with the same id is not the newest one's, nor its user's.
        .where(newest(cluster), among(DECISION_JOBS.c.decision_id, [row["id"] for row in heads]))
    )
    if user:
        lines = lines.where(JOBS.c.user_name == user)
    if most is not None:
        lines = _first(lines, most)
    jobs: dict[int, list[DecisionJobRecord]] = {row["id"]: [] for row in heads}
    found = sorted(connection.execute(lines).mappings(), key=lambda row: int(row["slurm_id"]))
    weighed = _alternatives(connection, list(jobs), {row["job_id"] for row in found} if user or most else None)
    for row in found:
        mine = weighed.get((row["decision_id"], row["job_id"]), ())
        jobs[row["decision_id"]].append(record_of(DecisionJobRecord, row, job_id=row["slurm_id"], alternatives=mine))
    return [record_of(DecisionRecord, row, jobs=tuple(jobs[row["id"]])) for row in heads]


def _first(lines: Select[Any], most: int) -> Select[Any]:
    """Of each decision so many jobs, those first that get another size."""
    pairs = (("nodes", "from_nodes"), ("gpus_per_node", "from_gpus_per_node"), ("batch", "from_batch"))
    changes = or_(*(DECISION_JOBS.c[new].is_distinct_from(DECISION_JOBS.c[old]) for new, old in pairs))
    order = (case((changes, 0), else_=1), JOBS.c.job_id)
    place = func.row_number().over(partition_by=DECISION_JOBS.c.decision_id, order_by=order)
    ranked = lines.add_columns(place.label("place")).subquery()
    return select(ranked).where(ranked.c.place <= most)


def _alternatives(
    connection: Connection, decision_ids: Collection[int], jobs: Collection[int] | None = None
) -> dict[tuple[int, int], tuple[AlternativeRecord, ...]]:
    """What decisions weighed, for these jobs (jobs.id) or all, by decision and job."""
    query = select(ALTERNATIVES).where(among(ALTERNATIVES.c.decision_id, decision_ids)).order_by(ALTERNATIVES.c.rank)
    if jobs is not None:
        query = query.where(among(ALTERNATIVES.c.job_id, jobs))
    found: dict[tuple[int, int], tuple[AlternativeRecord, ...]] = {}
    for row in connection.execute(query).mappings():
        key = (row["decision_id"], row["job_id"])
        found[key] = (*found.get(key, ()), record_of(AlternativeRecord, row))
    return found

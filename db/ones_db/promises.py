"""Deadlines that a companion promised, or refused to promise."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import Connection, select

from ones_db.engine import add_or_replace
from ones_db.jobs import among, keys_of, newest
from ones_db.records import PromiseRecord
from ones_db.rows import record_of, row_of
from ones_db.tables import JOBS, PROMISES


def record_promises(connection: Connection, cluster: int, records: Iterable[PromiseRecord]) -> None:
    given = list(records)
    keys = keys_of(connection, cluster, {record.job_id for record in given})
    rows = [{**row_of(record), "job_id": keys[record.job_id]} for record in given]
    add_or_replace(connection, PROMISES, ("job_id",), rows)


def promises(connection: Connection, cluster: int, job_ids: Collection[int] | None) -> dict[int, PromiseRecord]:
    query = (
        select(PROMISES, JOBS.c.job_id.label("slurm_job"))
        .join(JOBS, JOBS.c.id == PROMISES.c.job_id)
        .where(newest(cluster), JOBS.c.end_time.is_(None) if job_ids is None else among(JOBS.c.job_id, job_ids))
        .order_by(JOBS.c.job_id)
    )
    return {
        row["slurm_job"]: record_of(PromiseRecord, row, job_id=row["slurm_job"])
        for row in connection.execute(query).mappings()
    }

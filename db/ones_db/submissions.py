"""Jobs as they were submitted, and the GPU-seconds that each took: what expected arrivals are learned from."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Table, func, select

from ones_db.jobs import run_end
from ones_db.tables import BLOCKS, JOBS, RUNS


class Submission(NamedTuple):
    """An elastic job; times are Unix seconds."""

    partition: str
    user: str
    submit_time: float
    end_time: float | None
    """None until then."""
    gpu_s: float
    """GPU-seconds that it held so far, of a job of blocks those that its blocks held."""


def submissions(connection: Connection, cluster: int, now: float, limit: int) -> list[Submission]:
    of_blocks = (
        select(func.sum((func.coalesce(BLOCKS.c.end_time, JOBS.c.end_time, now) - BLOCKS.c.start_time) * _gpus(BLOCKS)))
        .where(BLOCKS.c.job_id == JOBS.c.id)
        .scalar_subquery()
    )
    of_runs = (
        select(func.sum((func.coalesce(run_end(), now) - RUNS.c.start_time) * _gpus(RUNS)))
        .where(RUNS.c.job_id == JOBS.c.id)
        .correlate(JOBS)
        .scalar_subquery()
    )
    query = (
        select(
            JOBS.c.partition,
            JOBS.c.user_name,
            JOBS.c.submit_time,
            JOBS.c.end_time,
            func.coalesce(of_blocks, of_runs, 0.0),
        )
        .where(JOBS.c.cluster_id == cluster, JOBS.c.elastic)
        # Newest first by the key, of which there is an index.
        .order_by(JOBS.c.id.desc())
        .limit(limit)
    )
    return [Submission._make(row) for row in connection.execute(query)]


def _gpus(of: Table) -> ColumnElement[float]:
    # With a point: whole numbers may overflow where a job told nonsense of its shape.
    return of.c.nodes * (1.0 * of.c.gpus_per_node)

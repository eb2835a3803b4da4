"""Summaries for people: a line for each job, and a bar of a timeline for each run.

`JobSummary` defines the line of a job: the SQL and the meaning of each field. The view `job_summary` has the same
columns, and a few more for researchers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select, text

from ones_db.engine import Transactions, reading
from ones_db.jobs import decode_limits, newest
from ones_db.rows import KEPT, record_of
from ones_db.shape import Shape
from ones_db.tables import JOBS
from ones_db.views import END, FROM_JOB, M_EACH, M_NODES, OBSERVED, SELECTED, JobSummary, replicas, spelled
from ones_wrapper.protocol import ProtocolError
from ones_wrapper.protocol.limits import StrategyLimits

_LATEST = """NOT EXISTS (SELECT 1 FROM jobs later WHERE later.cluster_id = :cluster AND later.job_id = j.job_id
        AND later.submit_time > j.submit_time)"""
_OPEN = "SELECT o.id FROM jobs o WHERE o.cluster_id = :cluster AND o.end_time IS NULL"
_ENDED = f"""SELECT l.id FROM (SELECT j.id FROM jobs j WHERE j.cluster_id = :cluster AND j.end_time IS NOT NULL
        AND {OBSERVED}{{}} ORDER BY j.end_time DESC, j.id DESC LIMIT :ended) l"""


class TimelineRow(NamedTuple):
    """A run for a timeline, or the part of a run between two changes of its blocks. `end` is None until it ends."""

    job_id: int
    name: str
    user: str
    partition: str
    asked: int
    """GPUs that the job's user requested. All GPUs beyond them are growth."""
    restart: int
    shape: Shape
    start: float
    end: float | None


class SummaryStore(Transactions):
    """Part of a `Store`: summaries for people."""

    def job_summaries(self, job_ids: Sequence[int] | None = None, *, ended: int | None = None) -> list[JobSummary]:
        """Return a line for each of these jobs, or for all that a companion has seen, in order of submission.

        With `ended`, at most this number of ended jobs, the newest, is included.
        """
        if job_ids is not None:
            # Written out, since databases limit the parameters of a statement.
            listed = ", ".join(map(str, map(int, job_ids))) or "NULL"
            return self._lines(f"j.cluster_id = :cluster AND j.job_id IN ({listed})", {})
        if ended is None:
            return self._lines(f"j.cluster_id = :cluster AND {OBSERVED}", {})
        # By their keys, each found by the index of ends: if the cluster is a condition too, SQLite scans all its jobs.
        return self._lines(f"{OBSERVED} AND j.id IN ({_OPEN} UNION ALL {_ENDED.format('')})", {"ended": ended})

    def ended_of(self, user: str, count: int) -> list[JobSummary]:
        """Return a line for each of the `count` jobs of a user that ended last."""
        return self._lines(f"j.id IN ({_ENDED.format(' AND j.user_name = :user')})", {"ended": count, "user": user})

    @reading
    def _lines(self, connection: Connection, condition: str, given: Mapping[str, Any]) -> list[JobSummary]:
        sql = f"SELECT {SELECTED}, j.max_local_batch FROM {FROM_JOB} WHERE {_LATEST} AND {condition}"
        query = text(spelled(f"{sql} ORDER BY j.submit_time, j.job_id", connection.dialect.name))
        found = connection.execute(query, {"cluster": self._cluster, **given})
        names = tuple(found.keys())
        return [_summary(names, tuple(row)) for row in found.all()]

    @reading
    def ask(self, connection: Connection, sql: str, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the rows of our own SQL over the views. SQL of users goes through `query.Reader`, which limits it."""
        return [dict(row) for row in connection.execute(text(sql), values).mappings()]

    @reading
    def strategies(self, connection: Connection) -> dict[str, int]:
        """Return the number of jobs that have not ended for each training strategy, the most frequent first."""
        query = (
            select(JOBS.c.strategy, func.count())
            .where(newest(self._cluster), JOBS.c.end_time.is_(None), JOBS.c.strategy.is_not(None))
            .group_by(JOBS.c.strategy)
            .order_by(func.count().desc(), JOBS.c.strategy)
        )
        return {row[0]: row[1] for row in connection.execute(query)}

    @reading
    def timeline(
        self, connection: Connection, since: float | None = None, job_id: int | None = None
    ) -> list[TimelineRow]:
        """Return the started runs of jobs that a companion has seen, in order of their starts.

        `since` leaves out runs that ended before. `job_id` selects the newest job with this id.
        """
        condition = "j.cluster_id = :cluster" if since is None else _SINCE
        if job_id is not None:
            condition += f" AND j.job_id = :job_id AND {_LATEST}"
        given = {"cluster": self._cluster, "since": since, "job_id": job_id}
        asked = {name: value for name, value in given.items() if value is not None}
        rows = connection.execute(text(_TIMELINE.format(condition)), asked)
        return [part for _, run in groupby(rows, key=lambda row: row.run) for part in _parts(run)]


@lru_cache(maxsize=KEPT)
def _summary(names: tuple[str, ...], values: tuple[Any, ...]) -> JobSummary:
    """Return the summary in a row. Equal rows give the same object."""
    row = dict(zip(names, values, strict=True))
    limits: StrategyLimits | None = None
    with suppress(ProtocolError):
        limits = decode_limits(row["limits"]) if row["limits"] is not None else None
    gpus, most, passes = (row["nodes"] or 0) * (row["gpus_per_node"] or 0), row["max_local_batch"], row["passes"]
    if passes is None and row["batch"] is not None and gpus and most:
        # Said when it changes; until then, as many as the samples of a GPU take. Of whole numbers ⌈a / b⌉ = -(-a // b).
        local = -(-row["batch"] // replicas(limits, gpus))
        passes = max(-(-local // most), 1)
    flags = {name: bool(row[name]) for name in ("elastic", "running")}
    return record_of(JobSummary, row, limits=limits, passes=passes, **flags)


_SINCE = f"""j.id IN ({_OPEN} UNION ALL SELECT e.id FROM jobs e WHERE e.cluster_id = :cluster AND e.end_time >= :since)
        AND COALESCE({END}, :since) >= :since"""
"""SQL condition on a run r of a job j: it had not ended at the time `since`. It selects jobs by keys, for speed."""

_TIMELINE = f"""
    SELECT j.job_id, j.name, j.user_name, j.partition, j.requested_nodes * j.requested_gpus_per_node, r.restart,
        r.nodes, r.gpus_per_node, r.start_time, {END}, r.id AS run, m.time, {M_NODES}, {M_EACH}
    FROM jobs j CROSS JOIN runs r LEFT JOIN memberships m ON m.run_id = r.id
    WHERE r.job_id = j.id AND r.start_time IS NOT NULL AND {OBSERVED} AND {{}}
    ORDER BY r.start_time, j.job_id, r.id, m.number"""


def _parts(rows: Iterable[Any]) -> list[TimelineRow]:
    """Return the parts of a run between changes of its blocks. Each row has the run and a membership, or nulls."""
    parts: list[TimelineRow] = []
    for *who, nodes, gpus_per_node, start, end, _, time, m_nodes, m_each in rows:
        if not parts:
            # Who trains from the start on is known a moment after it.
            shape = Shape(nodes, gpus_per_node) if time is None else Shape(m_nodes, m_each)
            parts.append(TimelineRow._make((*who, shape, start, end)))
            continue
        last, shape = parts.pop(), Shape(m_nodes, m_each)
        time = max(last.start, time if last.end is None else min(time, last.end))
        if time != last.start and last.shape != shape:
            parts.append(last._replace(end=time))
            last = last._replace(start=time)
        parts.append(last._replace(shape=shape))
    return parts

"""Summaries for people: a line for each job, and a bar for each run.

`JobSummary` declares the line of a job: each field with its SQL and its meaning. The view `job_summary` has the same
columns, and a few more for researchers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from sqlalchemy import Connection, Select, func, select, text

from ones_db.engine import Transactions, reading
from ones_db.history import size_of
from ones_db.jobs import all_members, decode_limits, lasted, newest, observed, run_end
from ones_db.records import MembershipRecord
from ones_db.rows import COLUMNS, KEPT, record_of, shape_names
from ones_db.shape import Shape
from ones_db.tables import JOBS, RUNS
from ones_db.view import (
    BEGAN,
    BLOCK_HOURS,
    CLUSTER,
    GPUS,
    OBSERVED,
    RESIZED,
    SIZES,
    TERM_HOURS,
    UNTIL,
    Column,
    View,
    of_runs,
    said,
    spelled,
)
from ones_wrapper.protocol import ProtocolError
from ones_wrapper.protocol.limits import StrategyLimits


class Of(NamedTuple):
    """SQL, over the tables of `_FROM`, and meaning of a column of a job's summary."""

    sql: str
    meaning: str


def _newest(table: str, value: str, run: str, condition: str = "") -> str:
    return f"(SELECT {value} FROM {table} t WHERE t.run_id = {run}.id{condition} ORDER BY t.number DESC LIMIT 1)"


def _since_hello(table: str, alias: str) -> str:
    last = _newest(table, "t.number", "n", " AND t.number > COALESCE(n.hello_number, 0)")
    return f"LEFT JOIN {table} {alias} ON {alias}.run_id = n.id AND {alias}.number = {last}"


def _newest_epoch(value: str) -> str:
    return f"""(SELECT e.{value} FROM runs r CROSS JOIN epochs e WHERE e.run_id = r.id AND r.job_id = j.id
            AND e.{value} IS NOT NULL ORDER BY r.restart DESC, e.number DESC LIMIT 1)"""


def _over_runs(count: str) -> str:
    return f"(SELECT CAST(COALESCE(SUM(r.{count}), 0) AS BIGINT) FROM runs r WHERE r.job_id = j.id)"


# A change of the blocks brings a batch too; in how many passes, it does not say.
_BY_BLOCKS = "COALESCE(m.number, 0) > COALESCE(b.number, 0)"
_BATCH = f"COALESCE(CASE WHEN {_BY_BLOCKS} THEN m.batch ELSE b.batch END, n.batch, p.batch)"
_PASSES = f"CASE WHEN {_BY_BLOCKS} THEN NULL ELSE b.passes END"
_STARTED = "(SELECT MIN(r.start_time) FROM runs r WHERE r.job_id = j.id)"


@dataclass(frozen=True)
class JobSummary:
    """Summary of a job: one line of the table of jobs."""

    job_id: Annotated[int, Of("j.job_id", "Slurm's job id")]
    submit_time: Annotated[
        float, Of("j.submit_time", "first submission, Unix seconds; tells jobs apart that had the same id")
    ]
    name: Annotated[str, Of("j.name", "name of the job")]
    user: Annotated[str, Of("j.user_name", "its owner")]
    account: Annotated[str, Of("j.account", "account it is charged to")]
    partition: Annotated[str, Of("j.partition", "partition it was last seen in")]
    state: Annotated[str, Of("j.state", "base state, as Slurm names it")]
    elastic: Annotated[bool, Of("j.elastic", "opted in, and nothing speaks against resizing it")]
    refusal: Annotated[str, Of("j.refusal", "why it is not elastic, in words; empty if it is")]
    refusal_code: Annotated[str, Of("j.refusal_code", "code of that reason")]
    report_note: Annotated[
        str, Of("j.report_note", "part of its directory or reports that could not be believed, in words")
    ]
    start_time: Annotated[float | None, Of(_STARTED, "first start, Unix seconds")]
    end_time: Annotated[float | None, Of("j.end_time", "end, Unix seconds; null until then")]
    jct_s: Annotated[
        float | None,
        Of("j.end_time - j.submit_time", "job completion time: submission to end, seconds; null until the end"),
    ]
    shape: Annotated[
        Shape | None,
        Of("n.nodes", "nodes of its newest run; null if it has not run"),
        Of("n.gpus_per_node", "GPUs per node of its newest run"),
    ]
    running: Annotated[
        bool, Of("n.restart = j.restart AND n.end_time IS NULL AND j.end_time IS NULL", "its newest run has not ended")
    ]
    batch: Annotated[int | None, Of(_BATCH, "global batch last in force, samples")]
    passes: Annotated[int | None, Of(_PASSES, "forward passes per optimizer step, if the job has reported them")]
    samples_per_s: Annotated[
        float | None,
        Of(
            _newest("throughput", "1.0 * t.samples / t.seconds", "p", " AND t.seconds > 1e-6"),
            "throughput that it reported last, samples/s",
        ),
    ]
    epoch: Annotated[int | None, Of("p.epoch", "epochs done")]
    epochs: Annotated[int | None, Of("j.epochs", "epochs it means to train; 0 if it does not say")]
    cursor: Annotated[int | None, Of("p.cursor", "samples of the epoch already used")]
    dataset: Annotated[int | None, Of("j.dataset", "samples in an epoch; 0 if it does not know")]
    loss: Annotated[float | None, Of(_newest_epoch("loss"), "loss of its newest epoch that reported one")]
    accuracy: Annotated[
        float | None, Of(_newest_epoch("accuracy"), "accuracy of its newest epoch that reported one, as a fraction")
    ]
    resizes: Annotated[int, Of(f"({RESIZED})", "resizes while it ran that took effect, by requeue or by blocks")]
    resizing: Annotated[
        str | None,
        Of(
            "(SELECT z.state || CASE WHEN z.back THEN '_back' ELSE '' END FROM resizes z "
            "WHERE z.job_id = j.id AND z.ended IS NULL LIMIT 1)",
            "state of the resize that is open; null if none is",
        ),
    ]
    pause_s: Annotated[
        float,
        Of(
            "(SELECT COALESCE(SUM(z.pause_s), 0.0) FROM resizes z WHERE z.job_id = j.id)",
            "pauses of all its resizes together, seconds; 0 if none is known",
        ),
    ]
    attempts: Annotated[int, Of(_over_runs("attempts"), "restarts of the ranks within runs, over all runs")]
    nonfinite: Annotated[
        int, Of(_over_runs("nonfinite"), "steps with a loss that is not a finite number, over all runs")
    ]
    nonfinite_step: Annotated[
        int | None,
        Of(
            "(SELECT r.nonfinite_step FROM runs r WHERE r.job_id = j.id AND r.nonfinite_step IS NOT NULL"
            " ORDER BY r.restart DESC LIMIT 1)",
            "step of the last report that had such a loss",
        ),
    ]
    strategy: Annotated[
        str | None, Of("j.strategy", "training strategy, by its own word; null if it is plainly data parallel")
    ]
    limits: Annotated[StrategyLimits | None, Of("j.limits", "what that strategy can do, as a JSON object")]

    def __hash__(self) -> int:
        # Of those that tell most lines apart: a page looks thousands up at each tick.
        return hash((self.job_id, self.state, self.epoch, self.cursor))

    @property
    def local_batch(self) -> int | None:
        """Samples per GPU and forward pass (the most of any GPU); None if unknown. It is for a job whose GPUs share
        samples per replica."""
        if self.batch is None or not self.passes or not self.shape or not self.shape.gpus:
            return None
        return -(-self.batch // (_replicas(self.limits, self.shape.gpus) * self.passes))


_KINDS = {int: "int", float: "float", str: "text", bool: "bool", StrategyLimits: "text", Shape: "int"}


def _columns() -> Iterator[tuple[Column, str]]:
    """Yield the columns that `JobSummary` declares, each with its SQL."""
    for field, hint in get_type_hints(JobSummary, include_extras=True).items():
        inner, *columns = get_args(hint)
        kind = _KINDS[(get_args(inner) or (inner,))[0]]
        names = shape_names(field) if len(columns) > 1 else (COLUMNS.get(field, field),)
        for name, of in zip(names, columns, strict=True):
            sql = f"CASE WHEN {of.sql} THEN 1 ELSE 0 END" if kind == "bool" else of.sql
            yield Column(name, "time" if name.endswith("_time") else kind, of.meaning), sql


_LINE = tuple(_columns())
_FROM = f"""jobs j
        LEFT JOIN runs n ON n.job_id = j.id
            AND n.restart = (SELECT MAX(o.restart) FROM runs o WHERE o.job_id = j.id)
        LEFT JOIN runs p ON p.job_id = j.id
            AND p.restart = (SELECT MAX(o.restart) FROM runs o WHERE o.job_id = j.id AND o.epoch IS NOT NULL)
        {_since_hello("memberships", "m")}
        {_since_hello("batch_changes", "b")}"""
"""FROM clause of a job j, its newest run n, and the newest run p with a position: n may still be loading. Of n the
newest membership m and change of the batch b, both since its last start."""
_SELECTED = ", ".join(f"{sql} AS {column.name}" for column, sql in _LINE)
_SAID = {"submit_time": "submitted", "start_time": "started", "end_time": "ended"}

JOB_SUMMARY = View(
    "job_summary",
    "One row a job: how long it took, waited and ran, at which sizes, and what resizing did to it",
    (
        CLUSTER,
        *(
            one
            for column, _ in _LINE
            for one in (column, *([said(_SAID[column.name], column.name)] if column.name in _SAID else []))
        ),
        Column("requested_gpus", "int", "GPUs it asked for"),
        Column("queueing_s", "float", "submission to first start, seconds"),
        Column("running_s", "float", "all its runs together, seconds; of one that goes on, as far as is known"),
        Column("runs", "int", "its starts; of a job of blocks its terms"),
        Column("sizes", "text", "nodes x GPUs per node of each run and membership, in order; unequal nodes as one"),
        Column("smallest_gpus", "int", "fewest GPUs that it trained on"),
        Column("largest_gpus", "int", "most GPUs that it trained on"),
        Column("gpu_hours", "float", "GPU-hours of all its runs, of a job of blocks those that its blocks held"),
    ),
    f"""
    SELECT c.name AS cluster, {_SELECTED},
        j.requested_nodes * j.requested_gpus_per_node AS requested_gpus,
        {_STARTED} - j.submit_time AS queueing_s,
        {of_runs(f"SUM(latest(0.0, {UNTIL} - {BEGAN}))")} AS running_s,
        {of_runs("COUNT(*)")} AS runs,
        (SELECT listed(s.shape, ' > ') FROM (SELECT w.nodes || 'x' || w.each AS shape FROM ({SIZES}) w
            ORDER BY w.restart, w.number) s) AS sizes,
        (SELECT MIN(w.gpus) FROM ({SIZES}) w) AS smallest_gpus,
        (SELECT MAX(w.gpus) FROM ({SIZES}) w) AS largest_gpus,
        COALESCE({BLOCK_HOURS},
            {of_runs(f"SUM(COALESCE({TERM_HOURS}, latest(0.0, {UNTIL} - {BEGAN}) * {GPUS} / 3600.0))")}) AS gpu_hours
    FROM clusters c CROSS JOIN {_FROM} WHERE j.cluster_id = c.id""",
    ("submit_time", "job_id"),
)

_LATEST = """NOT EXISTS (SELECT 1 FROM jobs later WHERE later.cluster_id = :cluster AND later.job_id = j.job_id
        AND later.submit_time > j.submit_time)"""
_OPEN = "SELECT o.id FROM jobs o WHERE o.cluster_id = :cluster AND o.end_time IS NULL"
_ENDED = f"""SELECT l.id FROM (SELECT j.id FROM jobs j WHERE j.cluster_id = :cluster AND j.end_time IS NOT NULL
        AND {OBSERVED}{{}} ORDER BY j.end_time DESC, j.id DESC LIMIT :ended) l"""


class TimelineRow(NamedTuple):
    """A run, or the part of a run between two changes of blocks, for plots; `end` is None while the run goes on."""

    job_id: int
    name: str
    user: str
    partition: str
    asked: int
    """GPUs that the job asked for; the job grew by all GPUs beyond these."""
    restart: int
    shape: Shape
    start: float
    end: float | None


class SummaryStore(Transactions):
    """Part of a `Store`: summaries for people."""

    def job_summaries(self, job_ids: Sequence[int] | None = None, *, ended: int | None = None) -> list[JobSummary]:
        """Return a line for each of these jobs, or for all that a companion has seen, sorted by submission. `ended` is
        the number of ended jobs in the list, the last to end; the cost does not grow with all ended jobs."""
        if job_ids is not None:
            # Written out, since databases limit the parameters of a statement.
            listed = ", ".join(map(str, map(int, job_ids))) or "NULL"
            return self._lines(f"j.cluster_id = :cluster AND j.job_id IN ({listed})")
        if ended is None:
            return self._lines(f"j.cluster_id = :cluster AND {OBSERVED}")
        # By their keys, each found by the index of ends: if the cluster is a condition too, SQLite scans all its jobs.
        return self._lines(f"{OBSERVED} AND j.id IN ({_OPEN} UNION ALL {_ENDED.format('')})", ended=ended)

    def ended_of(self, user: str, count: int) -> list[JobSummary]:
        """Return a line for each of the `count` jobs of a user that ended last, sorted by submission. The cost grows
        with the number of other users' jobs that ended since."""
        return self._lines(f"j.id IN ({_ENDED.format(' AND j.user_name = :user')})", ended=count, user=user)

    @reading
    def _lines(self, connection: Connection, condition: str, ended: int = 0, user: str = "") -> list[JobSummary]:
        sql = f"SELECT {_SELECTED}, j.max_local_batch FROM {_FROM} WHERE {_LATEST} AND {condition}"
        query = text(spelled(f"{sql} ORDER BY j.submit_time, j.job_id", connection.dialect.name))
        given = {"cluster": self._cluster, "ended": ended, "user": user}
        asked = {name: value for name, value in given.items() if name in query._bindparams}
        found = connection.execute(query, asked)
        names = tuple(found.keys())
        return [_summary(names, tuple(row)) for row in found.all()]

    @reading
    def ask(self, connection: Connection, sql: str, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the rows of a query over the views. The SQL is the caller's own: a user's goes through `query.Reader`,
        which lets it change nothing and ends it in time."""
        return [dict(row) for row in connection.execute(text(sql), values).mappings()]

    @reading
    def strategies(self, connection: Connection) -> dict[str, int]:
        """Return the number of unended jobs with each training strategy, the most frequent strategy first."""
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
        """Return the started runs of jobs that a companion has seen, sorted by start, for plots. `since` selects runs
        that had not ended by then, and `job_id` runs of the newest job with this id."""
        query, given = _timeline(self._cluster, recent=since is not None), {} if since is None else {"since": since}
        if job_id is not None:
            query = query.where(JOBS.c.job_id == job_id, newest(self._cluster))
        members = all_members(connection, self._cluster, since, job_id)
        found: list[TimelineRow] = []
        for *who, nodes, gpus_per_node, start, end, run in connection.execute(query, given).all():
            whole = TimelineRow._make((*who, _shape(nodes, gpus_per_node), start, end))
            found += _parts(whole, members[run]) if run in members else (whole,)
        return found


_shape = cache(Shape)


def _replicas(limits: StrategyLimits | None, gpus: int) -> int:
    row = limits.at(gpus) if limits is not None else None
    return row.replicas if row is not None else gpus


def _believed(text: str | None) -> StrategyLimits | None:
    try:
        return decode_limits(text) if text is not None else None
    except ProtocolError:
        return None


@lru_cache(maxsize=KEPT)
def _summary(names: tuple[str, ...], values: tuple[Any, ...]) -> JobSummary:
    """Return the summary in a row; equal rows give the same cached object."""
    row = dict(zip(names, values, strict=True))
    limits = _believed(row["limits"])
    gpus, most, passes = (row["nodes"] or 0) * (row["gpus_per_node"] or 0), row["max_local_batch"], row["passes"]
    if passes is None and row["batch"] is not None and gpus and most:
        # Said when it changes; until then, as many as the samples of a GPU take. Of whole numbers ⌈a / b⌉ = -(-a // b).
        local = -(-row["batch"] // _replicas(limits, gpus))
        passes = max(-(-local // most), 1)
    flags = {name: bool(row[name]) for name in ("elastic", "running")}
    return record_of(JobSummary, row, limits=limits, passes=passes, **flags)


_ASKED = JOBS.c.requested_nodes * JOBS.c.requested_gpus_per_node


@cache
def _timeline(cluster: int, *, recent: bool) -> Select[Any]:
    """Return the query of the timeline; with `recent`, of only runs that had not ended by the parameter `since`."""
    of_job, of_run = (
        (JOBS.c.job_id, JOBS.c.name, JOBS.c.user_name, JOBS.c.partition, _ASKED),
        (RUNS.c.restart, RUNS.c.nodes, RUNS.c.gpus_per_node),
    )
    query = (
        select(*of_job, *of_run, RUNS.c.start_time, run_end(), RUNS.c.id)
        .join(RUNS, RUNS.c.job_id == JOBS.c.id)
        .where(RUNS.c.start_time.is_not(None), observed())
        .order_by(RUNS.c.start_time, JOBS.c.job_id)
    )
    return query.where(lasted(cluster) if recent else JOBS.c.cluster_id == cluster)


def _parts(run: TimelineRow, members: Sequence[MembershipRecord]) -> list[TimelineRow]:
    """Return the run cut at each change of its blocks."""
    parts = [run]
    for member in members:
        shape = size_of(member)
        *parts, last = parts
        time = max(last.start, member.time if last.end is None else min(member.time, last.end))
        # Who trains from the start on is known a moment after it.
        first = not parts and member is members[0]
        if not (first or time == last.start or last.shape == shape):
            parts.append(last._replace(end=time))
            last = last._replace(start=time)
        parts.append(last._replace(shape=shape))
    return parts

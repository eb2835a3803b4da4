"""Tables and plots for people: one line a job, one bar a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Select, and_, bindparam, case, cast, func, null, select, union_all

from ones_db.blocks import all_members
from ones_db.history_cache import size_of
from ones_db.jobs import among, lasted, latest, newest, observed, run_end
from ones_db.limits import decode_limits
from ones_db.records import RESIZE_DONE, MembershipRecord
from ones_db.rows import record_of
from ones_db.shape import Shape
from ones_db.tables import BATCHES, EPOCHS, JOBS, MEMBERSHIPS, RESIZES, RUNS, THROUGHPUT
from ones_wrapper.limits import Limits
from ones_wrapper.protocol import ProtocolError


@dataclass(frozen=True)
class JobSummary:
    """One line of the table of jobs."""

    job_id: int
    name: str
    user: str
    partition: str
    state: str
    elastic: bool
    refusal: str
    shape: Shape | None
    """Of its newest run; None if it has not run."""
    running: bool
    """That run has not ended."""
    batch: int | None
    samples_per_s: float | None
    epoch: int | None
    """Epochs done."""
    epochs: int | None
    cursor: int | None
    dataset: int | None
    resizes: int
    """Resizes that interrupted it and took effect: those of a waiting job do not count, being parked does."""
    resizing: str | None
    """State of the resize that is open."""
    pause_s: float
    """Pauses of all its resizes together."""
    loss: float | None
    accuracy: float | None
    submit_time: float
    start_time: float | None
    end_time: float | None
    report_note: str
    passes: int | None = None
    """Forward passes per optimizer step; None where the batch, its shape or its spec is not known."""
    attempts: int = 0
    """How often ranks were started again within a run, over all runs."""
    nonfinite: int = 0
    """Steps with a loss that is not a finite number, over all runs."""
    nonfinite_step: int | None = None
    """Step of the last report that had such a loss."""
    refusal_code: str = ""
    strategy: str | None = None
    """Name of its training strategy; None where it is plainly data parallel, or has not said."""
    limits: Limits | None = None
    """What that strategy can do."""
    account: str = ""

    @property
    def local_batch(self) -> int | None:
        """Samples per GPU and forward pass (the most of any GPU), of a job whose GPUs share samples per replica; None
        where it is not known."""
        if self.batch is None or not self.passes or not self.shape or not self.shape.gpus:
            return None
        return -(-self.batch // (_replicas(self.limits, self.shape.gpus) * self.passes))

    @property
    def jct_s(self) -> float | None:
        """Job completion time: submission to end."""
        return None if self.end_time is None else self.end_time - self.submit_time


class TimelineRow(NamedTuple):
    """One run, for plots, or a part of one in which its blocks did not change; `end` is None while it runs."""

    job_id: int
    name: str
    user: str
    restart: int
    shape: Shape
    start: float
    end: float | None


def job_summaries(
    connection: Connection,
    cluster: int,
    job_ids: Sequence[int] | None,
    ended: int | None = None,
    ended_of: str | None = None,
) -> list[JobSummary]:
    query, given = _summaries(cluster), {} if ended_of is None else {"user": ended_of}
    query = query.where(observed() if job_ids is None else among(JOBS.c.job_id, job_ids))
    if ended is None:
        query = query.where(JOBS.c.cluster_id == cluster)
    elif ended_of is None:
        query = query.where(JOBS.c.id.in_(_open_or_last(cluster, ended)))
    else:
        query = query.where(JOBS.c.id.in_(select(_last(cluster, ended, own=True).c.id)))
    rows = connection.execute(query, given)
    names = tuple(rows.keys())
    return [_summary(dict(zip(names, row, strict=True))) for row in rows]


@cache
def _summaries(cluster: int) -> Select[Any]:
    """Made once: to make it takes longer than to answer it where there are few jobs."""
    of_job = RUNS.alias("of_job")
    # The newest run has the shape; the newest that reported a position has the progress, as the newest may be
    # loading.
    last = select(func.max(of_job.c.restart)).where(of_job.c.job_id == JOBS.c.id)
    now, at = RUNS.alias("now"), RUNS.alias("at")
    # A change of the blocks brings a batch too; in how many passes, it does not say.
    joined, in_term = (_newest_since_hello(MEMBERSHIPS, name, now) for name in ("number", "batch"))
    changed, batch, passes = (_newest_since_hello(BATCHES, name, now) for name in ("number", "batch", "passes"))
    by_blocks = func.coalesce(joined, 0) > func.coalesce(changed, 0)
    batch, passes = case((by_blocks, in_term), else_=batch), case((by_blocks, null()), else_=passes)
    speed = _newest(THROUGHPUT, THROUGHPUT.c.samples / THROUGHPUT.c.seconds, at, THROUGHPUT.c.seconds > 0)
    resizes = select(func.count()).where(
        RESIZES.c.job_id == JOBS.c.id,
        RESIZES.c.state == RESIZE_DONE,
        RESIZES.c.ended.is_not(None),
        RESIZES.c.restart >= 0,
    )
    resizing = select(RESIZES.c.state).where(RESIZES.c.job_id == JOBS.c.id, RESIZES.c.ended.is_(None)).limit(1)
    pause = select(func.coalesce(func.sum(RESIZES.c.pause_s), 0.0)).where(RESIZES.c.job_id == JOBS.c.id)
    start = select(func.min(of_job.c.start_time)).where(of_job.c.job_id == JOBS.c.id)
    return (
        select(
            *(JOBS.c[name] for name in _JOB),
            JOBS.c.user_name,
            now.c.nodes,
            now.c.gpus_per_node,
            and_(now.c.restart == JOBS.c.restart, now.c.end_time.is_(None), JOBS.c.end_time.is_(None)).label("running"),
            func.coalesce(batch, now.c.batch, at.c.batch).label("batch"),
            speed.label("samples_per_s"),
            at.c.epoch,
            at.c.cursor,
            resizes.scalar_subquery().label("resizes"),
            resizing.scalar_subquery().label("resizing"),
            pause.scalar_subquery().label("pause_s"),
            _newest_epoch("loss").label("loss"),
            _newest_epoch("accuracy").label("accuracy"),
            start.scalar_subquery().label("start_time"),
            passes.label("passes"),
            JOBS.c.max_local_batch.label("max_local"),
            *(_over_runs(name).label(name) for name in ("attempts", "nonfinite")),
            _newest_nonfinite().label("nonfinite_step"),
        )
        .select_from(JOBS)
        .outerjoin(now, and_(now.c.job_id == JOBS.c.id, now.c.restart == last.scalar_subquery()))
        .outerjoin(
            at,
            and_(
                at.c.job_id == JOBS.c.id,
                at.c.restart == last.where(of_job.c.epoch.is_not(None)).scalar_subquery(),
            ),
        )
        .where(latest(cluster))
        .order_by(JOBS.c.submit_time, JOBS.c.job_id)
    )


@cache
def _open_or_last(cluster: int, ended: int) -> Any:
    """The keys of the jobs that have not ended and of so many that ended last, each by the index of ends."""
    alive = select(JOBS.c.id).where(JOBS.c.cluster_id == cluster, JOBS.c.end_time.is_(None))
    return union_all(alive, select(_last(cluster, ended).c.id))


@cache
def _last(cluster: int, ended: int, *, own: bool = False) -> Any:
    """The keys of so many jobs that ended last; with `own` of those of the user that is given as `user`."""
    over = select(JOBS.c.id).where(JOBS.c.cluster_id == cluster, JOBS.c.end_time.is_not(None), observed())
    if own:
        over = over.where(JOBS.c.user_name == bindparam("user"))
    return over.order_by(JOBS.c.end_time.desc(), JOBS.c.id.desc()).limit(ended).subquery()


def _replicas(limits: Limits | None, gpus: int) -> int:
    """Over how many parts of so many GPUs the samples of a step are split."""
    row = limits.at(gpus) if limits is not None else None
    return row.replicas if row is not None else gpus


def _believed(text: str | None) -> Limits | None:
    try:
        return decode_limits(text) if text is not None else None
    except ProtocolError:
        return None


def _summary(row: dict[str, Any]) -> JobSummary:
    limits = _believed(row["limits"])
    gpus, most, passes = (row["nodes"] or 0) * (row["gpus_per_node"] or 0), row["max_local"], row["passes"]
    if passes is None and row["batch"] is not None and gpus and most:
        # Said when it changes; until then, as many as the samples of a GPU take. Of whole numbers ⌈a / b⌉ = -(-a // b).
        local = -(-row["batch"] // _replicas(limits, gpus))
        passes = max(-(-local // most), 1)
    return record_of(JobSummary, row, running=bool(row["running"]), limits=limits, passes=passes)


_JOB = (
    "job_id",
    "name",
    "partition",
    "state",
    "elastic",
    "refusal",
    "refusal_code",
    "epochs",
    "dataset",
    "submit_time",
    "end_time",
    "report_note",
    "strategy",
    "limits",
    "account",
)


def _newest(table: Any, value: Any, run: Any, *conditions: Any) -> Any:
    """The value in the newest report of the run, by its key alone however many there are."""
    query = select(value).where(table.c.run_id == run.c.id, *conditions)
    return query.order_by(table.c.number.desc()).limit(1).scalar_subquery()


def _newest_since_hello(table: Any, name: str, run: Any) -> Any:
    """The value in the newest report since the ranks of the run were last started."""
    return _newest(table, table.c[name], run, table.c.number > func.coalesce(run.c.hello_number, 0))


def _over_runs(name: str) -> Any:
    """The sum of a count over all runs of the job."""
    of_run = RUNS.alias(f"of_{name}")
    # PostgreSQL's own sum of whole numbers is a decimal.
    query = select(cast(func.coalesce(func.sum(of_run.c[name]), 0), BigInteger)).where(of_run.c.job_id == JOBS.c.id)
    return query.scalar_subquery()


def _newest_nonfinite() -> Any:
    """The step of the last report of the job with a loss that is no finite number."""
    of_run = RUNS.alias("of_nonfinite_step")
    query = select(of_run.c.nonfinite_step).where(of_run.c.job_id == JOBS.c.id, of_run.c.nonfinite_step.is_not(None))
    return query.order_by(of_run.c.restart.desc()).limit(1).scalar_subquery()


def _newest_epoch(name: str) -> Any:
    """The value that the job's newest epoch with one has."""
    of_epoch = RUNS.alias("of_epoch")
    query = (
        select(EPOCHS.c[name])
        .join(of_epoch, of_epoch.c.id == EPOCHS.c.run_id)
        .where(of_epoch.c.job_id == JOBS.c.id, EPOCHS.c[name].is_not(None))
    )
    return query.order_by(of_epoch.c.restart.desc(), EPOCHS.c.number.desc()).limit(1).scalar_subquery()


def strategies(connection: Connection, cluster: int) -> dict[str, int]:
    """How many jobs that have not ended train by each strategy."""
    query = (
        select(JOBS.c.strategy, func.count())
        .where(newest(cluster), JOBS.c.end_time.is_(None), JOBS.c.strategy.is_not(None))
        .group_by(JOBS.c.strategy)
        .order_by(func.count().desc(), JOBS.c.strategy)
    )
    return {row[0]: row[1] for row in connection.execute(query)}


def timeline(
    connection: Connection, cluster: int, since: float | None = None, job_id: int | None = None
) -> list[TimelineRow]:
    query, given = _timeline(cluster, recent=since is not None), {} if since is None else {"since": since}
    if job_id is not None:
        query = query.where(JOBS.c.job_id == job_id, newest(cluster))
    members = all_members(connection, cluster, since, job_id)
    rows = connection.execute(query, given)
    return [
        part
        for *who, nodes, gpus_per_node, start, end, run in rows
        for part in _parts(TimelineRow._make((*who, Shape(nodes, gpus_per_node), start, end)), members.get(run, ()))
    ]


@cache
def _timeline(cluster: int, *, recent: bool) -> Select[Any]:
    """With `recent` those alone that had not ended by `since`."""
    query = (
        select(
            JOBS.c.job_id,
            JOBS.c.name,
            JOBS.c.user_name,
            RUNS.c.restart,
            RUNS.c.nodes,
            RUNS.c.gpus_per_node,
            RUNS.c.start_time,
            run_end(),
            RUNS.c.id,
        )
        .join(RUNS, RUNS.c.job_id == JOBS.c.id)
        .where(RUNS.c.start_time.is_not(None), observed())
        .order_by(RUNS.c.start_time, JOBS.c.job_id)
    )
    return query.where(lasted(cluster) if recent else JOBS.c.cluster_id == cluster)


def _parts(run: TimelineRow, members: Sequence[MembershipRecord]) -> list[TimelineRow]:
    """The run, cut where its blocks changed."""
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

"""Histories of jobs, from which their curves are learned.

Reports are only ever added, and their numbers rise within a run. So a store caches the reports of each run, and reads
only newer ones. A tick then costs as much in a job's last hour as in its first. The cache may be emptied at any time,
since all of it can be read again.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise, takewhile
from statistics import fmean, median
from threading import Lock
from typing import Any, TypeAlias

from sqlalchemy import Connection, Float, Select, and_, func, literal_column, select

from ones_db.engine import Transactions, remembering
from ones_db.jobs import CLUSTER, MEMBERS, WITH_IDS, among, keyed, membership_record, newest, rows_after, spec_record
from ones_db.records import (
    RESIZE_DONE,
    RESIZE_OVERTAKEN,
    RESIZE_PREEMPTED,
    RESIZE_ROLLED_BACK,
    EpochPoint,
    JobHistory,
    JobRecord,
    MembershipRecord,
    NoisePoint,
    PlacedPoint,
    ThroughputPoint,
)
from ones_db.rows import record_of
from ones_db.shape import PARKED, Shape
from ones_db.tables import BATCHES, BLOCKS, EPOCHS, JOBS, MEMBERSHIPS, RESIZES, RUNS, THROUGHPUT
from ones_db.views import end_of

SPEEDS = 5
"""Number of newest throughput samples that are kept for each shape and batch (ONES §3.2)."""
NOISES = 8
"""Number of newest gradient noise scales that are kept for a job."""
SPARE = 250
"""Number of jobs in the cache beyond those of the largest call. The least recently used are dropped (LRU)."""


Row: TypeAlias = Any
"""A row of SQLAlchemy with columns as attributes."""


@dataclass
class CachedRun:
    """Cached reports of one run. `number` is the number of the newest report in the cache."""

    restart: int
    number: int = 0
    epochs: dict[int, tuple[EpochPoint, int]] = field(default_factory=dict)
    """(End of the epoch, samples used in it) by the epoch's number, for each epoch that has ended."""
    speeds: dict[tuple[Shape | None, int], deque[ThroughputPoint]] = field(default_factory=dict)
    """Newest throughput samples by (size, global batch). For a run without memberships, the size is None."""
    noises: deque[NoisePoint] = field(default_factory=lambda: deque(maxlen=NOISES))
    members: list[MembershipRecord] = field(default_factory=list)
    """Memberships of the run in order; empty for a plain job."""

    def add_sample(self, row: Any) -> None:
        """Add the newest throughput report. Its speed counts if it has samples and no blocks changed meanwhile."""
        if row.seconds > 0 and row.samples > 0 and (size := self._size_at(row)) != MIXED:
            kept = self.speeds.setdefault((size, row.batch), deque(maxlen=SPEEDS))
            kept.append(ThroughputPoint(size or PARKED, row.batch, row.samples / row.seconds, row.time))
        if row.noise is not None:
            self.noises.append(NoisePoint(row.noise, row.time))

    def _size_at(self, row: Any) -> Shape | None:
        """Return the size of the membership at a sample; None before the first, `MIXED` if blocks changed meanwhile."""
        after = bisect(self.members, row.number, key=lambda member: member.number)
        if not after:
            return None
        member = self.members[after - 1]
        return size_of(member) if row.time - row.seconds >= member.time - MARGIN * row.seconds else MIXED

    def add_epoch(self, row: Any) -> None:
        """Add the end of an epoch, the newest report so far. It replaces an earlier end of the same epoch."""
        point = EpochPoint(row.epoch, row.loss, row.accuracy, row.time, self.restart)
        self.epochs[row.epoch] = (point, row.samples)


@dataclass
class CachedJob:
    """Cached runs of a job by runs.id, and its history. `state` has the rows from which the history was made."""

    runs: dict[int, CachedRun] = field(default_factory=dict)
    state: Any = None
    history: JobHistory | None = None


MIXED = Shape(-1, -1)
MARGIN = 0.1
"""Tolerance for clocks: largest share of a throughput sample's duration that may lie before a change of blocks."""


def size_of(member: MembershipRecord) -> Shape:
    """Return the shape of a membership. If its nodes have unequal numbers of GPUs, return one node with all GPUs."""
    report = member.report
    return Shape(report.nodes, report.gpus_per_node) if report.gpus_per_node else Shape(1, report.world)


class HistoryCache:
    """Cache of the histories that a store has read. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._jobs: dict[int, CachedJob] = {}
        self._most = 0
        self.finished: tuple[Any, list[JobHistory]] | None = None
        """(Rows of the finished jobs, histories made from them); None before the first call."""

    def of(self, keys: Sequence[int]) -> dict[int, CachedJob]:
        """Return the cache entries of these jobs (jobs.id), and mark them as just used. A new job's entry is empty."""
        asked = {key: self._jobs.pop(key) if key in self._jobs else CachedJob() for key in keys}
        self._jobs.update(asked)
        self._most = max(self._most, len(asked))
        while len(self._jobs) > self._most + SPARE:
            del self._jobs[next(iter(self._jobs))]
        return asked

    def clear(self) -> None:
        self._jobs.clear()
        self.finished = None


PAUSES = 3
"""Number of newest resizes, or changes of blocks, over which a job's mean pause is computed."""


def _of(connection: Connection, cache: HistoryCache, jobs: Sequence[Row]) -> list[JobHistory]:
    keys = [row.id for row in jobs]
    if not keys:
        return []
    runs = _by_job(connection, _RUNS, keys)
    resizes = _by_job(connection, _RESIZED, keys)
    cached = cache.of(keys)
    _read_on(connection, [(cached[key], run) for key in keys for run in runs[key]])
    of_blocks = [key for key in keys if any(run.members for run in cached[key].runs.values())]
    preempted = _by_job(connection, _PREEMPTED, of_blocks) if of_blocks else {}
    found = []
    for row in jobs:
        job, mine, ended, lost = cached[row.id], runs[row.id], resizes[row.id], preempted.get(row.id, ())
        state = [tuple(row), *map(tuple, mine), *map(tuple, ended), *map(tuple, lost)]
        if job.history is None or job.state != state:
            history = _history(row, mine, job.runs, ended)
            job.state, job.history = state, replace(history, preempted=tuple(block.end_time for block in lost))
        found.append(job.history)
    return found


_RUN = (
    *("id", "job_id", "restart", "nodes", "gpus_per_node", "node_list", "kind", "start_time", "batch", "epoch"),
    *("cursor", "first_loss", "report_number", "noise", "progress", "report_time", "world", "step"),
)
_LAST = BATCHES.alias("last")
_CHANGED = (
    select(func.max(_LAST.c.number))
    .where(_LAST.c.run_id == RUNS.c.id, _LAST.c.number > func.coalesce(RUNS.c.hello_number, 0))
    .scalar_subquery()
)
_RUNS = (
    select(
        *(RUNS.c[name] for name in _RUN),
        func.coalesce(BATCHES.c.batch, RUNS.c.batch).label("batch_now"),
        func.coalesce(BATCHES.c.number, RUNS.c.hello_number, 0).label("batch_number"),
        literal_column(f"({end_of('runs', 'jobs')})", Float()).label("ended"),
    )
    .join(JOBS, JOBS.c.id == RUNS.c.job_id)
    .outerjoin(BATCHES, and_(BATCHES.c.run_id == RUNS.c.id, BATCHES.c.number == _CHANGED))
    .where(keyed(RUNS.c.job_id))
    .order_by(RUNS.c.job_id, RUNS.c.restart)
)
"""Query of the jobs' runs in order, each with its end and its newest global batch."""

_SAMPLE = select(*(THROUGHPUT.c[name] for name in ("run_id", "number", "time", "samples", "seconds", "batch", "noise")))
_EPOCH = select(*(EPOCHS.c[name] for name in ("run_id", "number", "time", "epoch", "samples", "loss", "accuracy")))

_SAMPLES, _EPOCHS = str(_SAMPLE), str(_EPOCH)
_FIRST_EPOCHS = _EPOCH.where(keyed(EPOCHS.c.run_id)).order_by(EPOCHS.c.number)


def _read_on(connection: Connection, runs: Sequence[tuple[CachedJob, Row]]) -> None:
    """Read the reports that were added since the last call into the cached runs."""
    started: dict[int, CachedRun] = {}
    known: dict[int, CachedRun] = {}
    for job, row in runs:
        run = job.runs.setdefault(row.id, CachedRun(row.restart))
        if run.number < row.report_number:
            (known if run.number else started)[row.id] = run
    read = started | known
    for member in rows_after(connection, MEMBERSHIPS, MEMBERS, [(key, run.number) for key, run in read.items()]):
        read[member.run_id].members.append(membership_record(member._mapping, member.slurm_id))
    if started:
        for hot in (False, True):
            some = {key: run for key, run in started.items() if bool(run.members) == hot}
            for sample in connection.execute(_first_samples(hot=hot), {"keys": [*some]}) if some else ():
                some[sample.run_id].add_sample(sample)
        for epoch in connection.execute(_FIRST_EPOCHS, {"keys": [*started]}):
            started[epoch.run_id].add_epoch(epoch)
    since = [(key, run.number) for key, run in known.items()]
    for sample in rows_after(connection, THROUGHPUT, _SAMPLES, since):
        known[sample.run_id].add_sample(sample)
    for epoch in rows_after(connection, EPOCHS, _EPOCHS, since):
        known[epoch.run_id].add_epoch(epoch)
    for job, row in runs:
        job.runs[row.id].number = row.report_number


@cache
def _first_samples(*, hot: bool) -> Any:
    """Return the query of each run's newest samples at each batch (`hot`: and membership), oldest first."""
    kind: tuple[Any, ...] = (THROUGHPUT.c.run_id, THROUGHPUT.c.batch)
    if hot:
        before = MEMBERSHIPS.c.run_id == THROUGHPUT.c.run_id, MEMBERSHIPS.c.number < THROUGHPUT.c.number
        kind = (*kind, select(func.max(MEMBERSHIPS.c.number)).where(*before).scalar_subquery())
    age = func.row_number().over(partition_by=kind, order_by=THROUGHPUT.c.number.desc())
    ranked = _SAMPLE.add_columns(age.label("age")).where(keyed(THROUGHPUT.c.run_id), THROUGHPUT.c.seconds > 0)
    inner = ranked.subquery()
    return select(inner).where(inner.c.age <= max(SPEEDS, NOISES)).order_by(inner.c.number)


_RESIZE = ("job_id", "restart", "new_nodes", "state", "started", "ended", "pause_s", "mechanism", "outcome_code")
_RESIZED = (
    select(*(RESIZES.c[name] for name in _RESIZE))
    .where(keyed(RESIZES.c.job_id), RESIZES.c.ended.is_not(None))
    .order_by(RESIZES.c.id)
)
"""Query of each job's ended resizes, in the order in which they began."""
_PREEMPTED = (
    select(BLOCKS.c.job_id, BLOCKS.c.end_time)
    .where(keyed(BLOCKS.c.job_id), BLOCKS.c.state == "PREEMPTED", BLOCKS.c.end_time.is_not(None))
    .order_by(BLOCKS.c.end_time)
)
"""Query of each job's preempted blocks, in the order of their ends."""


def _by_job(connection: Connection, query: Select[Any], keys: Sequence[int]) -> dict[int, list[Row]]:
    rows: dict[int, list[Row]] = defaultdict(list)
    for row in connection.execute(query, {"keys": keys}):
        rows[row.job_id].append(row)
    return rows


def _history(row: Row, runs: Sequence[Row], cached: Mapping[int, CachedRun], resizes: Sequence[Row]) -> JobHistory:
    job, spec = record_of(JobRecord, row._mapping), spec_record(row._mapping)
    epoch, cursor = next(((run.epoch, run.cursor) for run in reversed(runs) if run.epoch is not None), (0, 0))
    # Later runs come last and overwrite what they did again; beyond the position, a lost checkpoint undid it.
    latest: dict[int, tuple[EpochPoint, int]] = {}
    for run in runs:
        latest.update(cached[run.id].epochs)
    ended = [latest[number] for number in sorted(latest) if number < epoch]
    epochs = tuple(point for point, _ in ended)
    used = sum(used for _, used in ended)
    # Where the job does not know its dataset's length, its epochs show it as they end.
    samples = cursor + (epoch * spec.dataset if spec is not None and spec.dataset else used)
    progress = next((run.progress for run in reversed(runs) if run.progress is not None), None)
    noises = [point for run in runs for point in cached[run.id].noises]
    members = [member for run in runs for member in cached[run.id].members]
    changes = [new for old, new in pairwise(members) if size_of(old) != size_of(new)]
    resizes = [resize for resize in resizes if not _is_overtaken(resize)]
    resized = resizes[-1].ended if resizes else None
    changed = max([time for time in (resized, changes[-1].time if changes else None) if time is not None], default=None)
    ordered = [(old, new) for old, new in pairwise(members) if new.report.order is not None]
    done = [resize for resize in resizes if resize.state == RESIZE_DONE]
    started = [run for run in runs if run.start_time is not None]
    return JobHistory(
        job=job,
        spec=spec,
        epochs=epochs,
        throughput=_throughput(runs, cached),
        samples=float(samples),
        batch=next((batch for run in reversed(runs) if (batch := _batch(run, cached[run.id])) is not None), None),
        ended_runs_s=sum(max(0.0, run.ended - run.start_time) for run in started if run.ended is not None),
        running_since=next((run.start_time for run in reversed(started) if run.ended is None), None),
        resizes=sum(resize.restart >= 0 for resize in done),
        failures=sum(1 for _ in takewhile(lambda one: one.state != RESIZE_DONE, reversed(resizes))),
        last_resize_end=resized,
        epochs_since_change=sum(changed is None or point.time > changed for point in epochs),
        first_loss=next((run.first_loss for run in runs if run.first_loss is not None), None),
        first_batch=next((run.batch for run in runs if run.batch is not None), None),
        noise=tuple(noises[-NOISES:]),
        progress=None if progress is None else min(progress, float(samples)),
        interrupted=tuple(sorted(resize.started for resize in resizes if _interrupts(resize))),
        pause_s=_mean([one.pause_s for one in done if one.pause_s is not None and one.new_nodes and _interrupts(one)]),
        epoch_samples=used / len(ended) if used else None,
        ran=_ran(runs, cached),
        membership=members[-1] if members else None,
        switch_s=_mean([new.report.pause_s for _, new in ordered]),
        join_s=_mean([new.report.pause_s for old, new in ordered if _joined(old, new)]),
        changes_without_effect=sum(1 for _ in takewhile(_without_effect, reversed([*pairwise(members)]))),
        steps_since_change=_steps_since_change(runs, cached),
        misfit=next((_misfit(run, cached[run.id]) for run in reversed(runs) if run.world), None),
        placed=_placed(runs, cached),
    )


def _shape(run: Row) -> Shape:
    return Shape(run.nodes, run.gpus_per_node)


def _steps_since_change(runs: Sequence[Row], cached: Mapping[int, CachedRun]) -> int | None:
    """Return the number of optimizer steps since the job's number of GPUs last changed; None if it never changed."""
    size: int | None = None
    changed: int | None = None
    step = 0
    for run in runs:
        for gpus, at in _sizes_of(run, cached[run.id], step):
            if size is not None and gpus != size:
                changed = at
            size = gpus
        step = run.step if run.step is not None else step
    return None if changed is None else max(step - changed, 0)


def _sizes_of(run: Row, cached: CachedRun, step: int) -> list[tuple[int, int]]:
    """Return (GPUs, first step) of each size in a run; empty if the run has reported no step.

    A run without memberships has one size, from `step` on, the last step of the run before.
    """
    if cached.members:
        return [(member.report.world, member.report.step) for member in cached.members]
    gpus = _shape(run).gpus
    return [(gpus, step)] if run.step is not None and gpus else []


def _misfit(run: Row, cached: CachedRun) -> tuple[int, int] | None:
    """Return (ranks, GPUs) of a run if these differ, for example without `ones-run`; else None."""
    gpus = _shape(run).gpus
    return (run.world, gpus) if run.world and gpus and run.world != gpus and not cached.members else None


def _batch(run: Row, cached: CachedRun) -> int | None:
    if cached.members and cached.members[-1].number > run.batch_number:
        return cached.members[-1].report.batch
    batch: int | None = run.batch_now
    return batch


def _joined(old: MembershipRecord, new: MembershipRecord) -> bool:
    before, after = (set(zip(one.report.blocks, one.report.restarts, strict=False)) for one in (old, new))
    return bool(after - before)


def _without_effect(change: tuple[MembershipRecord, MembershipRecord]) -> bool:
    old, new = (member.report for member in change)
    return new.order is not None and new.world == old.world and new.nodes >= old.nodes


def _mean(pauses: Sequence[float]) -> float | None:
    return fmean(pauses[-PAUSES:]) if pauses else None


def _is_overtaken(resize: Row) -> bool:
    """Return True if a resize had no effect because the job started first, or because Slurm preempted a block."""
    started_first = resize.restart < 0 and resize.outcome_code == RESIZE_OVERTAKEN
    return started_first or bool(resize.outcome_code == RESIZE_PREEMPTED)


def _interrupts(resize: Row) -> bool:
    """Return True if the resize paused training by a requeue. A resize of a waiting job or by blocks does not."""
    stopped = resize.state in (RESIZE_DONE, RESIZE_ROLLED_BACK) or resize.pause_s is not None
    return bool(resize.mechanism == "requeue" and resize.restart >= 0 and stopped)


def _ran(runs: Sequence[Row], cached: Mapping[int, CachedRun]) -> tuple[tuple[Shape, float], ...]:
    seconds: dict[Shape, float] = defaultdict(float)
    for run in runs:
        until = run.ended if run.ended is not None else run.report_time
        if run.start_time is None or until is None:
            continue
        members = cached[run.id].members
        # Before the first membership, and without one, it has the size of the run.
        sizes = [size_of(members[0]) if members else _shape(run), *map(size_of, members)]
        # A job may say that it changed before it began, or before it changed last.
        times = accumulate([run.start_time, *(min(member.time, until) for member in members), until], max)
        for size, (start, end) in zip(sizes, pairwise(times), strict=True):
            seconds[size] += max(end - start, 0.0)
    return tuple(sorted(seconds.items()))


def _throughput(runs: Sequence[Row], cached: Mapping[int, CachedRun]) -> tuple[ThroughputPoint, ...]:
    """Return the newest `SPEEDS` samples of all runs for each (shape, batch, kind of GPU), oldest first."""
    kept: dict[tuple[Shape, int, str], list[ThroughputPoint]] = defaultdict(list)
    for run in runs:
        for (size, batch), samples in cached[run.id].speeds.items():
            shape = size or _shape(run)
            # Without a shape it teaches nothing, nor with GPUs that no rank uses.
            if shape.gpus > 0 and not _misfit(run, cached[run.id]):
                kind = run.kind or ""
                kept[shape, batch, kind] += [point._replace(shape=shape, kind=kind) for point in samples]
    points = [point for samples in kept.values() for point in samples[-SPEEDS:]]
    return tuple(sorted(points, key=lambda point: point.time))


def _placed(runs: Sequence[Row], cached: Mapping[int, CachedRun]) -> tuple[PlacedPoint, ...]:
    """Return the median throughput of each run at each batch, for runs whose nodes are known."""
    found = []
    for run in runs:
        names = tuple(run.node_list.split(",")) if run.node_list else ()
        if not names or len(names) != run.nodes or not run.gpus_per_node or _misfit(run, cached[run.id]):
            continue
        for (size, batch), samples in cached[run.id].speeds.items():
            if size is None:
                speed, time = median(point.samples_per_s for point in samples), samples[-1].time
                found.append(PlacedPoint(run.restart, names, run.gpus_per_node, batch, speed, time, run.kind or ""))
    return tuple(found)


_ELASTIC = select(JOBS).where(newest(CLUSTER), JOBS.c.elastic, JOBS.c.end_time.is_(None))


class HistoryStore(Transactions):
    """Part of a `Store`: histories of jobs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._cache = HistoryCache()
        self._cache_lock = Lock()

    @contextmanager
    def _cached(self) -> Iterator[HistoryCache]:
        with self._cache_lock:
            try:
                yield self._cache
            except BaseException:
                self._cache.clear()
                raise

    def histories(self, job_ids: Sequence[int] | None = None) -> dict[int, JobHistory]:
        """Return the history of each of these jobs, by job id. None means all elastic jobs that have not ended.

        The number of queries does not depend on the number of jobs, up to some hundreds. Only reports that are new
        since the last call are read. If a job has no new rows, its history is the same object as before.
        """

        def ask(connection: Connection, asked: Collection[int] | None) -> dict[int, JobHistory]:
            given = {"cluster": self._cluster} | ({} if asked is None else {"keys": asked})
            rows = connection.execute(_ELASTIC if asked is None else WITH_IDS, given).all()
            with self._cached() as cache:
                return {history.job.job_id: history for history in _of(connection, cache, rows)}

        if job_ids is None:
            with self._read() as connection:
                known = ask(connection, None)
        else:
            known = self._recall("histories", job_ids, ask)
        return dict(sorted(known.items(), key=lambda one: (one[1].job.submit_time, one[0])))

    @remembering("finished")
    def finished_histories(self, connection: Connection, limit: int = 200) -> list[JobHistory]:
        """Return the histories of the `limit` elastic jobs that completed last and have an ended epoch, newest first.

        If there are no new rows, the list is the same object as before.
        """
        with self._cached() as cache:
            trained = select(EPOCHS.c.run_id).join(RUNS, RUNS.c.id == EPOCHS.c.run_id).where(RUNS.c.job_id == JOBS.c.id)
            # What may still come of a job that ended: its last words, and the pause of its last resize.
            said = select(func.sum(RUNS.c.report_number)).where(RUNS.c.job_id == JOBS.c.id)
            resized = select(func.count(RESIZES.c.pause_s)).where(RESIZES.c.job_id == JOBS.c.id)
            query = (
                select(JOBS.c.id, said.scalar_subquery(), resized.scalar_subquery())
                .where(JOBS.c.cluster_id == self._cluster, JOBS.c.end_time.is_not(None), JOBS.c.state == "COMPLETED")
                .where(JOBS.c.elastic, trained.exists())
                .order_by(JOBS.c.end_time.desc(), JOBS.c.id.desc())
                .limit(limit)
            )
            state = [tuple(row) for row in connection.execute(query)]
            if not state:
                return []
            if cache.finished is None or cache.finished[0] != state:
                keys = [row[0] for row in state]
                jobs = select(JOBS).where(among(JOBS.c.id, keys)).order_by(JOBS.c.end_time.desc(), JOBS.c.id.desc())
                cache.finished = state, _of(connection, cache, connection.execute(jobs).all())
            return cache.finished[1]

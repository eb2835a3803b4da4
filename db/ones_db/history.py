"""What learning needs of many jobs, in a number of queries that does not depend on how many they are.

Reports are only ever added, and their numbers rise within a run. So what was read of a run stays true, and only
what came since is read: a tick costs as much in a job's last hour as in its first.

A store keeps what it has read of runs. That cache is never the truth: it all follows from the database, and clearing it
costs time alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeAlias

from sqlalchemy import Connection, func, select

from ones_db.jobs import among, job_record, newest, run_end, spec_record
from ones_db.records import RESIZE_DONE, RESIZE_ROLLED_BACK, EpochPoint, JobHistory, NoisePoint, ThroughputPoint
from ones_db.tables import BATCHES, EPOCHS, JOBS, RESIZES, RUNS, THROUGHPUT

SPEEDS = 5
"""Newest throughput samples kept of each shape and batch (ONES §3.2)."""
NOISES = 8
"""Newest gradient noise scales kept of a job."""
SPARE = 250
"""Jobs cached beyond as many as were ever asked for at once; those not asked for longest are forgotten first."""


@dataclass
class CachedRun:
    """The reports of one run, up to a number."""

    restart: int
    number: int = 0
    epochs: dict[int, tuple[EpochPoint, int]] = field(default_factory=dict)
    """Each epoch that ended, with the samples used in it."""
    speeds: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    """The newest (samples/s, time) at each global batch."""
    noises: deque[NoisePoint] = field(default_factory=lambda: deque(maxlen=NOISES))

    def add_sample(self, row: Any) -> None:
        """Take in a throughput sample that is newer than those before."""
        if row.seconds > 0:
            kept = self.speeds.setdefault(row.batch, deque(maxlen=SPEEDS))
            kept.append((row.samples / row.seconds, row.time))
        if row.noise is not None:
            self.noises.append(NoisePoint(row.noise, row.time))

    def add_epoch(self, row: Any) -> None:
        """Take in an epoch's end that is newer than those before; it stands for the same epoch done before."""
        point = EpochPoint(row.epoch, row.loss, row.accuracy, row.time, self.restart)
        self.epochs[row.epoch] = (point, row.samples)


@dataclass
class CachedJob:
    """A job's runs, and its history as its rows stood when it was last made."""

    runs: dict[int, CachedRun] = field(default_factory=dict)
    state: Any = None
    history: JobHistory | None = None


class HistoryCache:
    """What one store remembers. Not for several threads at a time."""

    def __init__(self) -> None:
        self._jobs: dict[int, CachedJob] = {}
        self._most = 0
        self.finished: tuple[Any, list[JobHistory]] | None = None
        """The histories of the finished jobs, and the state of their rows then."""

    def of(self, keys: Sequence[int]) -> dict[int, CachedJob]:
        """What is cached of these jobs, empty for new ones; makes them the last to be forgotten."""
        asked = {key: self._jobs.pop(key) if key in self._jobs else CachedJob() for key in keys}
        self._jobs.update(asked)
        self._most = max(self._most, len(asked))
        while len(self._jobs) > self._most + SPARE:
            del self._jobs[next(iter(self._jobs))]
        return asked

    def clear(self) -> None:
        """Start anew."""
        self._jobs.clear()
        self.finished = None


Row: TypeAlias = Any
"""A row of SQLAlchemy, its columns by name."""

PAUSES = 3
"""Resizes of a job whose mean pause is given."""
CHUNK = 250
"""Runs that one query asks for by themselves."""


def histories(
    connection: Connection, cluster: int, cache: HistoryCache, job_ids: Sequence[int] | None
) -> dict[int, JobHistory]:
    query = select(JOBS).where(newest(cluster)).order_by(JOBS.c.submit_time, JOBS.c.job_id)
    if job_ids is None:
        query = query.where(JOBS.c.elastic, JOBS.c.end_time.is_(None))
    else:
        query = query.where(among(JOBS.c.job_id, job_ids))
    return {history.job.job_id: history for history in _of(connection, cache, query)}


def finished_histories(connection: Connection, cluster: int, cache: HistoryCache, limit: int) -> list[JobHistory]:
    trained = select(EPOCHS.c.run_id).join(RUNS, RUNS.c.id == EPOCHS.c.run_id).where(RUNS.c.job_id == JOBS.c.id)
    # What may still come of a job that ended: its last words, and the pause of its last resize.
    said = select(func.sum(RUNS.c.report_number)).where(RUNS.c.job_id == JOBS.c.id)
    resized = select(func.count(RESIZES.c.pause_s)).where(RESIZES.c.job_id == JOBS.c.id)
    query = (
        select(JOBS.c.id, said.scalar_subquery(), resized.scalar_subquery())
        .where(JOBS.c.cluster_id == cluster, JOBS.c.end_time.is_not(None), JOBS.c.state == "COMPLETED")
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
        cache.finished = state, _of(connection, cache, jobs)
    return cache.finished[1]


def _of(connection: Connection, cache: HistoryCache, query: Any) -> list[JobHistory]:
    jobs = connection.execute(query).all()
    keys = [row.id for row in jobs]
    if not keys:
        return []
    runs = _runs(connection, keys)
    resizes = _resizes(connection, keys)
    cached = cache.of(keys)
    _read_on(connection, [(cached[key], run) for key in keys for run in runs[key]])
    found = []
    for row in jobs:
        job, mine, ended = cached[row.id], runs[row.id], resizes[row.id]
        state = [tuple(row), *map(tuple, mine), *map(tuple, ended)]
        if job.history is None or job.state != state:
            job.state, job.history = state, _history(row, mine, job.runs, ended)
        found.append(job.history)
    return found


def _runs(connection: Connection, keys: Sequence[int]) -> dict[int, list[Row]]:
    """The runs of each job in order, each with its end and with the global batch last in force."""
    changed = (
        select(BATCHES.c.batch)
        .where(BATCHES.c.run_id == RUNS.c.id, BATCHES.c.number > func.coalesce(RUNS.c.hello_number, 0))
        .order_by(BATCHES.c.number.desc())
        .limit(1)
        .scalar_subquery()
    )
    query = (
        select(
            *(RUNS.c[name] for name in _RUN),
            func.coalesce(changed, RUNS.c.batch).label("batch_now"),
            run_end().label("ended"),
        )
        .join(JOBS, JOBS.c.id == RUNS.c.job_id)
        .where(among(RUNS.c.job_id, keys))
        .order_by(RUNS.c.job_id, RUNS.c.restart)
    )
    return _by_job(connection, query)


_RUN = (
    "id",
    "job_id",
    "restart",
    "nodes",
    "gpus_per_node",
    "start_time",
    "batch",
    "epoch",
    "cursor",
    "first_loss",
    "report_number",
    "noise",
    "progress",
    "report_time",
)


_SAMPLE = select(*(THROUGHPUT.c[name] for name in ("run_id", "number", "time", "samples", "seconds", "batch", "noise")))
_EPOCH = select(*(EPOCHS.c[name] for name in ("run_id", "number", "time", "epoch", "samples", "loss", "accuracy")))

_SAMPLES, _EPOCHS = str(_SAMPLE), str(_EPOCH)


def _read_on(connection: Connection, runs: Sequence[tuple[CachedJob, Row]]) -> None:
    """Take what was reported since the last look into what is cached of each run."""
    started: dict[int, CachedRun] = {}
    known: dict[int, CachedRun] = {}
    for job, row in runs:
        run = job.runs.setdefault(row.id, CachedRun(row.restart))
        if run.number < row.report_number:
            (known if run.number else started)[row.id] = run
    if started:
        for sample in connection.execute(_first_samples(started)):
            started[sample.run_id].add_sample(sample)
        for epoch in connection.execute(_EPOCH.where(among(EPOCHS.c.run_id, started)).order_by(EPOCHS.c.number)):
            started[epoch.run_id].add_epoch(epoch)
    since = [f"(run_id = {key:d} AND number > {run.number:d})" for key, run in known.items()]
    for first in range(0, len(since), CHUNK):
        # Written out: SQLAlchemy would take longer to compile so many conditions than the database to meet them.
        new = " OR ".join(since[first : first + CHUNK])
        for sample in connection.exec_driver_sql(f"{_SAMPLES} WHERE {new} ORDER BY number"):
            known[sample.run_id].add_sample(sample)
        for epoch in connection.exec_driver_sql(f"{_EPOCHS} WHERE {new} ORDER BY number"):
            known[epoch.run_id].add_epoch(epoch)
    for job, row in runs:
        job.runs[row.id].number = row.report_number


def _first_samples(runs: Collection[int]) -> Any:
    """The newest samples of each run and batch, oldest first."""
    kind = (THROUGHPUT.c.run_id, THROUGHPUT.c.batch)
    age = func.row_number().over(partition_by=kind, order_by=THROUGHPUT.c.number.desc())
    ranked = _SAMPLE.add_columns(age.label("age")).where(among(THROUGHPUT.c.run_id, runs), THROUGHPUT.c.seconds > 0)
    inner = ranked.subquery()
    return select(inner).where(inner.c.age <= max(SPEEDS, NOISES)).order_by(inner.c.number)


def _resizes(connection: Connection, keys: Sequence[int]) -> dict[int, list[Row]]:
    """The resizes of each job that ended, in the order in which they did."""
    query = (
        select(
            *(RESIZES.c[name] for name in ("job_id", "restart", "new_nodes", "state", "started", "ended", "pause_s"))
        )
        .where(among(RESIZES.c.job_id, keys), RESIZES.c.ended.is_not(None))
        .order_by(RESIZES.c.ended, RESIZES.c.id)
    )
    return _by_job(connection, query)


def _by_job(connection: Connection, query: Any) -> dict[int, list[Row]]:
    rows: dict[int, list[Row]] = defaultdict(list)
    for row in connection.execute(query):
        rows[row.job_id].append(row)
    return rows


def _history(row: Row, runs: Sequence[Row], cached: Mapping[int, CachedRun], resizes: Sequence[Row]) -> JobHistory:
    job, spec = job_record(row._mapping), spec_record(row._mapping)
    epoch, cursor = next(((run.epoch, run.cursor) for run in reversed(runs) if run.epoch is not None), (0, 0))
    # Later runs come last and overwrite what they did anew; beyond the position, a lost checkpoint undid it.
    latest: dict[int, tuple[EpochPoint, int]] = {}
    for run in runs:
        latest.update(cached[run.id].epochs)
    ended = [latest[number] for number in sorted(latest) if number < epoch]
    epochs = tuple(point for point, _ in ended)
    used = sum(used for _, used in ended)
    # Where the job does not know its dataset's length, its epochs tell it as they end.
    samples = cursor + (epoch * spec.dataset if spec is not None and spec.dataset else used)
    progress = _newest(runs, "progress")
    noises = [point for run in runs for point in cached[run.id].noises]
    changed = resizes[-1].ended if resizes else None
    done = [number for number, resize in enumerate(resizes, 1) if resize.state == RESIZE_DONE]
    started = [run for run in runs if run.start_time is not None]
    return JobHistory(
        job=job,
        spec=spec,
        epochs=epochs,
        throughput=_throughput(runs, cached),
        samples=float(samples),
        batch=_newest(runs, "batch_now"),
        first_start=min((run.start_time for run in started), default=None),
        ended_runs_s=sum(max(0.0, run.ended - run.start_time) for run in started if run.ended is not None),
        running_since=next((run.start_time for run in reversed(started) if run.ended is None), None),
        resizes=sum(resizes[number - 1].restart >= 0 for number in done),
        failures=len(resizes) - (done[-1] if done else 0),
        last_resize_end=changed,
        epochs_since_change=sum(changed is None or point.time > changed for point in epochs),
        first_loss=next((run.first_loss for run in runs if run.first_loss is not None), None),
        first_batch=next((run.batch for run in runs if run.batch is not None), None),
        noise=tuple(noises[-NOISES:]),
        progress=None if progress is None else min(progress, float(samples)),
        interrupted=tuple(sorted(resize.started for resize in resizes if _interrupts(resize))),
        pause_s=_pause([resizes[number - 1] for number in done]),
        epoch_samples=used / len(ended) if used else None,
        ran=_ran(runs),
    )


def _interrupts(resize: Row) -> bool:
    """Whether its job's training stood still for it: a job that waited, or was never requeued, lost nothing."""
    stopped = resize.state in (RESIZE_DONE, RESIZE_ROLLED_BACK) or resize.pause_s is not None
    return bool(resize.restart >= 0 and stopped)


def _ran(runs: Sequence[Row]) -> tuple[tuple[int, int, float], ...]:
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    for run in runs:
        until = run.ended if run.ended is not None else run.report_time
        if run.start_time is not None and until is not None:
            seconds[run.nodes, run.gpus_per_node] += max(until - run.start_time, 0.0)
    return tuple((*shape, lasted) for shape, lasted in sorted(seconds.items()))


def _newest(runs: Sequence[Row], name: str) -> Any:
    """What the last run that said has said."""
    return next((value for run in reversed(runs) if (value := getattr(run, name)) is not None), None)


def _throughput(runs: Sequence[Row], cached: Mapping[int, CachedRun]) -> tuple[ThroughputPoint, ...]:
    """The newest samples of each shape and batch over all runs, oldest first."""
    kept: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        # Without a shape it teaches nothing.
        if run.nodes * run.gpus_per_node > 0:
            for batch, samples in cached[run.id].speeds.items():
                kept[run.nodes, run.gpus_per_node, batch] += samples
    points = [ThroughputPoint(*kind, *sample) for kind, samples in kept.items() for sample in samples[-SPEEDS:]]
    return tuple(sorted(points, key=lambda point: point.time))


def _pause(done: Sequence[Row]) -> float | None:
    """The mean of the last few that are known, of resizes that interrupted the job and let it run on."""
    known = [row.pause_s for row in done if row.pause_s is not None and row.restart >= 0 < row.new_nodes]
    return fmean(known[-PAUSES:]) if known else None

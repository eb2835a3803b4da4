"""Retention: combines old samples into longer ones and deletes old details, in many small transactions.

A combined sample replaces several. It has the sum of their seconds and training samples, the mean of loss, noise and
GPU use, and the largest memory. Position, progress, time and number are the last sample's. So queries and views treat
combined and single samples alike. The newest few samples of each run and batch are not combined, since
`ones_db.history` reads them for learning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, bindparam, exists, func, or_, select, text

from ones_db.engine import Transactions, add_or_replace, reading
from ones_db.history import NOISES, SPEEDS
from ones_db.jobs import among
from ones_db.reports import MOST
from ones_db.tables import ALTERNATIVES, DECISION_JOBS, DECISIONS, JOBS, RESIZES, ROLLUPS, RUNS, STEPS, THROUGHPUT
from ones_db.views import IDLE_USE, MEASURED, SAMPLES, spelled

T = TypeVar("T")

KEPT = max(SPEEDS, NOISES)
"""Number of newest samples of each run and batch that are never combined."""

_KIND = "batch, epoch, change, stretch, measured, noisy, busy, single"
"""Columns that must be equal in samples that are combined.

Samples that count in the views (`views.MEASURED`) are not combined with others. Samples with noise are not combined
with those without, nor samples with idle, busy and unknown GPUs. So sums over only one of these classes stay the same.
"""


def _mean(value: str, weight: str) -> str:
    """Return SQL for the weighted mean of the known values, or for their plain mean if all weights are zero."""
    weights = f"SUM(CASE WHEN {weight} > 0 AND {value} IS NOT NULL THEN {weight} END)"
    return f"COALESCE(SUM({value} * {weight}) / {weights}, AVG({value}))"


_GROUPS = f"""
    WITH s AS (
        SELECT t.number, t.batch, t.epoch, t.samples, t.seconds, t.loss, t.noise, t.nonfinite, t.gpu_use, t.gpu_memory,
            m.number AS change, m.nodes, m.gpus_per_node, m.world, whole(latest(1.0, t.time) / :stretch_s) AS stretch,
            CASE WHEN {MEASURED} THEN 1 ELSE 0 END AS measured, CASE WHEN t.noise IS NULL THEN 0 ELSE 1 END AS noisy,
            CASE WHEN t.gpu_use < {IDLE_USE} THEN 0 WHEN t.gpu_use IS NOT NULL THEN 1 END AS busy,
            CASE WHEN t.seconds > 0 THEN 1 ELSE 0 END AS timed,
            latest(0.0, t.samples - 1.0 * COALESCE(t.nonfinite, 0) * t.batch) AS finite
        FROM {SAMPLES} WHERE r.id = :run AND t.run_id = r.id
    ), k AS (
        SELECT s.*, CASE WHEN number = MAX(number) OVER () OR (timed = 1 AND {KEPT} >= ROW_NUMBER() OVER (
            PARTITION BY batch, nodes, gpus_per_node, world, timed ORDER BY number DESC)) THEN number END AS single
        FROM s
    ), g AS (
        SELECT MIN(number) AS first, MAX(number) AS last, COUNT(*) AS count,
            whole(earliest(SUM(1.0 * samples), {MOST}.0)) AS samples, SUM(seconds) AS seconds,
            {_mean("loss", "finite")} AS loss, {_mean("noise", "seconds")} AS noise,
            SUM(nonfinite) AS nonfinite, {_mean("gpu_use", "seconds")} AS gpu_use,
            MAX(gpu_memory) AS gpu_memory
        FROM (SELECT k.*, ROW_NUMBER() OVER (ORDER BY number)
            - ROW_NUMBER() OVER (PARTITION BY {_KIND} ORDER BY number) AS island FROM k) n
        GROUP BY {_KIND}, island HAVING COUNT(*) > 1
    )
    SELECT g.*, (SELECT p.progress FROM throughput p WHERE p.run_id = :run AND p.number >= g.first
        AND p.number <= g.last AND p.progress IS NOT NULL ORDER BY p.number DESC LIMIT 1) AS progress
    FROM g"""
"""Query of the groups of a run's samples to combine: a row for each group, with its combined values. The newest samples
of each batch and size are in no group, nor is the run's last sample."""

_OF_RUN = THROUGHPUT.c.run_id == bindparam("run")
_STATE = select(RUNS.c.report_number, select(func.count()).where(_OF_RUN).scalar_subquery())
_STATE = _STATE.join(JOBS, JOBS.c.id == RUNS.c.job_id)
_STATE = _STATE.where(RUNS.c.id == bindparam("run"), JOBS.c.end_time < bindparam("before"))
"""Query of (last report's number, number of samples) of a run. It has a row only if the job ended before `before`."""
_BEFORE_LAST = THROUGHPUT.c.number >= bindparam("first"), THROUGHPUT.c.number < bindparam("last")
_DELETION = THROUGHPUT.delete().where(_OF_RUN, *_BEFORE_LAST)
_COMBINED = ("samples", "seconds", "loss", "noise", "progress", "nonfinite", "gpu_use", "gpu_memory")
_UPDATE = THROUGHPUT.update().where(_OF_RUN, THROUGHPUT.c.number == bindparam("last"))
_UPDATE = _UPDATE.values({name: bindparam(name) for name in _COMBINED})


def _led_to_nothing() -> Any:
    its_own = RESIZES.c.decision_id == DECISION_JOBS.c.decision_id, RESIZES.c.job_id == DECISION_JOBS.c.job_id
    return DECISION_JOBS.c.acted.is_(False) & ~exists().where(*its_own)


class RetentionStore(Transactions):
    """Part of a `Store`: combines and deletes old rows."""

    @reading
    def rollups_due(self, connection: Connection, before: float, stretch_s: float) -> list[int]:
        """Return the runs (runs.id) of jobs that ended before a time, with samples to combine into samples of
        `stretch_s`."""
        query = (
            select(RUNS.c.id)
            .join(JOBS, JOBS.c.id == RUNS.c.job_id)
            .outerjoin(ROLLUPS, ROLLUPS.c.run_id == RUNS.c.id)
            .where(JOBS.c.cluster_id == self._cluster, JOBS.c.end_time < before)
            .where(
                or_(
                    ROLLUPS.c.stretch_s.is_(None),
                    ROLLUPS.c.stretch_s < stretch_s,
                    ROLLUPS.c.number < RUNS.c.report_number,
                )
            )
            .where(exists().where(THROUGHPUT.c.run_id == RUNS.c.id))
            .order_by(RUNS.c.id)
        )
        return list(connection.scalars(query))

    def roll_up(self, run: int, before: float, stretch_s: float, *, dry: bool = False) -> Iterator[tuple[int, int]]:
        """Combine the samples of a run (runs.id). After each short transaction, yield (samples read, samples deleted).

        `before` and `stretch_s` are as in `rollups_due`. It ends early if the job runs again or reports, or if another
        call combines the samples of the same run. With `dry`, only count.
        """
        asked = {"run": run, "before": before}
        with self._read() as connection:
            number, read = connection.execute(_STATE, asked).one_or_none() or (None, 0)
            query = text(spelled(_GROUPS, connection.dialect.name))
            found = connection.execute(query, {"run": run, "stretch_s": stretch_s}).mappings()
            groups, left = [{**group, "run": run} for group in found] if number is not None else [], read
        for at in range(0, len(groups), GROUPS_AT_ONCE):
            some = groups[at : at + GROUPS_AT_ONCE]
            removed = sum(group.pop("count") - 1 for group in some)
            if not dry:
                spans = [{"run": run, "first": group.pop("first"), "last": group["last"]} for group in some]
                with self._write() as connection:
                    if connection.execute(_STATE, asked).one_or_none() != (number, left):
                        return
                    connection.execute(_DELETION, spans)
                    connection.execute(_UPDATE, some)
            left -= removed
            yield 0, removed
        if number is not None:
            if not dry:
                with self._write() as connection:
                    mark = {"run_id": run, "stretch_s": stretch_s, "number": number}
                    add_or_replace(connection, ROLLUPS, ("run_id",), [mark])
            yield read, 0

    @reading
    def forgettable_jobs(self, connection: Connection, before: float) -> list[int]:
        """Return the jobs (jobs.id) that ended before a time and have rows that `forget` would delete."""
        idle = exists().where(DECISION_JOBS.c.job_id == JOBS.c.id, _led_to_nothing())
        steps = exists().where(RESIZES.c.job_id == JOBS.c.id, STEPS.c.resize_id == RESIZES.c.id)
        query = select(JOBS.c.id).where(JOBS.c.cluster_id == self._cluster, JOBS.c.end_time < before, or_(idle, steps))
        return list(connection.scalars(query.order_by(JOBS.c.id)))

    def forget(self, before: float, keys: Sequence[int], *, dry: bool = False) -> int:
        """Delete old details of these jobs (jobs.id), and return the number of rows. With `dry`, only count them.

        Details are alternatives, decisions that changed nothing, and steps of resizes. Resizes and their costs stay.
        """
        with self._read() if dry else self._write() as connection:
            ended = JOBS.c.cluster_id == self._cluster, JOBS.c.end_time < before, among(JOBS.c.id, keys)
            jobs = list(connection.scalars(select(JOBS.c.id).where(*ended)))
            idle = among(DECISION_JOBS.c.job_id, jobs) & _led_to_nothing()
            resizes = select(RESIZES.c.id).where(among(RESIZES.c.job_id, jobs))
            decided = list(connection.scalars(select(DECISION_JOBS.c.decision_id).where(idle).distinct()))
            which = (
                (ALTERNATIVES, among(ALTERNATIVES.c.job_id, jobs)),
                (DECISION_JOBS, idle),
                (STEPS, STEPS.c.resize_id.in_(resizes)),
            )
            if dry:
                counts = (select(func.count()).select_from(table).where(of) for table, of in which)
                return sum(connection.scalar(count) or 0 for count in counts)
            gone = sum(connection.execute(table.delete().where(of)).rowcount for table, of in which)
            used = (exists().where(table.c.decision_id == DECISIONS.c.id) for table in (DECISION_JOBS, RESIZES))
            connection.execute(DECISIONS.delete().where(among(DECISIONS.c.id, decided), ~or_(*used)))
            return gone


MINUTE_S, HOUR_S = 60.0, 3600.0
GROUPS_AT_ONCE = 1_000
"""Number of combined samples that are stored in one transaction."""
JOBS_AT_ONCE = 200
"""Number of jobs whose old rows are deleted in one transaction."""
REST_S = 0.05
"""Seconds of work after which `maintain` rests. It rests for as long as it has worked."""


@dataclass(frozen=True)
class Ages:
    """Retention: seconds after a job's end at which its rows are reduced."""

    minutes_s: float
    """Age from which a job keeps one sample a minute."""
    hours_s: float
    """Age from which a job keeps one sample an hour."""
    forget_s: float | None = None
    """Age from which decisions without effect and steps of resizes are deleted; None to keep them."""


@dataclass(frozen=True)
class Done:
    """Counts of what `maintain` has changed, or would change."""

    runs: int = 0
    """Number of runs whose samples were read."""
    read: int = 0
    """Number of samples read."""
    removed: int = 0
    """Number of samples deleted after they were combined."""
    jobs: int = 0
    """Number of jobs whose decisions or steps were deleted."""
    rows: int = 0
    """Number of rows that were deleted from these jobs."""


def maintain(
    store: RetentionStore,
    ages: Ages,
    *,
    dry: bool = False,
    now: float | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    sleep: Callable[[float], object] = time.sleep,
) -> Done:
    """Combine old samples and delete old rows, as `ages` says. With `dry`, only count.

    Rows of jobs that have not ended stay, and so do all rows from which curves are learned. It rests about half of the
    time, so that the companion can use the database. `progress` is called with the kind of work, the amount done, and
    the amount in all.
    """
    now = time.time() if now is None else now
    runs, began = set[int](), time.monotonic()
    read = removed = jobs = rows = 0

    def resting(steps: Iterable[T]) -> Iterator[T]:
        nonlocal began
        for done in steps:
            yield done
            if not dry and (worked := time.monotonic() - began) > REST_S:
                sleep(worked)
                began = time.monotonic()

    # What is old enough for hours need not become minutes first.
    for what, age, stretch in (("hours", ages.hours_s, HOUR_S), ("minutes", ages.minutes_s, MINUTE_S)):
        due = [run for run in store.rollups_due(now - age, stretch) if not (dry and run in runs)]
        runs.update(due)
        for done, run in enumerate(due):
            progress(what, done, len(due))
            for looked, gone in resting(store.roll_up(run, now - age, stretch, dry=dry)):
                read, removed = read + looked, removed + gone
        progress(what, len(due), len(due))
    if ages.forget_s is not None:
        keys, until = store.forgettable_jobs(now - ages.forget_s), now - ages.forget_s
        jobs = len(keys)
        parts = [keys[first : first + JOBS_AT_ONCE] for first in range(0, jobs, JOBS_AT_ONCE)]
        for done, gone in enumerate(resting(store.forget(until, part, dry=dry) for part in parts)):
            rows += gone
            progress("decisions", done * JOBS_AT_ONCE, jobs)
        progress("decisions", jobs, jobs)
    return Done(len(runs), read, removed, jobs, rows)

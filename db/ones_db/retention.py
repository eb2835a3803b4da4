"""Retention: rolls up old samples to longer ones and deletes old details, in many small transactions.

A rolled-up sample replaces several: sums of samples and seconds, means of loss, noise and use of GPUs, the most memory.
Position, progress, time and number are of the last replaced report. So queries and views read rolled-up and other
samples alike. The newest few samples of each run and batch, which `ones_db.history` reads for learning, stay unchanged.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, bindparam, exists, func, or_, select

from ones_db.engine import Transactions, add_or_replace, reading
from ones_db.history import NOISES, SPEEDS
from ones_db.jobs import among
from ones_db.tables import (
    ALTERNATIVES,
    DECISION_JOBS,
    DECISIONS,
    JOBS,
    MEMBERSHIPS,
    RESIZES,
    ROLLUPS,
    RUNS,
    STEPS,
    THROUGHPUT,
)
from ones_db.view import IDLE_USE, LEAST_S, WITHIN

KEPT = max(SPEEDS, NOISES)
"""Number of newest samples of each run and batch that are never rolled up."""
PIECE = 10_000
"""Samples read in one transaction."""


Changes = list[tuple[int, float, tuple[int, ...]]]
"""Report number, time and size (nodes, GPUs per node, GPUs) of each membership of a run, ascending."""


@dataclass
class RollUpWork:
    """Progress of the roll-up of one run's samples."""

    run: int
    """runs.id"""
    after: int = 0
    """Number of the last report that is rolled up."""
    kept: set[int] | None = None
    """Numbers of the reports that are not rolled up; None before the first step."""
    changes: Changes | None = None
    """Memberships of the run; None before the first step."""
    done: bool = False


def _some(connection: Connection, work: RollUpWork, before: float, stretch_s: float, *, dry: bool) -> tuple[int, int]:
    """Roll up the next samples of one run; return how many were read and how many deleted."""
    last = select(RUNS.c.report_number).join(JOBS, JOBS.c.id == RUNS.c.job_id)
    number = connection.scalar(last.where(RUNS.c.id == work.run, JOBS.c.end_time < before))
    if number is None:
        work.done = True
        return 0, 0
    query = select(THROUGHPUT).where(THROUGHPUT.c.run_id == work.run, THROUGHPUT.c.number > work.after)
    rows = connection.execute(query.order_by(THROUGHPUT.c.number).limit(PIECE)).mappings().all()
    work.done = len(rows) < PIECE
    if work.changes is None:
        columns = (MEMBERSHIPS.c[name] for name in ("number", "time", "nodes", "gpus_per_node", "world"))
        changes = select(*columns).where(MEMBERSHIPS.c.run_id == work.run).order_by(MEMBERSHIPS.c.number)
        work.changes = [(number, at, tuple(size)) for number, at, *size in connection.execute(changes)]
    if work.kept is None:
        all_rows = rows if work.done else connection.execute(_KINDS, {"run": work.run}).mappings().all()
        work.kept = _kept(all_rows, work.changes)
    groups = list(_groups(rows, stretch_s, work.kept, work.changes))
    if not work.done and len(groups) > 1:
        # Its stretch may go on in the next piece; of a piece that is all one stretch, what follows becomes another.
        groups.pop()
    merged = [group for group in groups if len(group.rows) > 1]
    if merged and not dry:
        connection.execute(_DELETION, [group.key(work.run) for group in merged])
        connection.execute(_UPDATE, [{**group.key(work.run), **group.values()} for group in merged])
    if work.done and not dry:
        mark = {"run_id": work.run, "stretch_s": stretch_s, "number": number}
        add_or_replace(connection, ROLLUPS, ("run_id",), [mark])
    if groups:
        work.after = groups[-1].rows[-1]["number"]
    return sum(len(group.rows) for group in groups), sum(len(group.rows) - 1 for group in merged)


def _kept(rows: Sequence[Any], changes: Changes) -> set[int]:
    """Return the numbers of a run's reports that are not rolled up: the newest of each batch and size, and the last."""
    of_kind: Counter[tuple[int, tuple[int, ...]]] = Counter()
    kept = {row["number"] for row in rows[-1:]}
    for row in reversed(rows):
        before = _changes_before(row, changes)
        kind = row["batch"], changes[before - 1][2] if before else ()
        if row["seconds"] > 0 and of_kind[kind] < KEPT:
            of_kind[kind] += 1
            kept.add(row["number"])
    return kept


def _changes_before(row: Any, changes: Changes) -> int:
    return bisect(changes, row["number"], key=lambda change: change[0]) if changes else 0


@dataclass(frozen=True)
class _Group:
    """Consecutive samples of a run that become one."""

    rows: Sequence[Any]

    def key(self, run: int) -> dict[str, Any]:
        return {"run": run, "first": self.rows[0]["number"], "last": self.rows[-1]["number"]}

    def values(self) -> dict[str, Any]:
        counted = [row["nonfinite"] for row in self.rows if row["nonfinite"] is not None]
        progress = [row["progress"] for row in self.rows if row["progress"] is not None]
        memory = [row["gpu_memory"] for row in self.rows if row["gpu_memory"] is not None]
        finite = [max(float(row["samples"] - (row["nonfinite"] or 0) * row["batch"]), 0.0) for row in self.rows]
        return {
            "all_samples": sum(row["samples"] for row in self.rows),
            "all_seconds": sum(row["seconds"] for row in self.rows),
            "mean_loss": _mean([(row["loss"], weight) for row, weight in zip(self.rows, finite, strict=True)]),
            "mean_noise": _mean([(row["noise"], row["seconds"]) for row in self.rows]),
            "last_progress": progress[-1] if progress else None,
            "all_nonfinite": sum(counted) if counted else None,
            "mean_gpu_use": _mean([(row["gpu_use"], row["seconds"]) for row in self.rows]),
            "most_gpu_memory": max(memory, default=None),
        }


def _mean(values: Sequence[tuple[float | None, float]]) -> float | None:
    """Return the weighted mean of (value, weight) pairs without unknown values; None if all are unknown."""
    known = [(value, weight) for value, weight in values if value is not None]
    if not known:
        return None
    total = sum(weight for _, weight in known)
    if not total:
        return sum(value for value, _ in known) / len(known)
    return sum(value * (weight / total) for value, weight in known)


def _groups(rows: Sequence[Any], stretch_s: float, kept: set[int], changes: Changes) -> Iterator[_Group]:
    """Yield the groups of consecutive samples that become one, in the order of reports.

    Samples that count in the views (`view.MEASURED`) and others are never in one group. Neither are samples with and
    without noise, or with idle, busy and unknown GPUs: so sums over only some of the samples stay the same.
    """

    def together(row: Any) -> tuple[Any, ...]:
        alone = row["number"] if row["number"] in kept else None
        before, use = _changes_before(row, changes), row["gpu_use"]
        begun = changes[before - 1][1] if before else -math.inf
        measured = row["seconds"] > LEAST_S and row["samples"] > 0 and row["time"] - WITHIN * row["seconds"] >= begun
        stretch, idle = (before, row["time"] // stretch_s), use is not None and use < IDLE_USE
        return row["batch"], row["epoch"], stretch, measured, row["noise"] is None, use is None, idle, alone

    for _, group in groupby(rows, together):
        yield _Group(list(group))


_OF_RUN = THROUGHPUT.c.run_id == bindparam("run")
_KINDS = select(THROUGHPUT.c.number, THROUGHPUT.c.batch, THROUGHPUT.c.seconds).where(_OF_RUN)
_KINDS = _KINDS.order_by(THROUGHPUT.c.number)
"""Query of what decides which samples of a run are not rolled up."""
_DELETION = THROUGHPUT.delete().where(
    _OF_RUN, THROUGHPUT.c.number >= bindparam("first"), THROUGHPUT.c.number < bindparam("last")
)
_UPDATE = (
    THROUGHPUT.update()
    .where(_OF_RUN, THROUGHPUT.c.number == bindparam("last"))
    .values(
        samples=bindparam("all_samples"),
        seconds=bindparam("all_seconds"),
        loss=bindparam("mean_loss"),
        noise=bindparam("mean_noise"),
        progress=bindparam("last_progress"),
        nonfinite=bindparam("all_nonfinite"),
        gpu_use=bindparam("mean_gpu_use"),
        gpu_memory=bindparam("most_gpu_memory"),
    )
)


def _led_to_nothing() -> Any:
    """Return the condition that a row of decision_jobs was not acted on, and that no resize of the job refers to it."""
    referred = exists().where(
        RESIZES.c.decision_id == DECISION_JOBS.c.decision_id, RESIZES.c.job_id == DECISION_JOBS.c.job_id
    )
    return DECISION_JOBS.c.acted.is_(False) & ~referred


class RetentionStore(Transactions):
    """Part of a `Store`: rolls up and deletes old rows."""

    @reading
    def rollups_due(self, connection: Connection, before: float, stretch_s: float) -> list[int]:
        """Return the runs (runs.id), of jobs that ended before then, whose samples are not rolled up to this length."""
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

    def roll_up(
        self, works: deque[RollUpWork], before: float, stretch_s: float, *, dry: bool = False
    ) -> tuple[int, int]:
        """Roll up the next samples of these runs in a short transaction; done runs leave. `dry` only counts. Return how
        many samples were read, and how many deleted, since a rolled-up sample replaces them."""
        with self._read() if dry else self._write() as connection:
            read = removed = 0
            while works and read < PIECE:
                looked, gone = _some(connection, works[0], before, stretch_s, dry=dry)
                read, removed = read + looked, removed + gone
                if works[0].done:
                    works.popleft()
            return read, removed

    @reading
    def forgettable_jobs(self, connection: Connection, before: float) -> list[int]:
        """Return the jobs (jobs.id) that ended before then and have rows that `forget` would delete."""
        idle = exists().where(DECISION_JOBS.c.job_id == JOBS.c.id, _led_to_nothing())
        steps = exists().where(RESIZES.c.job_id == JOBS.c.id, STEPS.c.resize_id == RESIZES.c.id)
        query = select(JOBS.c.id).where(JOBS.c.cluster_id == self._cluster, JOBS.c.end_time < before, or_(idle, steps))
        return list(connection.scalars(query.order_by(JOBS.c.id)))

    def forget(self, before: float, keys: Sequence[int], *, dry: bool = False) -> int:
        """Delete rows of these jobs (jobs.id): alternatives, decisions that led to nothing, and steps of resizes.
        Return the number of deleted rows. Resizes and their costs stay. `dry` only counts."""
        with self._read() if dry else self._write() as connection:
            ended = select(JOBS.c.id).where(
                JOBS.c.cluster_id == self._cluster, JOBS.c.end_time < before, among(JOBS.c.id, keys)
            )
            jobs = list(connection.scalars(ended))
            idle = among(DECISION_JOBS.c.job_id, jobs) & _led_to_nothing()
            resizes = select(RESIZES.c.id).where(among(RESIZES.c.job_id, jobs))
            decided = list(connection.scalars(select(DECISION_JOBS.c.decision_id).where(idle).distinct()))
            which = (
                (ALTERNATIVES, among(ALTERNATIVES.c.job_id, jobs)),
                (DECISION_JOBS, idle),
                (STEPS, STEPS.c.resize_id.in_(resizes)),
            )
            if dry:
                return sum(
                    connection.scalar(select(func.count()).select_from(table).where(of)) or 0 for table, of in which
                )
            gone = sum(connection.execute(table.delete().where(of)).rowcount for table, of in which)
            connection.execute(
                DECISIONS.delete().where(
                    among(DECISIONS.c.id, decided),
                    ~exists().where(DECISION_JOBS.c.decision_id == DECISIONS.c.id),
                    ~exists().where(RESIZES.c.decision_id == DECISIONS.c.id),
                )
            )
            return gone


MINUTE_S, HOUR_S = 60.0, 3600.0
JOBS_AT_ONCE = 200
"""Jobs whose old rows are deleted in one transaction."""
REST_S = 0.05
"""Shortest rest after a transaction, in seconds."""


@dataclass(frozen=True)
class Ages:
    """Retention periods, in seconds after a job's end."""

    minutes_s: float
    """Age from which a job's samples become one a minute."""
    hours_s: float
    """Age from which a job's samples become one an hour."""
    forget_s: float | None = None
    """Age from which a job's decisions without effect, and steps of resizes, are deleted; None keeps these rows."""


@dataclass(frozen=True)
class Done:
    """Numbers of rows in a call of `maintain`, or in a dry run."""

    runs: int = 0
    """Runs whose samples were read."""
    read: int = 0
    """Samples read."""
    removed: int = 0
    """Samples deleted, since a rolled-up sample replaces them."""
    jobs: int = 0
    """Jobs whose decisions or steps were deleted."""
    rows: int = 0
    """Rows of these jobs that were deleted."""


def maintain(
    store: RetentionStore,
    ages: Ages,
    *,
    dry: bool = False,
    now: float | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    sleep: Callable[[float], object] = time.sleep,
) -> Done:
    """Roll up old samples, and delete old rows, by the periods in `ages`; `dry` only counts.

    Rows of jobs that have not ended stay, and so do all rows that learning reads. After each step the database is left
    to the companion for as long as the step took. `progress` is called with the kind of step, the amount done, and the
    amount in all.
    """
    now = time.time() if now is None else now
    runs: set[int] = set()
    read = removed = 0
    # What is old enough for hours need not become minutes first.
    for what, age, stretch in (("hours", ages.hours_s, HOUR_S), ("minutes", ages.minutes_s, MINUTE_S)):
        works = deque(RollUpWork(run) for run in store.rollups_due(now - age, stretch) if not (dry and run in runs))
        runs |= {work.run for work in works}
        of = len(works)
        while works:
            progress(what, of - len(works), of)
            began = time.monotonic()
            looked, gone = store.roll_up(works, now - age, stretch, dry=dry)
            read, removed = read + looked, removed + gone
            if not dry:
                sleep(max(time.monotonic() - began, REST_S))
        progress(what, of, of)
    jobs = rows = 0
    if ages.forget_s is not None:
        keys = store.forgettable_jobs(now - ages.forget_s)
        jobs = len(keys)
        for first in range(0, jobs, JOBS_AT_ONCE):
            progress("decisions", first, jobs)
            began = time.monotonic()
            rows += store.forget(now - ages.forget_s, keys[first : first + JOBS_AT_ONCE], dry=dry)
            if not dry:
                sleep(max(time.monotonic() - began, REST_S))
        progress("decisions", jobs, jobs)
    return Done(len(runs), read, removed, jobs, rows)

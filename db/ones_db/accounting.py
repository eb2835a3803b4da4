"""Jobs as Slurm's accounting has them, beside those that the companion knows. Only jobs that have ended come in."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from ones_db.blocks import started_blocks
from ones_db.engine import add_or_replace
from ones_db.jobs import among, run_end
from ones_db.records import JobRecord, RunRecord
from ones_db.rows import record_of, row_of
from ones_db.tables import ACCOUNTING, JOBS, RUNS


@dataclass(frozen=True)
class AccountingJob:
    """A job that has ended, as Slurm's accounting has it."""

    job: JobRecord
    runs: tuple[RunRecord, ...]
    """By their start; empty where it never started."""
    time_limit_s: float | None = None


class Imported(NamedTuple):
    """What became of jobs that were read from accounting."""

    new: int = 0
    changed: int = 0
    """Known from accounting before, and more is known now."""
    same: int = 0
    companion: int = 0
    """Known by the companion, and left as they are."""

    def plus(self, other: Imported) -> Imported:
        """Both together."""
        return Imported(*(a + b for a, b in zip(self, other, strict=True)))


class PastJob(NamedTuple):
    """A job that has ended, by accounting or the companion; times in seconds."""

    job_id: int
    name: str
    user: str
    account: str
    partition: str
    state: str
    submit_time: float
    start_time: float | None
    """Of its first run; None where it never started."""
    end_time: float
    runs: int
    run_s: float
    """In all its runs."""
    gpus: int
    """Of its largest run."""
    gpu_s: float
    """GPU-seconds of all its runs."""


SAME_JOB_S = 86_400.0
"""Two stays of one job id less than this apart are of one job: Slurm lets a job that ended be requeued for less than
this, and takes far longer to come round to the same id."""

SAME_START_S = 5.0
"""How far apart Slurm's controller and its accounting may have the start of one task."""

Row = Mapping[Any, Any]


def add_accounting(connection: Connection, cluster: int, given: Sequence[AccountingJob]) -> Imported:
    known, runs = _known(connection, cluster, [one.job.job_id for one in given])
    blocks = started_blocks(connection, cluster, [one.job.job_id for one in given])
    done, now = Imported(), time.time()
    marks: list[dict[str, Any]] = []
    for one in given:
        if any(
            abs(start - (run.start_time or 0.0)) <= SAME_START_S for run in one.runs for start in blocks[run.job_id]
        ):
            # A block of a job that the companion knows: its row is there.
            done = done.plus(Imported(companion=1))
            continue
        row = next((row for row in known[one.job.job_id] if _same(row, one)), None)
        if row is None:
            key = _insert(connection, cluster, one)
            done = done.plus(Imported(new=1))
        elif row["import_time"] is None:
            done = done.plus(Imported(companion=1))
            continue
        else:
            key, before = row["id"], runs[row["id"]]
            after = _joined(row, before, one)
            if after is None:
                done = done.plus(Imported(same=1))
                continue
            _replace(connection, cluster, key, after)
            done = done.plus(Imported(changed=1))
        marks.append({"job_id": key, "time_limit_s": one.time_limit_s, "import_time": now})
    add_or_replace(connection, ACCOUNTING, ("job_id",), marks)
    return done


def _known(
    connection: Connection, cluster: int, job_ids: Sequence[int]
) -> tuple[dict[int, list[Row]], dict[int, list[RunRecord]]]:
    """The stored jobs with these ids, and the runs (by jobs.id) of those that came from accounting."""
    known: dict[int, list[Row]] = defaultdict(list)
    query = (
        select(JOBS, ACCOUNTING.c.import_time)
        .outerjoin(ACCOUNTING, ACCOUNTING.c.job_id == JOBS.c.id)
        .where(JOBS.c.cluster_id == cluster, among(JOBS.c.job_id, job_ids))
    )
    slurm_ids = {}
    for row in connection.execute(query).mappings():
        known[row["job_id"]].append(row)
        if row["import_time"] is not None:
            slurm_ids[row["id"]] = row["job_id"]
    runs: dict[int, list[RunRecord]] = defaultdict(list)
    stored = select(RUNS).where(among(RUNS.c.job_id, slurm_ids)).order_by(RUNS.c.restart)
    for row in connection.execute(stored).mappings():
        runs[row["job_id"]].append(record_of(RunRecord, row, job_id=slurm_ids[row["job_id"]]))
    return known, runs


def _same(row: Row, read: AccountingJob) -> bool:
    """Whether a stored job is the one that accounting has: its time and the other's meet, or nearly."""
    if row["submit_time"] == read.job.submit_time:
        return True
    if row["import_time"] is not None and row["user_name"] != read.job.user:
        return False
    end = row["end_time"]
    after = end is not None and read.job.submit_time - end > SAME_JOB_S
    return not after and row["submit_time"] - (read.job.end_time or 0.0) <= SAME_JOB_S


def _joined(row: Row, before: Sequence[RunRecord], read: AccountingJob) -> AccountingJob | None:
    """What is stored and what was read, together; None where nothing new was read.

    An import of a later span knows only a requeued job's later runs.
    """
    job = read.job
    runs = {run.start_time: run for run in [*before, *read.runs]}
    numbered = tuple(runs[start] for start in sorted(runs, key=lambda start: start or 0.0))
    if len({run.restart for run in numbered}) < len(numbered):
        numbered = tuple(replace(run, restart=number) for number, run in enumerate(numbered))
    first = row["submit_time"] <= job.submit_time
    if first:
        job = replace(job, submit_time=row["submit_time"], requested_shape=record_of(JobRecord, row).requested_shape)
    if row["end_time"] > (job.end_time or 0.0):
        names = ("name", "account", "partition", "state", "end_time", "exit_code")
        job = replace(job, **{name: row[name] for name in names})
    job = replace(job, restart=max([job.restart, row["restart"], *(run.restart for run in numbered)]))
    stored = {name: row[name] for name in row_of(job)}
    if numbered == tuple(before) and stored == row_of(job):
        return None
    return AccountingJob(job, numbered, read.time_limit_s)


def _insert(connection: Connection, cluster: int, one: AccountingJob) -> int:
    result = connection.execute(JOBS.insert().values(cluster_id=cluster, **row_of(one.job)))
    key = int(result.inserted_primary_key[0])  # type: ignore[index]
    _insert_runs(connection, key, one.runs)
    return key


def _replace(connection: Connection, cluster: int, key: int, one: AccountingJob) -> None:
    connection.execute(JOBS.update().where(JOBS.c.id == key).values(**row_of(one.job)))
    # Nobody reported on them, so that nothing hangs on them.
    connection.execute(RUNS.delete().where(RUNS.c.job_id == key))
    _insert_runs(connection, key, one.runs)


def _insert_runs(connection: Connection, key: int, runs: Sequence[RunRecord]) -> None:
    rows = [{**row_of(run), "job_id": key} for run in runs]
    if rows:
        connection.execute(RUNS.insert(), rows)


def past_jobs(connection: Connection, cluster: int, since: float, until: float) -> list[PastJob]:
    ended = run_end()
    length = ended - RUNS.c.start_time
    gpus = RUNS.c.nodes * RUNS.c.gpus_per_node
    of_job = ("job_id", "name", "user_name", "account", "partition", "state", "submit_time")
    query = (
        select(
            *(JOBS.c[name] for name in of_job),
            func.min(RUNS.c.start_time),
            JOBS.c.end_time,
            func.count(RUNS.c.start_time),
            func.coalesce(func.sum(length), 0.0),
            func.coalesce(func.max(gpus), 0),
            func.coalesce(func.sum(length * gpus), 0.0),
        )
        .select_from(JOBS)
        .outerjoin(RUNS, RUNS.c.job_id == JOBS.c.id)
        .where(JOBS.c.cluster_id == cluster, JOBS.c.end_time.is_not(None))
        .where(JOBS.c.submit_time >= since, JOBS.c.submit_time < until)
        .group_by(JOBS.c.id)
        .order_by(JOBS.c.submit_time, JOBS.c.job_id)
    )
    return [PastJob._make(row) for row in connection.execute(query)]

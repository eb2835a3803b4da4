"""What jobs used and what resizing did to them, read from the database's views: the figures of `slurm-ones report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ones_db.query import Reader

T = TypeVar("T")

MOST_JOBS, MOST_MEASURED = 5_000, 500
"""Jobs of a span that are looked at, and those of them whose measurements are: the newest."""


@dataclass(frozen=True)
class Measured:
    """What a job showed at one shape and global batch (view `scaling`)."""

    nodes: int
    gpus: int
    batch: int
    measured_s: float
    samples_per_s: float
    gpu_efficiency: float | None
    """Throughput of a GPU over that at the smallest shape."""
    statistical_efficiency: float | None
    """Progress of a sample relative to the base batch; None where it told no gradient noise."""
    goodput: float | None

    @property
    def useful(self) -> float:
        """Useful samples/s: goodput where it is known, else throughput."""
        return self.goodput if self.goodput is not None else self.samples_per_s


@dataclass(frozen=True)
class Resized:
    """A finished resize (view `resize_cost`)."""

    start_time: float
    old_gpus: int
    new_gpus: int
    state: str
    mechanism: str
    pause_s: float | None
    import_s: float | None
    outcome: str | None


@dataclass(frozen=True)
class Stretch:
    """A time in which a job held so many GPUs (view `run_timeline`, of jobs of blocks `membership_timeline`)."""

    start_time: float
    running_s: float
    gpus: int


@dataclass(frozen=True)
class Job:
    """What one job used (view `job_summary`). Times in Unix seconds, None where there is none."""

    job_id: int
    name: str
    user_name: str
    account: str
    partition: str
    state: str
    submit_time: float
    requested_gpus: int
    start_time: float | None
    end_time: float | None
    jct_s: float | None
    queueing_s: float | None
    running_s: float | None
    runs: int
    smallest_gpus: int | None
    largest_gpus: int | None
    gpu_hours: float | None
    resizes: int
    pause_s: float
    accuracy: float | None


@dataclass(frozen=True)
class Usage:
    """A job, and all that was measured of it."""

    job: Job
    measured: tuple[Measured, ...] = ()
    resized: tuple[Resized, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    predicted_jct_s: float | None = None
    """Its JCT at the size it asked for, by its own measurement there (view `what_if`)."""


def usage(
    reader: Reader,
    cluster: str,
    *,
    job_id: int | None = None,
    user: str = "",
    since: float | None = None,
    until: float | None = None,
) -> list[Usage]:
    """The jobs of a cluster, by their submission: one, one user's, or those that were there in a span.

    Raises `StoreError` where the database cannot be asked.
    """
    conditions, values = ["cluster = :cluster"], dict[str, Any](cluster=cluster)
    wanted: tuple[tuple[str, str, Any], ...] = (
        ("job_id", "job_id = :job_id", job_id),
        ("user", "user_name = :user", user or None),
        ("since", "(end_time IS NULL OR end_time >= :since)", since),
        ("until", "submit_time < :until", until),
    )
    for name, condition, value in wanted:
        if value is not None:
            conditions.append(condition)
            values[name] = value
    names = ", ".join(field.name for field in fields(Job))
    sql = f"SELECT {names} FROM job_summary WHERE {' AND '.join(conditions)} ORDER BY submit_time DESC"
    jobs = [Job(**row) for row in _rows(reader, f"{sql} LIMIT {MOST_JOBS}", values)]
    found = [_measured(reader, cluster, job) if n < MOST_MEASURED else Usage(job) for n, job in enumerate(jobs)]
    return found[::-1]


def _measured(reader: Reader, cluster: str, job: Job) -> Usage:
    of_job = {"cluster": cluster, "job_id": job.job_id, "submit_time": job.submit_time}
    measured = _of(reader, "scaling", Measured, of_job, "gpus, nodes, batch")
    resized = _of(reader, "resize_cost", Resized, of_job, "start_time")
    members = _rows(reader, _select("membership_timeline", ("start_time", "lasted_s AS running_s", "gpus")), of_job)
    runs = members or _rows(reader, _select("run_timeline", ("start_time", "running_s", "gpus")), of_job)
    stretches = sorted((Stretch(**row) for row in runs), key=lambda one: one.start_time)
    predicted = [row["predicted_jct_s"] for row in _rows(reader, _select("what_if", ("predicted_jct_s",)), of_job)]
    return Usage(job, measured, resized, tuple(stretches), predicted[0] if predicted else None)


def _of(reader: Reader, view: str, kind: type[T], of_job: Mapping[str, Any], order: str) -> tuple[T, ...]:
    names = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]
    return tuple(kind(**row) for row in _rows(reader, f"{_select(view, names)} ORDER BY {order}", of_job))


def _select(view: str, names: Sequence[str]) -> str:
    where = "cluster = :cluster AND job_id = :job_id AND submit_time = :submit_time"
    return f"SELECT {', '.join(names)} FROM {view} WHERE {where}"


def _rows(reader: Reader, sql: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    with reader.ask(sql, values) as answer:
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]

"""What jobs used and what resizing did to them, read from the database's views: the figures of `slurm-ones report`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ones_db.query import Reader
from slurm_ones.show.page import write
from slurm_ones.show.words import pause
from slurm_ones.text import plain, seconds

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
class SizeSpan:
    """A time in which a job held so many GPUs (view `run_timeline`, of jobs of blocks `membership_timeline`)."""

    start_time: float
    running_s: float
    gpus: int


@dataclass(frozen=True)
class JobUsage:
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

    job: JobUsage
    measured: tuple[Measured, ...] = ()
    resized: tuple[Resized, ...] = ()
    stretches: tuple[SizeSpan, ...] = ()
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
    names = ", ".join(field.name for field in fields(JobUsage))
    sql = f"SELECT {names} FROM job_summary WHERE {' AND '.join(conditions)} ORDER BY submit_time DESC"
    jobs = [JobUsage(**row) for row in _rows(reader, f"{sql} LIMIT {MOST_JOBS}", values)]
    found = [_measured(reader, cluster, job) if n < MOST_MEASURED else Usage(job) for n, job in enumerate(jobs)]
    return found[::-1]


def _measured(reader: Reader, cluster: str, job: JobUsage) -> Usage:
    of_job = {"cluster": cluster, "job_id": job.job_id, "submit_time": job.submit_time}
    measured = _of(reader, "scaling", Measured, of_job, "gpus, nodes, batch")
    resized = _of(reader, "resize_cost", Resized, of_job, "start_time")
    members = _rows(reader, _select("membership_timeline", ("start_time", "lasted_s AS running_s", "gpus")), of_job)
    runs = members or _rows(reader, _select("run_timeline", ("start_time", "running_s", "gpus")), of_job)
    stretches = sorted((SizeSpan(**row) for row in runs), key=lambda one: one.start_time)
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


BAR = 30
"""Characters of the longest bar."""
STEPS = " ▁▂▃▄▅▆▇█"


def bar(value: float, most: float, width: int = BAR) -> str:
    """A bar as long as the value is of the most."""
    return "█" * round(width * max(min(value / most, 1.0), 0.0)) if most > 0 else ""


def gpus_over_time(usage: Usage, width: int = 60) -> str:
    """A line of so many characters, each as high as the GPUs that the job held in its part of the job's life."""
    begin = usage.job.submit_time
    ends = [one.start_time + max(one.running_s, 0.0) for one in usage.stretches]
    if not ends or max(ends) <= begin:
        return ""
    most = max(one.gpus for one in usage.stretches)
    cells = []
    for n in range(width):
        at = begin + (n + 0.5) / width * (max(ends) - begin)
        held = sum(one.gpus for one in usage.stretches if one.start_time <= at < one.start_time + one.running_s)
        cells.append(STEPS[-(-8 * min(held, most) // max(most, 1))])
    return "".join(cells).rstrip()


def of_job(usage: Usage, advice: Sequence[str]) -> list[str]:
    """The report on one job."""
    job = usage.job
    lines = [
        f"Job {job.job_id} {plain(job.name, 60)} of {plain(job.user_name, 40)}"
        + (f" ({plain(job.account, 40)})" if job.account else "")
        + (f" in {plain(job.partition, 40)}" if job.partition else "")
        + f": {plain(job.state, 20)}",
        f"  submitted  {_when(job.submit_time)}; waited {seconds(job.queueing_s)}, ran {seconds(job.running_s)}"
        + (f", ended {_when(job.end_time)} after {seconds(job.jct_s)}" if job.end_time is not None else ""),
        f"  GPUs       asked for {job.requested_gpus}; trained on {_span(job)}; {_hours(job.gpu_hours)} in all",
    ]
    over_time = gpus_over_time(usage)
    if over_time:
        lines.append(f"  over time  {over_time}")
    if job.accuracy is not None:
        lines.append(f"  accuracy   {job.accuracy:.3f}")
    lines += _resizes(usage)
    if usage.measured:
        lines.append("  measured   GPUs  batch   samples/s   useful/s  a GPU  for")
        most = max(one.useful for one in usage.measured)
        for one in usage.measured:
            each = f"{one.gpu_efficiency:.0%}" if one.gpu_efficiency is not None else "–"
            lines.append(
                f"             {one.gpus:4} {one.batch:6} {one.samples_per_s:11.4g} {one.useful:10.4g}  {each:>5}  "
                f"{seconds(one.measured_s):8}  {bar(one.useful, most)}"
            )
    lines += [f"  advice     {text}." for text in advice]
    return lines


def _resizes(usage: Usage) -> list[str]:
    job, done = usage.job, [one for one in usage.resized if one.state == "done"]
    if not usage.resized:
        return ["  resizes    none"]
    ways = sorted({one.mechanism for one in done})
    share = f" ({job.pause_s / (job.running_s + job.pause_s):.1%} of its time)" if job.running_s else ""
    lines = [
        f"  resizes    {job.resizes} while it ran{f' by {chr(44).join(ways)}' if ways else ''}; training stood still "
        f"for {pause(job.pause_s)}{share}; {len(usage.resized) - len(done)} did not take effect"
    ]
    if usage.predicted_jct_s and job.jct_s and job.resizes:
        gain = usage.predicted_jct_s / job.jct_s
        lines.append(
            f"  gain       {seconds(job.jct_s)} from submission to end, against {seconds(usage.predicted_jct_s)} at "
            f"the size asked for ({job.requested_gpus}), by its own throughput there: {gain:.2f} times as fast"
        )
    return lines


def of_jobs(found: Sequence[Usage], title: str) -> list[str]:
    """The report on many jobs: totals, who used how much, and what waiting and resizing came to."""
    jobs = [usage.job for usage in found]
    if not jobs:
        return [f"{plain(title, 200)}: no elastic job"]
    ended = [job for job in jobs if job.jct_s is not None]
    total = sum(job.gpu_hours or 0.0 for job in jobs)
    waits = sorted(job.queueing_s for job in jobs if job.queueing_s is not None)
    newest = ", the newest alone" if len(jobs) >= MOST_JOBS else ""
    lines = [
        f"{plain(title, 200)}: {len(jobs)} elastic job{'s' * (len(jobs) != 1)}, {len(ended)} ended{newest}",
        f"  GPU hours  {total:.1f}",
    ]
    if waits:
        lines.append(f"  waited     median {seconds(waits[len(waits) // 2])}, longest {seconds(waits[-1])}")
    paused, running = sum(job.pause_s for job in jobs), sum(job.running_s or 0.0 for job in jobs)
    if running:
        lines.append(
            f"  resizes    {sum(job.resizes for job in jobs)}; training stood still for {pause(paused)} "
            f"({paused / (running + paused):.1%} of the time)"
        )
    changed = [usage for usage in found if usage.job.resizes]
    known = [(usage.job.jct_s, usage.predicted_jct_s) for usage in changed]
    resized = [(jct, predicted) for jct, predicted in known if jct and predicted]
    if resized:
        took, alone = sum(jct for jct, _ in resized), sum(predicted for _, predicted in resized)
        lines.append(
            f"  gain       {len(resized)} resized jobs that were measured at the size they asked for took "
            f"{seconds(took)} in all, against {seconds(alone)} there: {alone / took:.2f} times as fast"
        )
    lines += _hours_by(jobs, "user_name", "user") + _hours_by(jobs, "account", "account")
    return lines


def _hours_by(jobs: Sequence[JobUsage], field: str, title: str) -> list[str]:
    hours: dict[str, float] = defaultdict(float)
    for job in jobs:
        hours[getattr(job, field)] += job.gpu_hours or 0.0
    if len(hours) < 2:
        return []
    most = max(hours.values())
    shown = sorted(hours.items(), key=lambda item: (-item[1], item[0]))[:20]
    return [f"  {title:9}  {plain(name, 16):16} {value:9.1f} h  {bar(value, most)}" for name, value in shown]


def _span(job: JobUsage) -> str:
    if job.smallest_gpus is None or job.largest_gpus is None:
        return "none yet"
    return (
        str(job.largest_gpus) if job.smallest_gpus == job.largest_gpus else f"{job.smallest_gpus} to {job.largest_gpus}"
    )


def _hours(value: float | None) -> str:
    return f"{value:.1f} GPU hours" if value is not None else "GPU hours unknown"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


WIDTH, HEIGHT = 720.0, 120.0


@dataclass(frozen=True)
class Stripe:
    """A stretch of time in which the job held so many GPUs, in the picture's units."""

    x: float
    y: float
    width: float
    height: float
    gpus: int
    seconds: float


@dataclass(frozen=True)
class Section:
    """One job."""

    number: int
    head: str
    text: str
    bars: Sequence[Stripe]
    most: int


def write_usage(path: Path, title: str, totals: Sequence[str], jobs: Sequence[tuple[Usage, Sequence[str]]]) -> None:
    """Write the page: `totals` are the lines above the jobs, each job comes with its own lines."""
    sections = [_section(usage, lines) for usage, lines in jobs]
    write(path, "usage.html", title=title, text="\n".join(totals), jobs=sections)


def _section(usage: Usage, lines: Sequence[str]) -> Section:
    most = max((one.gpus for one in usage.stretches), default=0)
    bars = tuple(_bars(usage, most)) if most else ()
    return Section(usage.job.job_id, lines[0], "\n".join(lines[1:]), bars, most)


def _bars(usage: Usage, most: int) -> list[Stripe]:
    begin = usage.job.submit_time
    span = max(one.start_time + one.running_s for one in usage.stretches) - begin
    if span <= 0:
        return []
    found = []
    for one in usage.stretches:
        height = HEIGHT * one.gpus / most
        x, width = WIDTH * (one.start_time - begin) / span, WIDTH * max(one.running_s, 0.0) / span
        found.append(
            Stripe(round(x, 2), round(HEIGHT - height, 2), round(width, 2), round(height, 2), one.gpus, one.running_s)
        )
    return found

"""Use of GPUs by jobs, and the effect of resizing, read from the database's views. Also advice to owners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, TypeVar

from ones_db import JobSummary, Store
from ones_wrapper.protocol.optin import BadComment, parse_comment
from slurm_ones.text import hours, minute, plain, seconds, troubles

T = TypeVar("T")

MOST_JOBS, MOST_MEASURED = 5_000, 500
"""Largest number of jobs that are read, and of jobs whose measurements are read: in both cases the newest."""


@dataclass(frozen=True)
class Measured:
    """Throughput of a job at one shape and global batch, on one kind of GPU (a row of the view `scaling`)."""

    nodes: int
    gpus: int
    batch: int
    measured_s: float
    samples_per_s: float
    gpu_efficiency: float | None
    """Throughput per GPU, relative to the smallest shape."""
    statistical_efficiency: float | None
    """Progress per sample, relative to the base batch. None if the job reported no gradient noise scale."""
    goodput: float | None
    kind: str = ""
    """Kind of the GPUs; empty if it is unknown."""

    @property
    def useful(self) -> float:
        """Useful samples/s: the goodput, or the throughput if the goodput is unknown."""
        return self.goodput if self.goodput is not None else self.samples_per_s


@dataclass(frozen=True)
class Resized:
    """Resize that has ended (a row of the view `resize_cost`)."""

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
    """Time span of a job with one number of GPUs (row of `run_timeline`, for blocks of `membership_timeline`)."""

    start_time: float
    running_s: float
    gpus: int


@dataclass(frozen=True)
class JobUsage:
    """Use of GPUs by one job (a row of the view `job_summary`). Times are Unix seconds, or None if unknown."""

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
    """Job with all its measurements."""

    job: JobUsage
    measured: tuple[Measured, ...] = ()
    resized: tuple[Resized, ...] = ()
    stretches: tuple[SizeSpan, ...] = ()
    predicted_jct_s: float | None = None
    """JCT predicted for the job at the requested size (view `what_if`). None if unknown."""
    asked_gpu_hours: float | None = None
    """GPU-hours predicted for the job at the requested size. None if unknown."""

    @property
    def lasted_s(self) -> float:
        """Seconds from submission until the job released its last GPUs; 0 if it never held any."""
        return max((one.start_time + one.running_s for one in self.stretches), default=0.0) - self.job.submit_time

    @property
    def most(self) -> int:
        """Largest number of GPUs that the job held at once."""
        return max((one.gpus for one in self.stretches), default=0)


_SELECTS = {
    "cluster": "cluster = :cluster",
    "job_id": "job_id = :job_id",
    "user": "user_name = :user",
    "since": "(end_time IS NULL OR end_time >= :since)",
    "until": "submit_time < :until",
}


def usage(
    store: Store, *, job_id: int | None = None, user: str = "", since: float | None = None, until: float | None = None
) -> list[Usage]:
    """Return the use of GPUs by a cluster's elastic jobs, in order of submission. Raises `StoreError`.

    The arguments select one job, one user's jobs, or the jobs that waited or ran between `since` and `until`.
    """
    given = {"cluster": store.cluster, "job_id": job_id, "user": user or None, "since": since, "until": until}
    values = {name: value for name, value in given.items() if value is not None}
    conditions = [_SELECTS[name] for name in values]
    if job_id is None:
        # Imported jobs never opted in.
        conditions.append("refusal_code <> 'accounting_only'")
    sql = f"SELECT {_names(JobUsage)} FROM job_summary WHERE {' AND '.join(conditions)} ORDER BY submit_time DESC"
    with store.one_moment():
        jobs = [JobUsage(**row) for row in store.ask(f"{sql} LIMIT {MOST_JOBS}", values)]
        found = [_measured(store, job) if n < MOST_MEASURED else Usage(job) for n, job in enumerate(jobs)]
    return found[::-1]


def _measured(store: Store, job: JobUsage) -> Usage:
    of_job = {"cluster": store.cluster, "job_id": job.job_id, "submit_time": job.submit_time}

    def rows(view: str, kind: type[T], order: str, names: str = "") -> tuple[T, ...]:
        where = "cluster = :cluster AND job_id = :job_id AND submit_time = :submit_time"
        sql = f"SELECT {names or _names(kind)} FROM {view} WHERE {where} ORDER BY {order}"
        return tuple(kind(**row) for row in store.ask(sql, of_job))

    stretches = rows("membership_timeline", SizeSpan, "start_time", "start_time, lasted_s AS running_s, gpus")
    asked = "predicted_jct_s, requested_nodes * requested_gpus_per_node * (predicted_jct_s - wait_s) / 3600.0 AS hours"
    predicted = rows("what_if", dict, "predicted_jct_s", asked)
    return Usage(
        job,
        rows("scaling", Measured, "kind, gpus, nodes, batch"),
        rows("resize_cost", Resized, "start_time"),
        stretches or rows("run_timeline", SizeSpan, "start_time"),
        predicted[0]["predicted_jct_s"] if predicted else None,
        predicted[0]["hours"] if predicted else None,
    )


def _names(kind: type[Any]) -> str:
    return ", ".join(field.name for field in fields(kind))


BAR = 30
"""Length of the longest bar in characters."""
STEPS = " ▁▂▃▄▅▆▇█"


def bar(value: float, most: float, width: int = BAR) -> str:
    """Return a bar of text. Its length is `width` characters times `value` / `most`."""
    return "█" * round(width * max(min(value / most, 1.0), 0.0)) if most > 0 else ""


def gpus_over_time(usage: Usage, width: int = 60) -> str:
    """Return a text chart from submission to the end. The heights of its `width` characters show the GPUs held."""
    if usage.lasted_s <= 0:
        return ""
    cells = []
    for n in range(width):
        at = usage.job.submit_time + (n + 0.5) / width * usage.lasted_s
        held = sum(one.gpus for one in usage.stretches if one.start_time <= at < one.start_time + one.running_s)
        cells.append(STEPS[-(-8 * min(held, usage.most) // max(usage.most, 1))])
    return "".join(cells).rstrip()


def of_job(usage: Usage, advice: Sequence[str]) -> list[str]:
    """Return the lines of the report on one job."""
    job = usage.job
    sizes = dict.fromkeys(str(size) for size in (job.smallest_gpus, job.largest_gpus) if size is not None)
    trained = " to ".join(sizes) or "none yet"
    lines = [
        f"Job {job.job_id} {plain(job.name, 60)} of {plain(job.user_name, 40)}"
        + (f" ({plain(job.account, 40)})" if job.account else "")
        + (f" in {plain(job.partition, 40)}" if job.partition else "")
        + f": {plain(job.state, 20)}",
        f"  submitted  {minute(job.submit_time)}; waited {seconds(job.queueing_s)}, ran {seconds(job.running_s)}"
        + (f", ended {minute(job.end_time)} after {seconds(job.jct_s)}" if job.end_time is not None else ""),
        f"  GPUs       asked for {job.requested_gpus}; trained on {trained}; {_hours(job.gpu_hours)} in all",
    ]
    if over_time := gpus_over_time(usage):
        lines.append(f"  over time  {over_time}")
    if job.accuracy is not None:
        lines.append(f"  accuracy   {job.accuracy:.3f}")
    lines += _resizes(usage)
    if usage.measured:
        lines.append("  measured   GPUs  batch   samples/s   useful/s  a GPU  for")
        most = max(one.useful for one in usage.measured)
        several = len({one.kind for one in usage.measured}) > 1
        for one in usage.measured:
            each = f"{one.gpu_efficiency:.0%}" if one.gpu_efficiency is not None else "–"
            lines.append(
                f"             {one.gpus:4} {one.batch:6} {one.samples_per_s:11.4g} {one.useful:10.4g}  {each:>5}  "
                f"{seconds(one.measured_s):8}  {bar(one.useful, most, 12)}{f'  {one.kind}' * several}"
            )
    return lines + [f"  advice     {text}." for text in advice]


def _resizes(usage: Usage) -> list[str]:
    job, done = usage.job, [one for one in usage.resized if one.state == "done"]
    if not usage.resized:
        return ["  resizes    none"]
    ways = sorted({one.mechanism for one in done})
    lines = [
        f"  resizes    {job.resizes}{f' by {chr(44).join(ways)}' if ways else ''} while it ran; "
        f"{_still(job.pause_s, job.running_s, 'its')}; {len(usage.resized) - len(done)} did not take effect"
    ]
    if usage.predicted_jct_s and job.jct_s and job.resizes:
        lines.append(
            f"  gain       {seconds(job.jct_s)} from submission to end, against {seconds(usage.predicted_jct_s)} at "
            f"the size asked for ({job.requested_gpus}), by its own throughput there: "
            f"{usage.predicted_jct_s / job.jct_s:.2f} times as fast"
        )
    if usage.asked_gpu_hours and job.gpu_hours and job.resizes:
        lines.append(
            f"  cost       {_hours(job.gpu_hours)} in all, against {hours(usage.asked_gpu_hours)} at the size asked "
            f"for: {job.gpu_hours / usage.asked_gpu_hours:.2f} times as many"
        )
    return lines


def _still(paused: float, running: float | None, whose: str) -> str:
    share = f" ({paused / (running + paused):.1%} of {whose} time)" if running else ""
    return f"training paused for {seconds(paused)}{share}"


def of_jobs(found: Sequence[Usage], title: str) -> list[str]:
    """Return the report's lines on several jobs: totals, use by user, waiting times, and the effect of resizing."""
    jobs = [usage.job for usage in found]
    if not jobs:
        return [f"{plain(title, 200)}: no elastic job"]
    ended = sum(job.jct_s is not None for job in jobs)
    newest = ", only the newest" if len(jobs) >= MOST_JOBS else ""
    lines = [
        f"{plain(title, 200)}: {len(jobs)} elastic job{'s' * (len(jobs) != 1)}, {ended} ended{newest}",
        f"  GPU hours  {hours(sum(job.gpu_hours or 0.0 for job in jobs))}",
    ]
    if waits := [job.queueing_s for job in jobs if job.queueing_s is not None]:
        lines.append(f"  waited     median {seconds(median(waits))}, longest {seconds(max(waits))}")
    if running := sum(job.running_s or 0.0 for job in jobs):
        still = _still(sum(job.pause_s for job in jobs), running, "the")
        lines.append(f"  resizes    {sum(job.resizes for job in jobs)}; {still}")
    known = [(one.job.jct_s, one.predicted_jct_s) for one in found if one.job.resizes]
    if resized := [(jct, predicted) for jct, predicted in known if jct and predicted]:
        took, alone = sum(jct for jct, _ in resized), sum(predicted for _, predicted in resized)
        lines.append(
            f"  gain       {len(resized)} resized jobs that were measured at the size they asked for took "
            f"{seconds(took)} in all, against {seconds(alone)} there: {alone / took:.2f} times as fast"
        )
    return lines + _hours_by(jobs, "user_name", "user") + _hours_by(jobs, "account", "account")


def _hours_by(jobs: Sequence[JobUsage], field: str, title: str) -> list[str]:
    used: dict[str, float] = defaultdict(float)
    for job in jobs:
        used[getattr(job, field)] += job.gpu_hours or 0.0
    if len(used) < 2:
        return []
    most = max(used.values())
    shown = sorted(used.items(), key=lambda item: (-item[1], item[0]))[:20]
    return [f"  {title:9}  {plain(name, 16):16} {hours(value):>9} h  {bar(value, most)}" for name, value in shown]


def _hours(value: float | None) -> str:
    return f"{hours(value)} GPU hours" if value is not None else "GPU hours unknown"


NEARLY = 0.9
"""Smallest ratio at which two useful throughputs, efficiencies or JCTs count as nearly equal."""
WORTH_IT = 0.75
"""Efficiency from which GPUs count as well used: throughput per GPU, relative to the smallest size."""
LONG_S = 60.0
"""Shortest measurement that counts, in seconds."""
PAUSED = 0.05
"""Share of a job's time up to which pauses of resizes cause no advice."""
IMPORTS_S = 15.0
"""Seconds of imports at each start up to which they cause no advice."""
STARTS = 2


@dataclass(frozen=True)
class Allowed:
    """Sizes and batches that a job's comment and its training strategy allow."""

    gpus: tuple[int, int] | None = None
    max_batch: int | None = None
    """Largest batch that the comment allows; None if it names no range of batches."""
    blocks: bool = False
    step: int = 1
    """Difference between neighbouring numbers of GPUs that are allowed."""
    valid: frozenset[int] = frozenset()
    """Numbers of GPUs that the training strategy can use; empty if it can use any."""
    batch_fixed: bool = False
    """True if the training strategy never changes the batch."""

    def gpus_to(self, low: int, high: int) -> str:
        """Return the option of the comment that allows `low` to `high` GPUs, with the same step as now."""
        return f"gpus={low}-{high}" + (f":{self.step}" if self.step > 1 else "")


Rule = Callable[[Usage, Allowed], str | None]


def allowed(comment: str) -> Allowed:
    """Return the sizes and batches that a job's comment allows; without any if the job does not opt in."""
    try:
        opted = parse_comment(comment)
    except BadComment:
        opted = None
    if opted is None:
        return Allowed()
    low, high = opted.batch or (0, 0)
    return Allowed(opted.gpus, high if low < high else None, opted.blocks, opted.step)


def advised(store: Store, found: Sequence[Usage]) -> dict[int, list[str]]:
    """Return the advice on each job, by job id."""
    ids = [one.job.job_id for one in found]
    comments = {job_id: one.comment for job_id, one in store.jobs(ids).items()} if ids else {}
    summaries = {one.job_id: one for one in store.job_summaries(ids)} if ids else {}
    return {
        job_id: advice(one, allowed(comments.get(job_id, "")), summaries.get(job_id))
        for job_id, one in zip(ids, found, strict=True)
    }


def advice(usage: Usage, allowed: Allowed, summary: JobSummary | None = None) -> list[str]:
    """Return sentences without full stops: problems of the job's training, then the other advice by importance."""
    found = list(troubles(summary)) if summary is not None else []
    if summary is not None and summary.limits is not None:
        valid = frozenset(row.gpus for row in summary.limits.sizes)
        allowed = replace(allowed, valid=valid, batch_fixed=summary.limits.batch_fixed)
    return found + [text for rule in RULES if (text := rule(usage, allowed)) is not None]


def _fewer(usage: Usage, allowed: Allowed) -> str | None:
    asked = next((one for one in _sizes(usage) if one.gpus == usage.job.requested_gpus), None)
    if asked is None:
        return None
    for small in _sizes(usage):
        if small.gpus < asked.gpus and small.useful >= NEARLY * asked.useful:
            return (
                f"asked for {_gpus(asked.gpus)}, and trains nearly as fast on {small.gpus}: {small.useful:.4g} useful "
                f"samples/s there, {asked.useful:.4g} on {asked.gpus}; gpus={small.gpus} costs "
                f"{small.gpus / asked.gpus:.0%} of the GPUs"
            )
    return None


def _more(usage: Usage, allowed: Allowed) -> str | None:
    """Advise a larger maximum of GPUs, if the job still scales well at the largest size that its comment allows."""
    sizes = _sizes(usage)
    if allowed.gpus is None or len(sizes) < 2:
        return None
    low, high = allowed.gpus
    largest, smallest = sizes[-1], sizes[0]
    if largest.gpus < high or max(allowed.valid, default=high + 1) <= high:
        return None
    each = largest.useful / largest.gpus / (smallest.useful / smallest.gpus)
    if each < WORTH_IT:
        return None
    return (
        f"its comment ends at {_gpus(high)}, where each GPU still did {each:.0%} of what one did on {smallest.gpus} "
        f"({largest.useful:.4g} and {smallest.useful:.4g} useful samples/s in all): "
        f"{allowed.gpus_to(low, 2 * high)} would let it use more when they are free"
    )


def _batch(usage: Usage, allowed: Allowed) -> str | None:
    """Advise a larger maximum batch, if samples at the present maximum are nearly as efficient as at the base batch."""
    most = allowed.max_batch
    if most is None or allowed.batch_fixed:
        return None
    known = [one for one in _sizes(usage) if one.batch >= most and one.statistical_efficiency is not None]
    if not known or (worth := known[-1].statistical_efficiency or 0.0) < NEARLY:
        return None
    one = known[-1]
    return (
        f"trained at its largest batch, {one.batch}, where a sample was still worth {worth:.0%} of one at its base "
        f"batch: a largest batch of {2 * one.batch} (ones.init, and batch= in the comment) would keep "
        f"{_gpus(2 * one.gpus)} as busy as {one.gpus} now"
    )


def _waited(usage: Usage, allowed: Allowed) -> str | None:
    """Advise a smaller minimum of GPUs, if the job waited longer than it ran."""
    job = usage.job
    if allowed.gpus is None or not job.queueing_s or not job.running_s or job.queueing_s <= job.running_s:
        return None
    low, high = allowed.gpus
    least = min(allowed.valid, default=allowed.step)
    if low <= least:
        return None
    return (
        f"waited {seconds(job.queueing_s)} to run {seconds(job.running_s)}: {allowed.gpus_to(least, high)} in place of "
        f"{low}-{high} would let it start on {_gpus(least)} and grow, where its model fits there"
    )


def _pauses(usage: Usage, allowed: Allowed) -> str | None:
    """Advise blocks in place of requeues, if requeues pause the job for much of its time."""
    pauses = [one.pause_s for one in usage.resized if one.mechanism == "requeue" and one.pause_s]
    running = usage.job.running_s or 0.0
    if not pauses or allowed.blocks or sum(pauses) <= PAUSED * (running + sum(pauses)):
        return None
    share = sum(pauses) / (running + sum(pauses))
    return (
        f"{len(pauses)} requeue{'s' * (len(pauses) != 1)} stopped its training for {seconds(sum(pauses))}, {share:.0%} "
        "of its time: as a job of blocks (array=blocks) it would train on while it changes its size"
    )


def _imports(usage: Usage, allowed: Allowed) -> str | None:
    """Advise a faster place for the Python environment, if imports take long at each start."""
    times = [one.import_s for one in usage.resized if one.import_s]
    if len(times) < STARTS or sum(times) / len(times) < IMPORTS_S:
        return None
    return (
        f"imports took {seconds(sum(times) / len(times))} of each of {len(times)} starts: keep its Python environment "
        "on a local disk or in a container image"
    )


def _repaid(usage: Usage, allowed: Allowed) -> str | None:
    """Advise how to keep the job's size, if resizes made the job end later."""
    job, predicted_s = usage.job, usage.predicted_jct_s
    if predicted_s is None or job.jct_s is None or not job.resizes or job.jct_s <= predicted_s / NEARLY:
        return None
    return (
        f"took {seconds(job.jct_s)}, and by its own throughput on the {_gpus(job.requested_gpus)} it asked for would "
        f"have taken {seconds(predicted_s)}: others had its GPUs meanwhile; gpus={job.requested_gpus} keeps "
        "its size"
    )


RULES: tuple[Rule, ...] = (_fewer, _more, _batch, _waited, _pauses, _imports, _repaid)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def alike(measured: Sequence[Measured], what: str = "kind") -> list[Measured]:
    """Return the measurements on one kind of GPU: the kind measured for the longest time in total. If `what` is
    "batch", return those at one batch, chosen in the same way."""
    spent: dict[Any, float] = defaultdict(float)
    for one in measured:
        spent[getattr(one, what)] += one.measured_s
    longest = max(spent, key=lambda value: spent[value], default=None)
    return [one for one in measured if getattr(one, what) == longest]


def _sizes(usage: Usage) -> list[Measured]:
    """Return the best measurement of at least `LONG_S` seconds at each number of GPUs, ascending.

    Without goodput, only the batch measured longest counts: throughputs at different batches cannot be compared.
    """
    long = [one for one in alike(usage.measured) if one.measured_s >= LONG_S]
    comparable = [one for one in long if one.goodput is not None] or alike(long, "batch")
    return [
        max((one for one in comparable if one.gpus == gpus), key=lambda one: one.useful)
        for gpus in sorted({one.gpus for one in comparable})
    ]

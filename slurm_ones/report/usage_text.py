"""What jobs used, as lines of text with bars; jobstats is the model. Names of users are text and nothing else."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from slurm_ones.report.blocks import pause
from slurm_ones.report.text import plain, seconds
from slurm_ones.report.usage import MOST_JOBS, Job, Usage

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


def _hours_by(jobs: Sequence[Job], field: str, title: str) -> list[str]:
    hours: dict[str, float] = defaultdict(float)
    for job in jobs:
        hours[getattr(job, field)] += job.gpu_hours or 0.0
    if len(hours) < 2:
        return []
    most = max(hours.values())
    shown = sorted(hours.items(), key=lambda item: (-item[1], item[0]))[:20]
    return [f"  {title:9}  {plain(name, 16):16} {value:9.1f} h  {bar(value, most)}" for name, value in shown]


def _span(job: Job) -> str:
    if job.smallest_gpus is None or job.largest_gpus is None:
        return "none yet"
    return (
        str(job.largest_gpus) if job.smallest_gpus == job.largest_gpus else f"{job.smallest_gpus} to {job.largest_gpus}"
    )


def _hours(value: float | None) -> str:
    return f"{value:.1f} GPU hours" if value is not None else "GPU hours unknown"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))

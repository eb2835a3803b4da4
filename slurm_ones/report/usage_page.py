"""The page of `slurm-ones report`: one file with the text of the report and a picture of each job's GPUs over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ones.report.page import write
from slurm_ones.report.usage import Usage

WIDTH, HEIGHT = 720.0, 120.0


@dataclass(frozen=True)
class Bar:
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
    bars: Sequence[Bar]
    most: int


def write_usage(path: Path, title: str, totals: Sequence[str], jobs: Sequence[tuple[Usage, Sequence[str]]]) -> None:
    """Write the page: `totals` are the lines above the jobs, each job comes with its own lines."""
    sections = [_section(usage, lines) for usage, lines in jobs]
    write(path, "usage.html", title=title, text="\n".join(totals), jobs=sections)


def _section(usage: Usage, lines: Sequence[str]) -> Section:
    most = max((one.gpus for one in usage.stretches), default=0)
    bars = tuple(_bars(usage, most)) if most else ()
    return Section(usage.job.job_id, lines[0], "\n".join(lines[1:]), bars, most)


def _bars(usage: Usage, most: int) -> list[Bar]:
    begin = usage.job.submit_time
    span = max(one.start_time + one.running_s for one in usage.stretches) - begin
    if span <= 0:
        return []
    found = []
    for one in usage.stretches:
        height = HEIGHT * one.gpus / most
        x, width = WIDTH * (one.start_time - begin) / span, WIDTH * max(one.running_s, 0.0) / span
        found.append(
            Bar(round(x, 2), round(HEIGHT - height, 2), round(width, 2), round(height, 2), one.gpus, one.running_s)
        )
    return found

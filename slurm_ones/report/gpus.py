"""GPUs over time, coloured by job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ones.report.text import plain


@dataclass(frozen=True)
class Bar:
    """One run of one job. Times in seconds from any one beginning."""

    job: str
    start: float
    end: float
    gpus: int


@dataclass(frozen=True)
class Panel:
    """One picture of a cluster: its title, its runs, the GPUs it has, and when it was all done."""

    title: str
    bars: Sequence[Bar]
    capacity: int


def steps(bars: Sequence[Bar], jobs: Sequence[str]) -> tuple[list[float], dict[str, list[int]]]:
    """Moments at which something changes, ascending, and each job's GPUs from each moment to the next."""
    moments = sorted({time for bar in bars for time in (bar.start, bar.end)})
    held = {job: [sum(b.gpus for b in bars if b.job == job and b.start <= t < b.end) for t in moments] for job in jobs}
    return moments, held


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels one above the other, with one scale of time and one colour a job, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # A dollar in a job's name is no formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        _draw(panels, path, pyplot)


def _draw(panels: Sequence[Panel], path: Path, pyplot: Any) -> None:

    jobs = list(dict.fromkeys(bar.job for panel in panels for bar in sorted(panel.bars, key=lambda b: b.start)))
    colours = pyplot.get_cmap("tab10" if len(jobs) <= 10 else "tab20")
    figure, axes = pyplot.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(11, 2.9 * len(panels) + 0.6), layout="constrained"
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        moments, held = steps(panel.bars, jobs)
        axis.stackplot(
            moments,
            [held[job] for job in jobs],
            labels=[plain(job, 40) for job in jobs],
            colors=[colours(i % colours.N) for i in range(len(jobs))],
            step="post",
            linewidth=0.6,
            edgecolor="white",
        )
        axis.axhline(panel.capacity, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(panel.title, loc="left", fontsize=10)
        axis.set_ylabel("GPUs")
        axis.set_ylim(0, panel.capacity * 1.05)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds since the first submission")
    axes[-1, 0].set_xlim(left=0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

"""The picture that the demo leaves: its GPUs over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_ones.show import charts
from slurm_ones.show.charts import Bar, Lane


def lane(title: str, bars: Sequence[Bar], capacity: int) -> Lane:
    """One that shows GPUs and nothing else."""
    return Lane(title, (), bars, (), capacity)


def draw_gpus(lanes: Sequence[Lane], path: Path) -> None:
    """Who held which GPUs, one lane above the other, with one scale of time and one colour a job, as a PNG file."""
    from matplotlib import rc_context

    jobs = list(dict.fromkeys(bar.job for lane in lanes for bar in sorted(lane.bars, key=lambda bar: bar.start)))
    colours = dict(zip(jobs, charts._colours(len(jobs)), strict=True))
    with rc_context({"text.parse_math": False}):  # a dollar in a name is no formula
        figure, axes = charts._figure(len(lanes), 2.9 * len(lanes) + 0.6, sharex=True)
        for axis, lane in zip(axes, lanes, strict=True):
            charts._stack(axis, lane, jobs, colours, 1.0)
        axes[-1].set_xlabel("seconds since the first submission")
        charts._legend(figure, colours)
        figure.savefig(path, dpi=110)

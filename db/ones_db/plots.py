"""Plots of the views for notebooks, each by one call that draws on the given axes or new axes, and returns the axes.

    ones = ones_db.connect("sqlite:///ones.sqlite")
    ones_db.plots.scaling(ones, job_id=7)

Plots need matplotlib (``pip install 'ones-db[notebook]'``), which is imported at the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ones_db.query import Database, QueryError, saved_query

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


def scaling(ones: Database, job_id: int, axes: Axes | None = None) -> Axes:
    """Plot a job's throughput by its number of GPUs, a line for each global batch, and the ideal line."""
    found = _some(ones.scaling(job_id=job_id), job_id)
    axes, smallest = axes or _axes(), found.iloc[0]
    ideal = smallest["samples_per_s"] / smallest["gpus"] * found["gpus"]
    axes.plot(found["gpus"], ideal, linestyle=":", color="gray", label="if each GPU added as much as the first")
    for batch, measured in found.groupby("batch"):
        axes.plot(measured["gpus"], measured["samples_per_s"], marker="o", label=f"global batch {batch}")
    return _finished(axes, "GPUs", "throughput, samples/s", f"Job {job_id}, {smallest['name']}")


def learning_curve(ones: Database, job_id: int, axes: Axes | None = None, *, y: str = "loss") -> Axes:
    """Plot a job's loss, or `y="accuracy"`, by the hours since submission, and the job's GPUs at each epoch's end."""
    found = _some(ones.query(saved_query("learning_curve"), job_id=job_id), job_id)
    axes, hours = axes or _axes(), found["since_s"] / 3600.0
    axes.plot(hours, found[y].astype("float64"), marker=".", label=y)
    right = axes.twinx()
    right.step(hours, found["gpus"].astype("float64"), where="pre", color="gray", alpha=0.5)
    right.set(ylabel="GPUs", ylim=(0, None))
    return _finished(axes, "hours since submission", y, f"Job {job_id}", bottom=None)


def gpus(ones: Database, axes: Axes | None = None, **where: Any) -> Axes:
    """Plot the GPUs that jobs held over time, stacked, of blocks by memberships, for jobs as ``user_name="alice"``."""
    runs, changes = ones.run_timeline(**where), ones.membership_timeline(**where)
    columns = ["job_id", "start_time", "end_time", "gpus"]
    rows = [*runs[~runs["job_id"].isin(set(changes["job_id"]))][columns].itertuples(index=False)]
    rows += changes[columns].itertuples(index=False)
    times = sorted({at for row in rows for at in (row.start_time, row.end_time) if not _open(at)})
    axes, base = axes or _axes(), [0.0] * len(times)
    for job_id in dict.fromkeys(row.job_id for row in rows):
        its = [row for row in rows if row.job_id == job_id]
        held = [
            sum(row.gpus for row in its if row.start_time <= at and (_open(row.end_time) or at < row.end_time))
            for at in times
        ]
        top = [low + count for low, count in zip(base, held, strict=True)]
        axes.fill_between(times, base, top, step="post", label=f"job {job_id}")
        base = top
    return _finished(axes, "", "GPUs", "GPUs over time")


def _open(at: Any) -> bool:
    """Tell whether a time is missing (NaN or NaT): the run goes on."""
    return bool(at != at)


def _some(found: DataFrame, job_id: int) -> DataFrame:
    if found.empty:
        raise QueryError(f"nothing was measured of job {job_id}")
    return found


def _axes() -> Axes:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(7, 4), layout="tight")[1]


def _finished(axes: Axes, across: str, up: str, title: str, bottom: float | None = 0.0) -> Axes:
    axes.set(xlabel=across, ylabel=up, title=title.replace("$", r"\$"))
    axes.set_ylim(bottom=bottom)
    if 0 < len(axes.get_legend_handles_labels()[0]) <= 20:
        axes.legend()
    return axes

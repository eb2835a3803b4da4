"""Plots of the views for notebooks. Each function draws on `axes` or on new axes, and returns them.

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


def scaling(ones: Database, job_id: int, axes: Axes | None = None, *, cluster: str = "") -> Axes:
    """Plot a job's throughput over its GPUs: a line for each kind of GPU and batch, and one for ideal scaling."""
    found = _of_job(ones.scaling(job_id=job_id), job_id, cluster)
    axes, smallest = axes or _axes(), found.iloc[0]
    ideal = smallest["samples_per_s"] / smallest["gpus"] * found["gpus"]
    axes.plot(found["gpus"], ideal, linestyle=":", color="gray", label="if each GPU added as much as the first")
    for (kind, batch), measured in found.groupby(["kind", "batch"]):
        label = f"global batch {batch}" + f" on {kind}" * bool(kind)
        axes.plot(measured["gpus"], measured["samples_per_s"], marker="o", label=label)
    return _finished(axes, "GPUs", "throughput, samples/s", f"Job {job_id}, {smallest['name']}")


def learning_curve(
    ones: Database, job_id: int, axes: Axes | None = None, *, y: str = "loss", cluster: str = ""
) -> Axes:
    """Plot a job's loss, or accuracy (`y="accuracy"`), and its GPUs at each epoch's end over hours since submission."""
    found = _of_job(ones.query(saved_query("learning_curve"), job_id=job_id), job_id, cluster)
    axes, hours = axes or _axes(), found["since_s"] / 3600.0
    axes.plot(hours, found[y].astype("float64"), marker=".", label=y)
    right = axes.twinx()
    right.step(hours, found["gpus"].astype("float64"), where="pre", color="gray", alpha=0.5)
    right.set(ylabel="GPUs", ylim=(0, None))
    return _finished(axes, "hours since submission", y, f"Job {job_id}", bottom=None)


def gpus(ones: Database, axes: Axes | None = None, **where: Any) -> Axes:
    """Plot the GPUs that jobs held over time, stacked. Keywords such as ``user_name="alice"`` select jobs."""
    from pandas import concat, to_timedelta

    runs = ones.run_timeline(**where).rename(columns={"restart": "term", "running_s": "lasted_s"})
    changes, run = ones.membership_timeline(**where), [*_JOB, "term"]
    plain = runs[~runs.set_index(run).index.isin(changes.set_index(run).index)]
    rows = concat([plain, changes])[[*_JOB, "start_time", "end_time", "lasted_s", "gpus"]]
    # A run that goes on is drawn as far as it is known.
    known = rows["start_time"] + to_timedelta(rows["lasted_s"], unit="s")
    rows["end_time"] = rows["end_time"].fillna(known.dt.as_unit("us"))
    times = sorted({*rows["start_time"], *rows["end_time"]})
    axes, base = axes or _axes(), [0.0] * len(times)
    for job, its in rows.groupby(_JOB, sort=False):
        held = [int(its["gpus"][(its["start_time"] <= at) & (at < its["end_time"])].sum()) for at in times]
        top = [low + count for low, count in zip(base, held, strict=True)]
        axes.fill_between(times, base, top, step="post", label=f"job {job[1]}")
        base = top
    return _finished(axes, "", "GPUs", "GPUs over time")


_JOB = ["cluster", "job_id", "submit_time"]


def _of_job(found: DataFrame, job_id: int, cluster: str) -> DataFrame:
    found = found[found["cluster"] == cluster] if cluster else found
    if found.empty:
        raise QueryError(f"nothing was measured of job {job_id}")
    if len(several := found["cluster"].unique()) > 1:
        raise QueryError(f"there is a job {job_id} on {', '.join(several)}: name one of them by cluster=")
    return found[found["submit_time"] == found["submit_time"].max()]


def _axes() -> Axes:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(7, 4), layout="tight")[1]


def _finished(axes: Axes, across: str, up: str, title: str, bottom: float | None = 0.0) -> Axes:
    axes.set(xlabel=across, ylabel=up, title=title.replace("$", r"\$"))
    axes.set_ylim(bottom=bottom)
    if 0 < len(axes.get_legend_handles_labels()[0]) <= 20:
        axes.legend()
    return axes

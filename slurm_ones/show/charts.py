"""Charts of clusters and jobs, and self-contained HTML files.

Matplotlib and Jinja2 are imported when something is drawn. The templates escape all text.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slurm_ones.text import clock, plain, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

MOST_POINTS = 600
"""Most points of a line; with more, neighbours are averaged to keep the page small."""
MOST_NAMED = 20
"""Number of colours that can be distinguished."""


class Bar(NamedTuple):
    """GPUs of one run of a job over time. `start` and `end` in seconds since an origin that all bars of a chart
    share.
    """

    job: str
    start: float
    end: float
    gpus: int


@dataclass(frozen=True)
class Lane:
    """Results of one policy on a study's page. Times in seconds after the start."""

    label: str
    jct_s: Sequence[float]
    """JCTs of all jobs of all seeds."""
    bars: Sequence[Bar]
    """GPUs of each job over time, for one seed."""
    goodput: Sequence[tuple[float, float]]
    """Goodput over time for the same seed: (time, share of the cluster put to good use)."""
    capacity: int
    """GPUs of the cluster."""


def held(bars: Sequence[Bar], jobs: Sequence[str]) -> tuple[Floats, Floats]:
    """Return the (M,) times at which any job's GPUs change, and the (J, M) GPUs that each job holds from each time
    on.
    """
    moments = np.unique(np.array([at for bar in bars for at in (bar.start, bar.end)] or [0.0]))
    row = {job: j for j, job in enumerate(jobs)}
    change = np.zeros((len(jobs), len(moments)))
    for bar in bars:
        change[row[bar.job], np.searchsorted(moments, bar.start)] += bar.gpus
        change[row[bar.job], np.searchsorted(moments, bar.end)] -= bar.gpus
    return moments, change.cumsum(axis=1)


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Average the points over at most `most` equal intervals of time; intervals without points are left out."""
    if not points:
        return np.zeros(0), np.zeros(0)
    times, values = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if len(times) <= most:
        return times, values
    edges = np.linspace(times[0], times[-1], most + 1)
    at = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, most - 1)
    count = np.bincount(at, minlength=most)
    full = count > 0
    sums = np.bincount(at, weights=values, minlength=most)
    return edges[:-1][full], sums[full] / count[full]


def _figure(rows: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(10.5, height), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element of a page; `name` makes its element ids reproducible."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", dpi=130, metadata={"Date": None})
    whole = file.getvalue()
    return whole[whole.index("<svg") :]


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    found = colormaps["tab10" if count <= 10 else "tab20"]
    return [found(i % found.N) for i in range(count)]


def _stack(axis: Axes, lane: Lane, jobs: Sequence[str], colours: Mapping[str, Any], unit_s: float) -> None:
    """Draw a stacked chart of the GPUs that each job holds, over time in units of `unit_s` seconds."""
    from matplotlib.ticker import MaxNLocator

    moments, holding = held(lane.bars, jobs)
    for job, top, own in zip(jobs, holding.cumsum(axis=0), holding, strict=True):
        # Drawn as pixels: as shapes, a day of many jobs makes a page of many megabytes.
        axis.fill_between(
            moments / unit_s,
            top - own,
            top,
            step="post",
            color=colours[job],
            edgecolor="white",
            linewidth=0.15,
            rasterized=True,
        )
    axis.axhline(lane.capacity, color="black", linewidth=0.8, linestyle=":")
    axis.set_title(lane.label, loc="left", fontsize=9)
    axis.set_ylabel("GPUs")
    axis.set_ylim(0, lane.capacity * 1.05)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))  # no GPU is held by halves
    axis.set_xlim(left=0)


def _legend(figure: Figure, colours: Mapping[str, Any]) -> None:
    from matplotlib.patches import Patch

    if 0 < len(colours) <= MOST_NAMED:
        handles = [Patch(color=colour, label=plain(name, 40)) for name, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)


def study_charts(lanes: Sequence[Lane], groups: Mapping[str, str]) -> dict[str, str]:
    """Charts of a study as SVG: completion times, GPUs over time, goodput. `groups` maps each job's name to its kind;
    jobs of a kind share a colour.
    """
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        return {"jct": _distribution(lanes), "gpus": _gpus(lanes, groups), "goodput": _goodput(lanes)}


def _gpus(lanes: Sequence[Lane], groups: Mapping[str, str]) -> str:
    figure, axes = _figure(max(len(lanes), 1), 2.1 * max(len(lanes), 1) + 1.0, sharex=True)
    kinds = sorted(set(groups.values()))
    colours = dict(zip(kinds, _colours(len(kinds)), strict=True))
    for axis, lane in zip(axes, lanes, strict=False):
        # Jobs of a kind lie next to each other.
        jobs = sorted({bar.job for bar in lane.bars}, key=lambda job: (groups.get(job, ""), job))
        of_job = {job: colours[groups.get(job, kinds[0])] for job in jobs}
        _stack(axis, lane, jobs, of_job, 3600.0)
    axes[-1].set_xlabel("hours since the start")
    _legend(figure, colours)
    return _svg(figure, "gpus")


def _distribution(lanes: Sequence[Lane]) -> str:
    from matplotlib.ticker import NullFormatter

    figure, (axis,) = _figure(1, 3.6)
    for lane, colour in zip(lanes, _colours(len(lanes)), strict=True):
        jct = np.sort(np.array([t for t in lane.jct_s if t > 0]))
        if len(jct):
            axis.step(jct / 3600.0, np.arange(1, len(jct) + 1) / len(jct), where="post", label=lane.label, color=colour)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    # Of less than a decade matplotlib labels the small ticks too, as formulas, which the pages do not draw.
    low, high = axis.get_xlim()
    axis.xaxis.set_minor_formatter("{x:g}" if high < 10 * low else NullFormatter())
    axis.set_xlabel("job completion time, hours")
    axis.set_ylabel("share of jobs")
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, loc="lower right")
    return _svg(figure, "jct")


def _goodput(lanes: Sequence[Lane]) -> str:
    figure, (axis,) = _figure(1, 3.2)
    for lane, colour in zip(lanes, _colours(len(lanes)), strict=True):
        times, values = thinned(lane.goodput)
        if len(times):
            axis.plot(times / 3600.0, values * 100.0, label=lane.label, color=colour, linewidth=1.1)
    axis.set_xlabel("hours since the start")
    axis.set_ylabel("goodput, % of the cluster")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)
    return _svg(figure, "goodput")


def environment() -> Any:
    """Jinja2 environment with the templates of `show`, in which all text is escaped."""
    from jinja2 import Environment, PackageLoader

    made = Environment(loader=PackageLoader("slurm_ones.show", "templates"), autoescape=True, trim_blocks=True)
    made.filters |= {"plain": plain, "seconds": seconds, "clock": clock}
    return made


def write(path: Path, template: str, **values: Any) -> None:
    """Render one of the templates of `show` into the file at `path`."""
    written = time.strftime("%Y-%m-%d %H:%M")
    style = files("slurm_ones.show").joinpath("static/style.css").read_text(encoding="utf-8")
    text = environment().get_template(template).render(written=written, style=style, **values)
    path.write_text(text, encoding="utf-8")


def write_study(path: Path, lanes: Sequence[Lane], groups: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Write the page of a study. `groups` maps each job's name to its kind; jobs of a kind share a colour."""
    from markupsafe import Markup

    drawn = study_charts(lanes, groups) if any(lane.bars for lane in lanes) else {}
    if not any(lane.goodput for lane in lanes):
        drawn.pop("goodput", None)
    write(path, "study.html", pictures={name: Markup(svg) for name, svg in drawn.items()}, **values)

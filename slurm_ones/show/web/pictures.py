"""Pictures as SVG: who held which GPUs, who is on which node, throughput by size, loss and accuracy.

Every text is escaped, and colours are classes of the style sheet: a job has the same one in every picture, light and
dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape

from ones_db import EpochPoint, TimelineRow
from slurm_ones.show import charts
from slurm_ones.show.charts import Bar, Floats
from slurm_ones.show.usage import Measured
from slurm_ones.text import clock, plain, seconds

COLOURS = 8
"""Of jobs, by their numbers: those of Okabe and Ito, which people who see fewer colours can tell apart."""
WIDTH, HEIGHT = 1000.0, 240.0
MOST_SHAPES = 4_000
"""Where there were more changes, a job is one shape, and only so many stretches of time are told apart."""
MOST_CELLS = 32
FEWEST_INTERVALS = 24
"""Of these, since so many jobs run at once."""


def colour(job_id: int) -> str:
    """The class that gives a job its colour."""
    return f"c{job_id % COLOURS}"


def cells(gpus: int, job_id: int | None = None) -> Markup:
    """A small square for each GPU of a node that the job holds, or that no elastic job does."""
    free = '<i title="not held by an elastic job"></i>'
    one = free if job_id is None else f'<i class="held {colour(job_id)}" title="job {int(job_id)}"></i>'
    return Markup(one * min(gpus, MOST_CELLS))


def gpus_over_time(rows: Sequence[TimelineRow], capacity: int, begin: float, now: float) -> Markup:
    """GPUs that each job held from `begin`, or the first start after it, to now, one job on another; each shape names
    its job and size."""
    begin = max(begin, min((row.start for row in rows), default=begin))
    bars = [
        Bar(str(row.job_id), max(row.start, begin), now if row.end is None else row.end, row.shape.gpus)
        for row in rows
        if (row.end is None or row.end > begin) and row.shape.nodes
    ]
    bars = [bar for bar in bars if bar.end > bar.start]
    names = {str(row.job_id): row.name for row in rows}
    jobs = list(dict.fromkeys(bar.job for bar in sorted(bars, key=lambda bar: bar.start)))
    if not jobs:
        return Markup('<p class="quiet">No elastic job ran in the last day.</p>')
    starts, ends = np.array([bar.start for bar in bars]), np.array([bar.end for bar in bars])
    changes = np.unique(np.concatenate([starts, ends]))
    single = (np.searchsorted(changes, ends) - np.searchsorted(changes, starts)).sum() <= MOST_SHAPES
    moments, holding = charts.held(bars, jobs) if single else _coarser(bars, jobs, changes, starts, ends)
    most = max(capacity, int(holding.sum(axis=0).max(initial=1.0)), 1)
    titles = [escape(f"job {job} {plain(names[job], 40)}") for job in jobs]
    made = (_stretches if single else _outlines)(jobs, titles, moments, holding, most, begin, now)
    # Of thousands of shapes: numbers need no escaping, and titles are escaped above.
    parts = [Markup("".join(made))]
    line = HEIGHT * (1 - capacity / most)
    parts.append(Markup('<line class="edge" x1="0" x2="{0}" y1="{1:.1f}" y2="{1:.1f}"/>').format(int(WIDTH), line))
    label = f"GPUs held by elastic jobs within {seconds(now - begin)}, of {capacity or 'an unknown number'}"
    return _figure(label, parts, HEIGHT, clock(begin), f"height: {most} GPUs", clock(now))


def _stretches(
    jobs: Sequence[str], titles: Sequence[str], moments: Floats, holding: Floats, most: int, begin: float, now: float
) -> Iterator[str]:
    """A shape for each stretch of time in which a job kept its size; it names both."""
    edges = [_x(at, begin, now) for at in moments]
    middles = [clock((left + right) / 2) for left, right in pairwise(moments)]
    tops = HEIGHT * (1 - holding.cumsum(axis=0) / most)
    for j, (job, title) in enumerate(zip(jobs, titles, strict=True)):
        kind = colour(int(job))
        for m in holding[j, :-1].nonzero()[0]:
            gpus, width = holding[j, m], max(edges[m + 1] - edges[m], 0.5)
            yield (
                f'<rect class="{kind}" x="{edges[m]:.2f}" y="{tops[j, m]:.2f}" width="{width:.2f}" '
                f'height="{HEIGHT * gpus / most:.2f}"><title>{title}: {gpus:.0f} GPUs at {middles[m]}</title></rect>'
            )


def _outlines(
    jobs: Sequence[str], titles: Sequence[str], moments: Floats, holding: Floats, most: int, begin: float, now: float
) -> Iterator[str]:
    """A shape for each job; it names the job, and the least and the most that it held."""
    edges = [f"{_x(at, begin, now):.1f}" for at in moments]
    widths = [f"{(right - left) / max(now - begin, 1e-9) * WIDTH:.1f}" for left, right in pairwise(moments)]
    tops = HEIGHT * (1 - holding.cumsum(axis=0) / most)
    for j, (job, title) in enumerate(zip(jobs, titles, strict=True)):
        at = holding[j, :-1].nonzero()[0]
        if not len(at):
            continue
        sizes = holding[j, at]
        drawn = "".join(
            f"M{edges[m]} {top:.2f}h{widths[m]}v{high:.2f}h-{widths[m]}z"
            for m, top, high in zip(at.tolist(), tops[j, at].tolist(), (HEIGHT / most * sizes).tolist(), strict=True)
        )
        few, many = f"{sizes.min():.0f}", f"{sizes.max():.0f}"
        held_text = many if few == many else f"{few} to {many}"
        yield f'<path class="{colour(int(job))}" d="{drawn}"><title>{title}: {held_text} GPUs</title></path>'


def _coarser(
    bars: Sequence[Bar], jobs: Sequence[str], changes: Floats, starts: Floats, ends: Floats
) -> tuple[Floats, Floats]:
    """As `charts.held`, and in place of every change equal intervals, each as it is in its middle and the last as it is
    at the end."""
    begun = np.searchsorted(np.sort(starts), changes, side="right") - np.searchsorted(np.sort(ends), changes, "right")
    edges = np.linspace(changes[0], changes[-1], max(MOST_SHAPES // int(begun.max()), FEWEST_INTERVALS) + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    middle[-1] = (changes[-2] + changes[-1]) / 2
    row = {job: j for j, job in enumerate(jobs)}
    rows, gpus = np.array([row[bar.job] for bar in bars]), np.array([float(bar.gpus) for bar in bars])
    change = np.zeros((len(jobs), len(edges)))
    np.add.at(change, (rows, np.searchsorted(middle, starts)), gpus)
    np.add.at(change, (rows, np.searchsorted(middle, ends)), -gpus)
    holding: Floats = change.cumsum(axis=1)
    holding[:, -1] = 0.0
    return edges, holding


def curve(points: Sequence[EpochPoint], name: str) -> Markup:
    """Loss or accuracy by epoch, as a line with a point for each."""
    values = [(point.epoch, getattr(point, name)) for point in points if getattr(point, name) is not None]
    if not values:
        return Markup("")
    low, high = min(value for _, value in values), max(value for _, value in values)
    first, last = values[0][0], values[-1][0]
    at = [
        (
            20 + (epoch - first) / max(last - first, 1) * (WIDTH - 40),
            20 + (HEIGHT - 40) * (1 - (value - low) / ((high - low) or 1.0)),
            f"epoch {epoch}: {name} {value:.4g}",
        )
        for epoch, value in values
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in at)
    parts = [Markup('<polyline class="line" points="{}"/>').format(path)]
    parts += [
        Markup('<circle class="point" cx="{:.1f}" cy="{:.1f}" r="5"><title>{}</title></circle>').format(x, y, text)
        for x, y, text in at[-MOST_SHAPES:]
    ]
    label = f"{name} by epoch: from {values[0][1]:.4g} to {values[-1][1]:.4g}"
    return _figure(
        label,
        parts,
        HEIGHT,
        f"epoch {first}: {values[0][1]:.4g}",
        f"from {low:.4g} to {high:.4g}",
        f"epoch {last}: {values[-1][1]:.4g}",
    )


def sizes(measured: Sequence[Measured]) -> Markup:
    """Useful samples/s at each number of GPUs and batch that was measured, as bars."""
    if not measured:
        return Markup("")
    most, row = max(one.useful for one in measured), 26.0
    parts = []
    for n, one in enumerate(measured):
        label = (
            f"{one.gpus} GPUs, batch {one.batch}: {one.useful:.4g} useful samples/s, measured {seconds(one.measured_s)}"
        )
        parts.append(
            Markup(
                '<rect class="bar" x="190" y="{:.1f}" width="{:.1f}" height="20"><title>{}</title></rect>'
                '<text x="180" y="{:.1f}" text-anchor="end">{}</text><text x="{:.1f}" y="{:.1f}">{}</text>'
            ).format(
                n * row + 3,
                max(one.useful / most * 640, 1.0),
                label,
                n * row + 18,
                f"{one.gpus} GPUs, batch {one.batch}",
                200 + one.useful / most * 640,
                n * row + 18,
                f"{one.useful:.4g}",
            )
        )
    return _svg("useful samples/s by size", parts, row * len(measured) + 6)


def _x(at: float, begin: float, now: float) -> float:
    return float((at - begin) / max(now - begin, 1e-9) * WIDTH)


def _svg(label: str, parts: Sequence[Markup], height: float) -> Markup:
    head = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">').format(WIDTH, height, label)
    return head + Markup("").join(parts) + Markup("</svg>")


def _figure(label: str, parts: Sequence[Markup], height: float, left: str, middle: str, right: str) -> Markup:
    """The picture, and below it what its left end, its height and its right end stand for."""
    caption = Markup("<figcaption><span>{}</span><span>{}</span><span>{}</span></figcaption>")
    return Markup("<figure>") + _svg(label, parts, height) + caption.format(left, middle, right) + Markup("</figure>")

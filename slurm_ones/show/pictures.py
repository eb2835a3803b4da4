"""Charts as SVG with axes: GPUs over time, metrics by epoch, throughput by size, and lines of a study.

Shapes are scaled to the picture's width, while text keeps its size, so that charts of any width are legible. All text
is escaped. Colours are CSS classes of the style sheet.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from ones_db import EpochPoint, TimelineRow
from slurm_ones.show import palette
from slurm_ones.show.usage import Measured, alike
from slurm_ones.text import clock, plain, seconds

Floats = npt.NDArray[np.float64]

WIDTH, HEIGHT = 1000.0, 240.0
"""Size of a drawing in SVG units."""
MOST_SHAPES = 4_000
"""Largest number of shapes of a chart. If one for each size of each job is too many, each job gets one shape."""
FEWEST_INTERVALS = 24
"""Fewest intervals at which sizes are sampled, however many jobs run at once."""
NAMED = 12
"""Largest number of jobs, users or partitions in a legend: those with the most GPU time."""
WIDE, HIGH = 0.05 * WIDTH, 0.08 * HEIGHT
"""Least width and height of a shape that is labelled with its job's id."""
STEPS_S = (
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(60.0 * m for m in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080, 40320)),
)
"""Possible distances between two marks on a time axis, in seconds."""
TICKS = 6
"""Largest number of marks on an axis."""
MOST_POINTS = 600
"""Largest number of points of a line over time. More points are averaged in groups, to keep the page small."""
PATTERNS = ("", "dots", "bars")
GROWN = "grown"
"""Name of the hatching over GPUs that the job's user did not request."""


@dataclass(frozen=True)
class Axis:
    """Axis of a picture: its marks as (position from 0 to 1, label), and its unit."""

    marks: tuple[tuple[float, str], ...]
    unit: str = ""


def of_numbers(low: float, high: float, unit: str, *, whole: bool = False) -> Axis:
    """Return an axis from low to high, with marks at up to `TICKS` round numbers."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(step * factor for factor in (1, 2, 5, 10, 20) if span / (step * factor) <= TICKS)
    step = max(step, 1.0) if whole else step
    values = np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1) * step
    return Axis(tuple((float((value - low) / span), f"{value:.6g}") for value in values), unit)


def of_time(begin: float, end: float) -> Axis:
    """Return an axis of local time from begin to end (Unix seconds), with marks at round times."""
    span = max(end - begin, 1e-9)
    step = next((step for step in STEPS_S if span / step <= TICKS), span)
    shift = time.localtime(begin).tm_gmtoff
    first = math.ceil((begin + shift) / step) * step - shift
    form = "%d %b" if step >= 86_400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    moments = np.arange(first, end + 1e-6, step).tolist()
    return Axis(tuple(((at - begin) / span, time.strftime(form, time.localtime(at))) for at in moments))


def of_magnitudes(low: float, high: float, unit: str) -> Axis:
    """Return a logarithmic axis with marks at powers of ten and, if it is short, at 2 and 5 times a power."""
    span, factors = math.log10(high / low), (1, 2, 5) if high < 1e5 * low else (1,)
    powers = [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    values = [factor * power for power in powers for factor in factors if low <= factor * power <= high]
    return Axis(tuple((math.log10(value / low) / span, f"{value:g}") for value in values), unit)


class Bar(NamedTuple):
    """GPUs of a job over one time span. Times are seconds, from the same origin for all bars of a chart."""

    job: str
    start: float
    end: float
    gpus: int


def held(bars: Sequence[Bar], jobs: Sequence[str], moments: Floats) -> Floats:
    """Return the GPUs that each job holds at each moment, as an array (jobs, moments). The moments (M,) ascend."""
    row = {job: j for j, job in enumerate(jobs)}
    rows, gpus = np.array([row[bar.job] for bar in bars]), np.array([float(bar.gpus) for bar in bars])
    change = np.zeros((len(jobs), len(moments) + 1))
    np.add.at(change, (rows, np.searchsorted(moments, [bar.start for bar in bars])), gpus)
    np.add.at(change, (rows, np.searchsorted(moments, [bar.end for bar in bars])), -gpus)
    holding: Floats = change.cumsum(axis=1)[:, :-1]
    return holding


def gpus_over_time(
    rows: Sequence[TimelineRow],
    capacity: int,
    begin: float,
    now: float,
    colours: Mapping[int, int] | None = None,
    by: str = "job",
    least: int = 1,
    *,
    others: Sequence[tuple[float, int]] = (),
    elapsed: bool = False,
) -> Markup:
    """Return a stacked chart of the GPUs that each job held, from `begin` or a later first start to `now`.

    The title of each shape names its job and size. GPUs that the user did not request are hatched. `by` says what has a
    colour of its own: "job" (its colour may be in `colours`), "user" or "partition". The vertical scale reaches at
    least `least` GPUs. `others` lists (time, GPUs) of each change in the GPUs of jobs that did not opt in. If there are
    such GPUs, a line shows `capacity` minus them. With `elapsed`, the time axis has hours since `begin`.
    """
    begin = begin if elapsed else max(begin, min((row.start for row in rows), default=begin))
    bars = [
        Bar(str(row.job_id), max(row.start, begin), now if row.end is None else row.end, row.shape.gpus)
        for row in rows if row.shape.nodes
    ]  # fmt: skip
    bars = [bar for bar in bars if bar.end > bar.start]
    jobs = list(dict.fromkeys(bar.job for bar in sorted(bars, key=lambda bar: bar.start)))
    if not jobs:
        return Markup('<p class="quiet">No elastic job ran in this time.</p>')
    of_job = {str(row.job_id): row for row in rows}
    names = {job: f"job {job} {plain(of_job[job].name, 40)}" for job in jobs}
    group = names if by == "job" else {job: plain(getattr(of_job[job], by), 40) or "none" for job in jobs}
    if by != "job":
        jobs.sort(key=group.__getitem__)  # stable: those of one user lie next to each other
    starts, ends = np.array([bar.start for bar in bars]), np.array([bar.end for bar in bars])
    changes = np.unique(np.concatenate([starts, ends]))
    single = (np.searchsorted(changes, ends) - np.searchsorted(changes, starts)).sum() <= MOST_SHAPES
    if single:
        moments, holding = changes, held(bars, jobs, changes)
    else:
        moments, middles = _intervals(changes, starts, ends)
        holding = np.pad(held(bars, jobs, middles), ((0, 0), (0, 1)))
    if by == "job":
        known = {names[job]: colours[int(job)] for job in jobs if colours and int(job) in colours}
        chosen = palette.chosen(palette.whole((names[bar.job], bar.start, bar.end) for bar in bars), known)
        patterns = palette.patterns([chosen[names[job]] for job in jobs], holding)
    else:
        chosen = palette.chosen(((name, 0.0, 1.0) for name in dict.fromkeys(group[job] for job in jobs)), {})
        turn = _turns(chosen)
        patterns = [turn[group[job]] for job in jobs]
    most = max(capacity, int(holding.sum(axis=0).max(initial=1.0)), least)
    groups = [group[job] for job in jobs]
    asked = np.array([of_job[job].asked for job in jobs])
    used, titles = [chosen[one] for one in groups], [str(escape(names[job])) for job in jobs]
    stack = _Stack(jobs, titles, groups, used, patterns, asked, moments, holding, most, begin, now, elapsed)
    # Of thousands of shapes: numbers need no escaping, and titles are escaped above.
    made = Markup("".join(stack.stretches() if single else stack.outlines()))
    rest = _rest(others, capacity, begin, now) if capacity and any(gpus for _, gpus in others) else []
    made += _line("rest", ((x, left / most) for x, left in rest)) if rest else ""
    y = f"{100 * (1 - capacity / most):.2f}%"
    over = [Markup('<line class="edge" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(y)] if capacity else []
    over += stack.numbers() if single and len(jobs) > 1 else []
    label = f"GPUs held by jobs within {seconds(now - begin)}, of {capacity or 'an unknown number'}"
    across = of_numbers(0, (now - begin) / 3600.0, "hours since the start") if elapsed else of_time(begin, now)
    picture = Picture(label, across, of_numbers(0, most, "GPUs", whole=True), made, over)
    grown = single and (holding > asked[:, None]).any()
    legend = stack.legend()
    legend += [_sign("any", GROWN, "beyond what the job asked for")] if grown else []
    legend += [_stroke("edge", "GPUs of the cluster")] if capacity else []
    legend += [_stroke("rest", "less those of jobs that did not opt in")] if rest else []
    scale = f' data-capacity="{capacity}" data-most="{most}"' if rest else ""
    return picture.drawn(legend, f' data-begin="{begin:.0f}" data-end="{now:.0f}"{scale}')


def _rest(others: Sequence[tuple[float, int]], capacity: int, begin: float, now: float) -> list[tuple[float, float]]:
    """Return the corners (x from 0 to 1, GPUs) of the line of `capacity` minus the GPUs of jobs that did not opt in."""
    times, gpus = np.array(others, dtype=np.float64).T
    moments = np.unique(np.clip(times, begin, now))
    if len(moments) > MOST_POINTS:
        moments = np.linspace(moments[0], now, MOST_POINTS)
    left = np.maximum(capacity - gpus[np.searchsorted(times, moments, side="right") - 1], 0.0)
    x = (np.append(moments, now) - begin) / max(now - begin, 1e-9)
    return list(zip(np.repeat(x, 2)[1:-1].tolist(), np.repeat(left, 2).tolist(), strict=True))


def _turns(colours: Mapping[str, int]) -> dict[str, int]:
    """Return a pattern for each group. Groups with the same colour get different patterns, until all are used."""
    found, used = {}, Counter[int]()
    for group, colour in colours.items():
        found[group] = used[colour] % len(PATTERNS)
        used[colour] += 1
    return found


@dataclass(frozen=True)
class _Stack:
    """Stacked chart of jobs' GPUs over time."""

    jobs: Sequence[str]
    titles: Sequence[str]
    """Titles of the jobs' shapes, already escaped."""
    groups: Sequence[str]
    """Entry of the legend to which each job belongs."""
    colours: Sequence[int]
    patterns: Sequence[int]
    asked: Floats
    moments: Floats
    holding: Floats
    most: int
    begin: float
    now: float
    elapsed: bool

    def x(self, at: float) -> float:
        """Return the horizontal position of a time in the drawing."""
        return float((at - self.begin) / max(self.now - self.begin, 1e-9) * WIDTH)

    @property
    def tops(self) -> Floats:
        """Upper edge of each job's shape at each moment, as an array (jobs, moments)."""
        return HEIGHT * (1 - self.holding.cumsum(axis=0) / self.most)

    def stretches(self) -> Iterator[str]:
        """Yield a shape for each time span in which a job kept its size. Its title has the job and the size."""
        edges, tops, each = [self.x(at) for at in self.moments], self.tops, HEIGHT / self.most
        middles = [(left + right) / 2 for left, right in pairwise(self.moments)]
        when = [f"{(at - self.begin) / 3600:.2f} h" if self.elapsed else clock(at) for at in middles]
        for j, title in enumerate(self.titles):
            for m in self.holding[j, :-1].nonzero()[0]:
                gpus, width = self.holding[j, m], max(edges[m + 1] - edges[m], 0.5)
                place = f'x="{edges[m]:.2f}" y="{tops[j, m]:.2f}" width="{width:.2f}"'
                said = f"<title>{title}: {gpus:.0f} GPUs at {when[m]}</title>"
                yield f'<rect class="c{self.colours[j]}" {place} height="{each * gpus:.2f}">{said}</rect>'
                grown = gpus - self.asked[j]
                for pattern, height in ((PATTERNS[self.patterns[j]], gpus), (GROWN, grown)):
                    if pattern and height > 0:
                        yield f'<rect class="over" fill="url(#{pattern})" {place} height="{each * height:.2f}"/>'

    def outlines(self) -> Iterator[str]:
        """Yield one shape for each job. Its title has the job, and its fewest and most GPUs."""
        edges = [f"{self.x(at):.1f}" for at in self.moments]
        widths = [
            f"{(right - left) / max(self.now - self.begin, 1e-9) * WIDTH:.1f}" for left, right in pairwise(self.moments)
        ]
        # One list for all: to ask numpy for each job's would take longer than to write them.
        tops, sizes = np.round(self.tops, 1).tolist(), self.holding[:, :-1].astype(int).tolist()
        heights = [f"{HEIGHT / self.most * gpus:.2f}" for gpus in range(self.most + 1)]
        for j, title in enumerate(self.titles):
            own = sizes[j]
            there = [gpus for gpus in own if gpus]
            if not there:
                continue
            drawn = "".join(
                [
                    f"M{edges[m]} {top}h{widths[m]}v{heights[gpus]}h-{widths[m]}z"
                    for m, (gpus, top) in enumerate(zip(own, tops[j], strict=False))
                    if gpus
                ]
            )
            few, many = min(there), max(there)
            text = many if few == many else f"{few} to {many}"
            yield f'<path class="c{self.colours[j]}" d="{drawn}"><title>{title}: {text} GPUs</title></path>'

    def numbers(self) -> list[Markup]:
        """Return a label with the job's id for each job, in its first shape that is large enough."""
        edges, tops = [self.x(at) for at in self.moments], self.tops
        found = []
        for j, job in enumerate(self.jobs):
            for m in self.holding[j, :-1].nonzero()[0]:
                wide, high = edges[m + 1] - edges[m], HEIGHT / self.most * self.holding[j, m]
                if wide >= WIDE and high >= HIGH:
                    x, y = (edges[m] + wide / 2) / WIDTH * 100, (tops[j, m] + high / 2) / HEIGHT * 100
                    text = '<text class="stripe" aria-hidden="true" x="{:.2f}%" y="{:.2f}%">{}</text>'
                    found.append(Markup(text).format(x, y, job))
                    break
        return found

    def legend(self) -> list[Markup]:
        """Return legend entries of up to `NAMED` groups with the most GPU time, and a count of all other groups."""
        spent, signs = dict[str, float](), {}
        totals = (self.holding[:, :-1] * np.diff(self.moments)).sum(axis=1).tolist()
        for group, colour, pattern, total in zip(self.groups, self.colours, self.patterns, totals, strict=True):
            spent[group] = spent.get(group, 0.0) + total
            signs[group] = _sign(f"c{colour}", PATTERNS[pattern], group)
        shown = sorted(spent, key=lambda one: -spent[one])[:NAMED]
        more = [Markup("<li>and {} more</li>").format(len(spent) - NAMED)] if len(spent) > NAMED else []
        return [signs[group] for group in shown] + more


def _entry(width: int, drawing: Markup, text: str) -> Markup:
    entry = '<li><svg class="sign" width="{}" height="14" aria-hidden="true">{}</svg> {}</li>'
    return Markup(entry).format(width, drawing, text)


def _sign(kind: str, pattern: str, text: str) -> Markup:
    over = Markup('<rect width="14" height="14" fill="url(#{})"/>').format(pattern) if pattern else ""
    return _entry(14, Markup('<rect class="{}" width="14" height="14"/>{}').format(kind, over), text)


def _stroke(kind: str, text: str) -> Markup:
    return _entry(22, Markup('<line class="{}" x2="22" y1="7" y2="7"/>').format(kind), text)


def _intervals(changes: Floats, starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Return the edges (M + 1,) and middles (M,) of M equal intervals. The last middle is just before the last
    change."""
    begun = np.searchsorted(np.sort(starts), changes, side="right") - np.searchsorted(np.sort(ends), changes, "right")
    edges = np.linspace(changes[0], changes[-1], max(MOST_SHAPES // int(begun.max()), FEWEST_INTERVALS) + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    middles[-1] = (changes[-2] + changes[-1]) / 2
    return edges, middles


def _line(kind: str, points: Iterable[tuple[float, float]], title: str = "") -> Markup:
    """Return a line through points (x, y), each from 0 to 1. `kind` is its CSS class."""
    path = " ".join(f"{WIDTH * x:.1f},{HEIGHT * (1 - y):.2f}" for x, y in points)
    named = Markup("<title>{}</title>").format(title) if title else ""
    return Markup('<polyline class="{}" points="{}">{}</polyline>').format(kind, path, named)


def _dot(x: float, y: float, radius: int, title: str) -> Markup:
    dot = '<circle class="point" cx="{:.2f}%" cy="{:.2f}%" r="{}"><title>{}</title></circle>'
    return Markup(dot).format(100 * x, 100 * (1 - y), radius, title)


def curve(points: Sequence[EpochPoint], name: str, changes: Sequence[tuple[float, str]] = ()) -> Markup:
    """Return a chart of loss or accuracy by epoch. `changes` are the job's resizes: (Unix seconds, label)."""
    found = ((point.epoch, getattr(point, name)) for point in points)
    values = [(epoch, value) for epoch, value in found if value is not None and math.isfinite(value)]
    if not values:
        return Markup("")
    low, high = min(value for _, value in values), max(value for _, value in values)
    room = (high - low or abs(high) or 1.0) * 0.05
    bottom, top = low - room, high + room
    first, last = values[0][0], max(values[-1][0], values[0][0] + 1)

    def place(epoch: float, value: float) -> tuple[float, float]:
        return (epoch - first) / (last - first), (value - bottom) / (top - bottom)

    parts = _line("line", (place(*one) for one in values))
    over = []
    times, epochs = [point.time for point in points], [float(point.epoch) for point in points]
    for at, text in changes:
        if times[0] <= at <= times[-1]:
            x = f"{100 * place(float(np.interp(at, times, epochs)), low)[0]:.2f}%"
            mark = '<line class="change" x1="{0}" x2="{0}" y1="0" y2="100%"><title>{1}</title></line>'
            over.append(Markup(mark).format(x, text))
    over += [
        _dot(*place(epoch, value), 4, f"epoch {epoch}: {name} {value:.4g}") for epoch, value in values[-MOST_SHAPES:]
    ]
    label = f"{name} by epoch: from {values[0][1]:.4g} to {values[-1][1]:.4g}"
    picture = Picture(label, of_numbers(first, last, "epoch", whole=True), of_numbers(bottom, top, name), parts, over)
    return picture.drawn([_stroke("change", "a resize")] if any("change" in one for one in over) else [])


def scaling(measured: Sequence[Measured], predicted: Mapping[int, float] | None = None) -> Markup:
    """Return a chart of the measured useful samples/s at each number of GPUs and batch.

    One line shows `predicted` useful samples/s by number of GPUs, and one linear scaling from the smallest size. Of
    several kinds of GPU, only the one that was measured longest is drawn.
    """
    measured = alike(measured)
    if not measured:
        return Markup("")
    smallest = min(measured, key=lambda one: (one.gpus, -one.useful))
    each = smallest.useful / max(smallest.gpus, 1)
    predicted = predicted or {}
    widest = max(*(one.gpus for one in measured), *predicted, 1)
    high = max(*(one.useful for one in measured), *predicted.values(), each * widest, 1e-9) * 1.08
    right = widest * 1.08
    best = {one.gpus: one.useful for one in sorted(measured, key=lambda one: (one.gpus, one.useful))}
    parts = Markup("")
    for kind, values in (("ideal", {0: 0.0, widest: each * widest}), ("predicted", predicted), ("line", best)):
        parts += _line(kind, ((n / right, value / high) for n, value in values.items())) if values else ""
    over = []
    for one in measured:
        took = f"measured {seconds(one.measured_s)}"
        said = f"{one.gpus} GPUs, batch {one.batch}: {one.useful:.4g} useful samples/s, {took}"
        over.append(_dot(one.gpus / right, one.useful / high, 5, said))
    legend = [_stroke("line", "measured, the best batch"), _stroke("ideal", "if each GPU added as much as the first")]
    legend += [_stroke("predicted", "predicted, at the batch that was measured longest")] if predicted else []
    across, up = of_numbers(0, right, "GPUs", whole=True), of_numbers(0, high, "useful samples/s")
    return Picture("useful samples/s by GPUs", across, up, parts, over).drawn(legend)


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return (times, mean values) of the points in at most `most` equal intervals of time. Empty ones are left out."""
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


def lines(series: Mapping[str, tuple[Floats, Floats]], across: str, up: str, *, log: bool = False) -> Markup:
    """Return a chart with a line for each name, given as (x, y). Its y axis starts at 0; with `log`, x is
    logarithmic."""
    there = [(plain(name, 60), x, y) for name, (x, y) in series.items() if len(x)]
    if not there:
        return Markup("")
    low, high = min(float(x.min()) for _, x, _ in there), max(float(x.max()) for _, x, _ in there)
    top = 1.05 * max(float(y.max()) for _, _, y in there) or 1.0
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** (math.floor(math.log10(high)) + 1)
    axis = of_magnitudes(low, high, across) if log else of_numbers(0.0, high, across)
    shapes, legend = Markup(""), []
    for n, (name, x, y) in enumerate(there):
        kind = f"series c{n % palette.COLOURS}"
        where = np.log(x / low) / math.log(high / low) if log else x / (high or 1.0)
        shapes += _line(kind, zip(where, y / top, strict=True), name)
        legend.append(_stroke(kind, name))
    return Picture(f"{up} by {across}", axis, of_numbers(0, top, up), shapes).drawn(legend)


@dataclass(frozen=True)
class Picture:
    """Chart with axes. Its shapes are scaled from `WIDTH` x `HEIGHT`, while the text over them keeps its size."""

    label: str
    across: Axis
    up: Axis
    shapes: Markup
    over: Sequence[Markup] = ()

    def drawn(self, legend: Sequence[Markup], data: str = "") -> Markup:
        """Return the chart as HTML. `data` has further attributes of its outer element."""
        grid = Markup("").join(self._grid())
        head = Markup('<figure class="plot"{}><p class="unit">{}</p><svg role="img" aria-label="{}">')
        inner = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" preserveAspectRatio="none" width="100%" height="100%">')
        parts = [head.format(Markup(data), self.up.unit, self.label), grid, inner.format(WIDTH, HEIGHT), self.shapes]
        parts += [Markup("</svg>"), *self.over, Markup("</svg>")]
        if self.across.unit:
            parts.append(Markup('<p class="unit across">{}</p>').format(self.across.unit))
        if legend:
            parts += [Markup('<figcaption><ul class="legend">'), *legend, Markup("</ul></figcaption>")]
        return Markup("").join([*parts, Markup("</figure>")])

    def _grid(self) -> Iterator[Markup]:
        for at, text in self.up.marks:
            y = f"{100 * (1 - at):.2f}%"
            yield Markup('<line class="grid" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(y)
            yield Markup('<text class="tick up" x="-6" y="{}">{}</text>').format(y, text)
        for at, text in self.across.marks:
            x = f"{100 * at:.2f}%"
            yield Markup('<line class="grid" x1="{0}" x2="{0}" y1="0" y2="100%"/>').format(x)
            kind = "tick across last" if at > 0.97 else "tick across"
            yield Markup('<text class="{}" x="{}" y="100%" dy="17">{}</text>').format(kind, x, text)

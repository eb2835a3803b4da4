"""The live pages, each as a part that changes from tick to tick and the frame around it, and their pictures as SVG.

All text is escaped. Colours are classes of the style sheet: a job has the same one in every picture, light and dark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from html import escape as escaped
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from ones_db import EpochPoint, HeldRecord, NodeRecord, Store, TimelineRow
from ones_db.query import Reader
from ones_db.reasons import CAUSES
from slurm_ones.show import charts, columns
from slurm_ones.show.charts import Bar, Floats
from slurm_ones.show.columns import ShownColumn, ShownJob, T
from slurm_ones.show.feed import HISTORY_S, Moment
from slurm_ones.show.live import ENDED, Live, node_rows, silent
from slurm_ones.show.usage import Measured, advised, usage
from slurm_ones.show.why import decided, decided_last, resizes_of
from slurm_ones.text import clock, plain, seconds

COLOURS = 8
"""Of jobs, by their numbers: those of Okabe and Ito, which people who see fewer colours can tell apart."""
WIDTH, HEIGHT = 1000.0, 240.0
MOST_SHAPES = 4_000
"""Where there were more changes, a job is one shape, and only so many stretches of time are told apart."""
MOST_CELLS = 32
FEWEST_INTERVALS = 24
"""Of these, since so many jobs run at once."""
MOST_NODES = 600
"""Nodes that are drawn; of more their number is said."""
MOST_DECIDED = 100
"""Jobs that are shown of a decision."""
MOST_ENDED = 20
"""Jobs that have ended on the first page: those that did last; of one user's own all that are at hand."""
DECISIONS = 5
"""Newest decisions that are shown of a job, or in all."""


@cache
def environment() -> Any:
    """Jinja2's environment with what the templates of live pages use."""
    made = charts.environment()
    made.globals |= {
        "text": {column.name: column.text for column in columns.JOB},
        "columns": columns,
        "colour": colour,
        "cells": cells,
        "table": table,
        "causes": CAUSES,
        "MOST_NODES": MOST_NODES,
        "MOST_DECIDED": MOST_DECIDED,
    }
    return made


def table(shown: Sequence[ShownColumn[T]], rows: Sequence[T], root: str, kind: str = "") -> Markup:
    """A table of a page; the job's number leads to its page. `kind` is the class of its body."""
    titles = "".join(("<th>" if column.left else '<th class="n">') + escaped(column.title) for column in shown)
    # Thousands of cells a tick: calls of the template engine for each would cost more than all else on the page.
    body = "\n".join("<tr>" + "".join(_cell(column, one, root) for column in shown) + "</tr>" for one in rows)
    named = f' class="{kind}"' if kind else ""
    head = f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody{named}>'
    return Markup(f"{head}\n{body}\n</tbody></table></div>")


def _cell(column: ShownColumn[T], one: T, root: str) -> str:
    if column.name != "job_id":
        return column.cell + escaped(column.text(one))
    number = int(column.value(one))
    runs = isinstance(one, ShownJob) and one.job.running
    mark = f'<span class="{colour(number)}" aria-hidden="true">■</span> ' if runs else ""
    return f'<td class="n">{mark}<a href="{escaped(root)}/jobs/{number}">{number}</a>'


def frame(root: str, part: str, title: str, inner: bytes, moment: Moment) -> bytes:
    """A whole page around a part of it, as of the moment. `root` is the path below which all pages are."""
    template = environment().get_template("frame.html")
    text: str = template.render(root=root, part=part, title=title, inner=inner.decode(), moment=moment)
    return text.encode()


def overview(moment: Moment, root: str) -> bytes:
    """The cluster: how the companion is, why jobs wait, who held which GPUs, the nodes, the jobs."""
    live = moment.live
    alive = [one for one in live.jobs if one.job.end_time is None]
    capacity = sum(node.gpus for node in live.nodes if node.usable)
    return _part(
        "overview.html",
        root=root,
        live=live,
        problem=moment.problem,
        health=_health(live, moment.at),
        jobs=alive,
        ended=moment.ended[-(ENDED if moment.user else MOST_ENDED) :][::-1],
        waiting=[one for one in alive if not one.job.running],
        running=[one for one in alive if one.job.running],
        held=sum(one.gpus for one in live.held),
        capacity=capacity,
        counts=sorted(Counter(one.cause for one in alive if one.cause).items(), key=lambda item: (-item[1], item[0])),
        picture=gpus_over_time(moment.timeline, capacity, moment.at - HISTORY_S, moment.at),
        nodes=_nodes(live.nodes, live.held),
    )


@lru_cache(maxsize=64)
def _nodes(nodes: tuple[NodeRecord, ...], held: tuple[HeldRecord, ...]) -> Markup:
    """Who is on which node: at most ticks just as before, which is found faster than it is made."""
    return Markup(_part("nodes.html", nodes=node_rows(nodes, held)).decode())


def decisions(moment: Moment, root: str, opened: Callable[[], Store]) -> bytes:
    """What was decided last: what each job gets, and why."""
    names = {one.job.job_id: one.job.name for one in moment.live.jobs}
    with opened() as store:
        found = decided_last(store, names, DECISIONS, moment.user, MOST_DECIDED)
    return _part("decisions.html", root=root, decisions=found, problem=moment.problem)


def job(
    moment: Moment, root: str, job_id: int, opened: Callable[[], Store], reader: Callable[[], Reader]
) -> bytes | None:
    """A job: why it has what it has, sizes, throughput, training, resizes, advice. None where it is not there."""
    with opened() as store, store.one_moment():
        # Of those that ended long ago the moment knows nothing.
        one = moment.job(job_id) or next(map(ShownJob, store.job_summaries([job_id])), None)
        if one is None or moment.user not in ("", one.job.user):
            return None
        decisions_of = decided(store, job_id, DECISIONS)
        resizes = resizes_of(store, job_id, 50)[::-1]
        history = store.histories([job_id]).get(job_id)
        source = reader()
        try:
            used = usage(source, store.cluster, job_id=job_id)
        finally:
            source.close()
        own = store.timeline(job_id=job_id)
        told = used[-1] if used else None
        tips = advised(store, used[-1:]).get(job_id, [])
    epochs = history.epochs if history is not None else ()
    now = one.job.end_time or moment.at
    return _part(
        "job.html",
        root=root,
        problem=moment.problem,
        one=one,
        decided=decisions_of,
        resizes=resizes,
        usage=told,
        advice=tips,
        gpus=gpus_over_time(own, max((r.shape.gpus for r in own), default=0), own[0].start, now) if own else "",
        sizes=sizes(told.measured) if told else "",
        loss=curve(epochs, "loss"),
        accuracy=curve(epochs, "accuracy"),
    )


def _health(live: Live, now: float) -> tuple[bool, str]:
    """Tell whether the companion is well, and a sentence on it."""
    if live.health is None or live.leader is None:
        return False, "No companion has led here yet."
    if not live.leader.holder:
        return False, "No companion runs."
    if live.health.tick_time is None:
        return True, f"The companion runs in mode {live.health.mode}; it has not ticked yet."
    # The moment, and not how long ago: this stays on the page until there is something new.
    if silent(live.health, now):
        return False, f"The companion is silent: its last tick was at {clock(live.health.tick_time)}."
    took = f"its last tick, at {clock(live.health.tick_time)}, took {live.health.tick_s or 0.0:.2f} s"
    return True, f"The companion runs in mode {live.health.mode}; {took}."


def _part(template: str, **values: Any) -> bytes:
    text: str = environment().get_template(template).render(**values)
    return text.encode()


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

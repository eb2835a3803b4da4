"""HTML of the live pages: a frame, around a part that is replaced at each tick. All text is escaped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from html import escape as escaped
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from ones_db import HeldRecord, JobHistory, NodeRecord, Store, TimelineRow
from ones_db.reasons import CAUSES
from ones_db.shape import Shape
from slurm_ones.learn.throughput import MeasuredThroughput
from slurm_ones.show import columns
from slurm_ones.show.columns import ShownColumn, ShownJob, T, gpus
from slurm_ones.show.feed import HISTORY_S, Moment
from slurm_ones.show.live import ENDED, KEPT, Live, node_rows, silent
from slurm_ones.show.logs import Logs
from slurm_ones.show.pictures import curve, gpus_over_time, scaling
from slurm_ones.show.usage import Allowed, Measured, Usage, advised, allowed, usage
from slurm_ones.show.why import decided, resizes_of, with_names
from slurm_ones.text import changed, clock, hours, plain, seconds

SPANS = {"15m": 900.0, "1h": 3600.0, "6h": 6 * 3600.0, "24h": HISTORY_S, "all": float("inf")}
"""Time spans that the chart of GPUs can cover, in seconds before the newest tick."""
WIDE_ONLY = frozenset(
    (
        *("batch", "local_batch", "samples_per_s", "epochs", "accuracy", "resizes", "pause_s", "mechanism", "steps"),
        *("from_shape", "alternatives", "user"),
    )
)
"""Columns that are hidden if the window is narrow. A job's page still has all their values."""
GROUPS = ("job", "user", "partition")
"""Groupings of the chart of GPUs: each job, user or partition has a colour of its own."""
FARTHEST = 4
"""Limit of predicted sizes, as a multiple of the most GPUs measured."""
MOST_CELLS = 32
MOST_NODES = 600
"""Largest number of nodes that are drawn. Of the other nodes, only their number is shown."""
LOG_LINES = 30
MOST_DECIDED = 100
"""Largest number of jobs shown for a decision."""
MOST_ENDED = 20
"""Largest number of ended jobs on the front page for all users. For one user it shows up to `ENDED`."""
DECISIONS = 5
"""Number of decisions shown of a job or of the cluster: the newest."""


@cache
def environment() -> Any:
    """Return the Jinja2 environment with the templates of `show`. It escapes all text."""
    from jinja2 import Environment, PackageLoader

    made = Environment(loader=PackageLoader("slurm_ones.show", "templates"), autoescape=True, trim_blocks=True)
    made.filters |= {"plain": plain, "seconds": seconds, "clock": clock, "hours": hours}
    made.globals |= {
        "text": {column.name: column.text for column in columns.JOB},
        "columns": columns,
        "cells": cells,
        "table": table,
        "causes": CAUSES,
        "MOST_NODES": MOST_NODES,
        "MOST_DECIDED": MOST_DECIDED,
    }
    return made


def table(
    shown: Sequence[ShownColumn[T]], rows: Sequence[T], root: str, moment: Moment, kind: str = "", none: str = ""
) -> Markup:
    """Return an HTML table in which job ids link to the jobs' pages, or the text `none` if it has no rows.

    `kind` is the CSS class of its body.
    """
    if not rows:
        return Markup('<p class="quiet">{}</p>').format(none) if none else Markup("")
    titles = "".join(f"<th{_kind(column)}>{escaped(column.title)}" for column in shown)
    body = "\n".join(
        _job_row(tuple(shown), one, root, moment.colour(one.job.job_id) if one.job.running else "")
        if isinstance(one, ShownJob)
        else _row(shown, one, root)
        for one in rows
    )
    named = f' class="{kind}"' if kind else ""
    short = [column for column in shown if not column.long]
    narrow = [column for column in short if column.name not in WIDE_ONLY]
    counts = f"k{len(short)} n{len(narrow)}"
    head = f'<div class="wide"><table class="{counts}"><thead><tr>{titles}</tr></thead><tbody{named}>'
    return Markup(f"{head}\n{body}\n</tbody></table></div>")


def _row(shown: Sequence[ShownColumn[T]], one: T, root: str, colour: str = "") -> str:
    # Thousands of cells a tick: calls of the template engine for each would cost more than all else on the page.
    def cell(column: ShownColumn[T]) -> str:
        if column.name != "job_id":
            return escaped(column.text(one).strip()).replace(" (", "&nbsp;(")
        number = int(column.value(one))
        mark = f'<span class="{colour}" aria-hidden="true">■</span> ' if colour else ""
        return f'{mark}<a href="{escaped(root)}/jobs/{number}">{number}</a>'

    return "<tr>" + "".join(f"<td{_kind(column)}>{cell(column)}" for column in shown) + "</tr>"


_job_row = lru_cache(maxsize=KEPT)(_row)
"""`_row` with a cache, because few jobs change from tick to tick."""


@cache
def _kind(column: ShownColumn[Any]) -> str:
    """Return the CSS classes of a column's cells: for numbers, long text, and columns that narrow windows hide."""
    found = ["long" if column.long else "" if column.left else "n", "w" if column.name in WIDE_ONLY else ""]
    kinds = " ".join(filter(None, found))
    return f' class="{kinds}"' if kinds else ""


@dataclass(frozen=True)
class PageView:
    """Reader's choices on the front page: time span and grouping of the chart of GPUs."""

    span: str = "24h"
    by: str = "job"

    @classmethod
    def of(cls, asked: Mapping[str, Sequence[str]]) -> PageView:
        """Return the choices in a query. Invalid ones are ignored."""
        span, by = (asked.get(name, [""])[0] for name in ("span", "by"))
        return cls(span if span in SPANS else "24h", by if by in GROUPS else "job")

    def choices(self) -> list[tuple[str, list[tuple[str, str, bool]]]]:
        """Return what the reader can choose: (title, [(label, query, True if chosen)])."""
        spans = [(one, f"?span={one}&by={self.by}", one == self.span) for one in SPANS]
        groups = [(one, f"?span={self.span}&by={one}", one == self.by) for one in GROUPS]
        return [("time", spans), ("a colour for each", groups)]


def frame(root: str, part: str, title: str, inner: bytes, moment: Moment) -> bytes:
    """Return the whole page around `inner`. `root` is the path below which all pages are."""
    return _part("frame.html", root=root, part=part, title=title, inner=inner.decode(), moment=moment)


def overview(moment: Moment, root: str, view: PageView, opened: Callable[[], Store]) -> bytes:
    """Return the front page: the companion's health, GPUs over time, jobs with their reasons, and nodes."""
    live = moment.live
    alive = [one for one in live.jobs if one.job.end_time is None]
    capacity = sum(node.gpus for node in live.nodes if node.usable)
    timeline, others, begin = moment.timeline, moment.others, moment.at - SPANS[view.span]
    if view.span == "all":
        with opened() as store:
            timeline = tuple(row for row in store.timeline() if moment.user in ("", row.user))
            others = tuple(store.other_gpus(0.0))
    running = [one for one in alive if one.job.running]
    return _part(
        "overview.html",
        root=root,
        live=live,
        moment=moment,
        view=view,
        health=_health(live, moment.at),
        ended=moment.ended[-(ENDED if moment.user else MOST_ENDED) :][::-1],
        waiting=[one for one in alive if not one.job.running],
        running=running,
        resizing=sum(one.job.resizing is not None for one in alive),
        training=sum(gpus(one.job) for one in running),
        held=sum(one.gpus for one in live.held),
        capacity=capacity,
        others=others[-1][1] if others else 0,
        counts=sorted(Counter(one.cause for one in alive if one.cause).items(), key=lambda item: (-item[1], item[0])),
        nodes=_nodes(live.nodes, live.held, tuple((one.job_id, moment.colour(one.job_id)) for one in live.held)),
        picture=gpus_over_time(timeline, capacity, begin, moment.at, moment.colours, view.by, others=others),
    )


@lru_cache(maxsize=64)
def _nodes(nodes: tuple[NodeRecord, ...], held: tuple[HeldRecord, ...], colours: tuple[tuple[int, str], ...]) -> Markup:
    """Return the nodes with the jobs on them. This part of the page seldom changes from tick to tick."""
    return Markup(_part("nodes.html", nodes=node_rows(nodes, held), colours=dict(colours)).decode())


@dataclass(frozen=True)
class DecisionView:
    """Reader's choices on the page of decisions."""

    before: int | None = None
    """Id of a decision: only older ones are shown. None for all."""
    changes: bool = False
    """True if only decisions that change something are shown."""

    @classmethod
    def of(cls, asked: Mapping[str, Sequence[str]]) -> DecisionView:
        """Return the choices in a query. Invalid ones are ignored."""
        before, changes = (asked.get(name, [""])[0] for name in ("before", "changes"))
        known = before.isascii() and before.isdigit() and len(before) < 16
        return cls(int(before) if known else None, changes == "1")


def decisions(moment: Moment, root: str, view: DecisionView, opened: Callable[[], Store]) -> bytes:
    """Return the page of decisions, newest first, with the allocation and the reason of each job."""
    with opened() as store:
        newest = store.recent_decisions(
            DECISIONS, most=MOST_DECIDED, user=moment.user, before=view.before, changes=view.changes
        )
        found = with_names(store, newest)
    return _part("decisions.html", root=root, decisions=found, moment=moment, view=view, DECISIONS=DECISIONS)


def job(moment: Moment, root: str, job_id: int, opened: Callable[[], Store], logs: Logs | None = None) -> bytes | None:
    """Return a job's page: reasons, sizes, throughput, training, resizes, advice; None if there is no such job."""
    with opened() as store, store.one_moment():
        one = moment.job(store, job_id)
        if one is None:
            return None
        decisions_of = decided(store, job_id, DECISIONS)
        resizes = resizes_of(store, job_id, 50)[::-1]
        history = store.histories([job_id]).get(job_id)
        used = usage(store, job_id=job_id)
        own = store.timeline(job_id=job_id)
        told = used[-1] if used else None
        tips = advised(store, used[-1:]).get(job_id, [])
        asked = store.jobs([job_id]).get(job_id)
    epochs = history.epochs if history is not None else ()
    now = one.job.end_time or moment.at
    comment = asked.comment if asked is not None else ""
    may = allowed(comment)
    changes = [(shown.resize.ended or shown.resize.started, changed(shown.resize)) for shown in resizes]
    return _part(
        "job.html",
        root=root,
        moment=moment,
        one=one,
        decided=decisions_of,
        resizes=resizes,
        usage=told,
        advice=tips,
        comment=comment,
        may=may,
        log=logs.tail(job_id, LOG_LINES, asked.work_dir) if logs is not None and asked is not None else (),
        address=logs.address(job_id, asked.work_dir) if logs is not None and asked is not None else "",
        gpus=gpus_over_time(own, 0, own[0].start, now, moment.colours) if own else "",
        scaling=scaling(told.measured, _predicted(history, told.measured, may)) if told else "",
        loss=curve(epochs, "loss", changes),
        accuracy=curve(epochs, "accuracy", changes),
    )


def _predicted(history: JobHistory | None, measured: Sequence[Measured], of: Allowed) -> dict[int, float]:
    """Return the predicted useful samples/s by number of GPUs, with the batch of the longest measurement."""
    if history is None or not history.throughput or not measured:
        return {}
    longest = max(measured, key=lambda one: one.measured_s)
    each = max(one.gpus // max(one.nodes, 1) for one in measured) or 1
    most = min(of.gpus[1] if of.gpus else 0, FARTHEST * max(one.gpus for one in measured))
    gpus = np.unique([*(2**n for n in range(max(most, 1).bit_length())), *(one.gpus for one in measured), most])
    gpus = gpus[gpus > 0]
    model = MeasuredThroughput.of(history.throughput)
    found = model.throughput(-(-gpus // each), gpus, np.full(len(gpus), longest.batch))
    useful = longest.useful / longest.samples_per_s if longest.samples_per_s else 1.0
    return {int(n): float(value) for n, value in zip(gpus, useful * found, strict=True)}


def write_usage(path: Path, title: str, totals: Sequence[str], jobs: Sequence[tuple[Usage, Sequence[str]]]) -> None:
    """Write the report as HTML: `totals`, then each job with its lines. All charts have the same scale of GPUs."""
    most = max((one.most for one, _ in jobs), default=0)
    parts = []
    for one, lines in jobs:
        begin, end = one.job.submit_time, one.job.submit_time + one.lasted_s
        gpus = gpus_over_time(_held(one), 0, begin, end, least=most) if one.stretches else ""
        sizes = scaling(one.measured) if len({size.gpus for size in one.measured}) > 1 else ""
        # What pictures and the table show needs no line.
        facts = [line for line in lines if not line.startswith(("  over time", "  measured", 13 * " "))]
        parts.append((facts, one.measured, gpus, sizes))
    write(path, "usage.html", title=title, totals=totals, jobs=parts)


def write(path: Path, template: str, **values: Any) -> None:
    """Write a page from a template to a file that needs no other files."""
    written = time.strftime("%Y-%m-%d %H:%M")
    style = files("slurm_ones.show").joinpath("static/style.css").read_text(encoding="utf-8")
    path.write_bytes(_part(template, written=written, style=style, **values))


def _held(usage: Usage) -> list[TimelineRow]:
    job = usage.job
    who = (job.job_id, job.name, job.user_name, job.partition, job.requested_gpus, 0)
    return [
        TimelineRow(*who, Shape(1, one.gpus), one.start_time, one.start_time + one.running_s) for one in usage.stretches
    ]


def _health(live: Live, now: float) -> tuple[bool, str]:
    """Return (True if the companion is healthy, a sentence about it)."""
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


def cells(gpus: int, kind: str = "", job_id: int = 0) -> Markup:
    """Return a square for each of a node's GPUs: free, or held by `job_id` in the colour of the CSS class `kind`."""
    free = '<i title="not held by an elastic job"></i>'
    one = f'<i class="held {kind}" title="job {int(job_id)}"></i>' if kind else free
    return Markup(one * min(gpus, MOST_CELLS))

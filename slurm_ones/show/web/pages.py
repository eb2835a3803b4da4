"""The pages, each as a part that changes from tick to tick and the frame around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from markupsafe import Markup

from ones_db import HeldRecord, NodeRecord, Store
from ones_db.query import Reader
from ones_db.reasons import CAUSES
from slurm_ones.show import columns
from slurm_ones.show.advice import Allowed, advice
from slurm_ones.show.columns import ShownDecision
from slurm_ones.show.live import ENDED, Live, node_rows, silent
from slurm_ones.show.usage import usage
from slurm_ones.show.web import pictures
from slurm_ones.show.web.feed import HISTORY_S, Moment
from slurm_ones.show.why import decided, resizes_of
from slurm_ones.text import clock, plain, seconds

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
    """Jinja2's environment of this room's templates, in which all text is escaped."""
    from jinja2 import Environment, PackageLoader

    made = Environment(loader=PackageLoader("slurm_ones.show.web", "templates"), autoescape=True, trim_blocks=True)
    made.filters |= {"plain": plain, "seconds": seconds, "clock": clock}
    made.globals |= {
        "text": {column.name: column.text for column in columns.JOB},
        "columns": columns,
        "colour": pictures.colour,
        "cells": pictures.cells,
        "causes": CAUSES,
        "MOST_NODES": MOST_NODES,
        "MOST_DECIDED": MOST_DECIDED,
    }
    return made


def frame(root: str, part: str, title: str, inner: bytes, moment: Moment) -> bytes:
    """A whole page around a part of it, as of the moment. `root` is the path below which all pages are."""
    template = environment().get_template("frame.html")
    text: str = template.render(root=root, part=part, title=title, inner=inner.decode(), moment=moment)
    return text.encode()


def overview(moment: Moment, root: str) -> bytes:
    """The cluster: how the companion is, why jobs wait, who held which GPUs, the nodes, the jobs."""
    live = moment.live
    alive = [live.shown(job) for job in live.jobs if job.end_time is None]
    capacity = sum(node.gpus for node in live.nodes if node.usable)
    counts: dict[str, int] = {}
    for code in live.causes.values():
        counts[code] = counts.get(code, 0) + 1
    return _part(
        "overview.html",
        root=root,
        live=live,
        problem=moment.problem,
        health=_health(live, moment.at),
        jobs=alive,
        ended=list(map(live.shown, moment.ended[-(ENDED if moment.user else MOST_ENDED) :][::-1])),
        waiting=[one for one in alive if not one.job.running],
        running=[one for one in alive if one.job.running],
        held=sum(one.gpus for one in live.held),
        capacity=capacity,
        counts=sorted(counts.items(), key=lambda item: (-item[1], item[0])),
        picture=pictures.gpus_over_time(moment.timeline, capacity, moment.at - HISTORY_S, moment.at),
        nodes=_nodes(live.nodes, live.held),
    )


@lru_cache(maxsize=64)
def _nodes(nodes: tuple[NodeRecord, ...], held: tuple[HeldRecord, ...]) -> Markup:
    """Who is on which node: at most ticks just as before, which is found faster than it is made."""
    return Markup(_part("nodes.html", nodes=node_rows(nodes, held)).decode())


def decisions(moment: Moment, root: str, opened: Callable[[], Store]) -> bytes:
    """What was decided last: what each job gets, and why."""
    names = {job.job_id: job for job in moment.live.jobs}
    with opened() as store:
        newest = store.recent_decisions(DECISIONS, most=MOST_DECIDED, user=moment.user)
    found = [(one, [ShownDecision(one, given) for given in one.jobs if given.job_id in names]) for one in newest]
    return _part("decisions.html", root=root, decisions=found, names=names, problem=moment.problem)


def job(
    moment: Moment,
    root: str,
    job_id: int,
    opened: Callable[[], Store],
    reader: Callable[[], Reader],
    allowed: Callable[[str], Allowed],
) -> bytes | None:
    """A job: why it has what it has, sizes, throughput, training, resizes, advice. None where it is not there."""
    with opened() as store, store.one_moment():
        # Of those that ended long ago the moment knows nothing.
        summary = moment.job(job_id) or next(iter(store.job_summaries([job_id])), None)
        if summary is None or moment.user not in ("", summary.user):
            return None
        record = store.jobs([job_id]).get(job_id)
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
    epochs = history.epochs if history is not None else ()
    now = summary.end_time or moment.at
    return _part(
        "job.html",
        root=root,
        problem=moment.problem,
        one=moment.live.shown(summary),
        decided=decisions_of,
        resizes=resizes,
        usage=told,
        advice=advice(told, allowed(record.comment if record else ""), summary) if told else [],
        gpus=pictures.gpus_over_time(own, max((r.shape.gpus for r in own), default=0), own[0].start, now)
        if own
        else "",
        sizes=pictures.sizes(told.measured) if told else "",
        loss=pictures.curve(epochs, "loss"),
        accuracy=pictures.curve(epochs, "accuracy"),
    )


def _health(live: Live, now: float) -> tuple[bool, str]:
    """Whether the companion is well, and a sentence on it."""
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

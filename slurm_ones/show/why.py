"""Reasons for a job's size: its decisions, its resizes with their steps, its blocks and its runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ones_db import DecisionRecord, JobSummary, RunRecord, Store
from ones_db.reasons import reason
from ones_db.rows import flat
from ones_wrapper.protocol.optin import BadComment, parse_comment
from slurm_ones import text
from slurm_ones.show.columns import DECISION, JOB, RESIZE, ShownDecision, ShownResize, record
from slurm_ones.show.live import read_live

if TYPE_CHECKING:
    from slurm_ones.learn.nodes import SlowNode

DECIDES = {column.name: column for column in DECISION}
MEMBERSHIPS = 5
"""Number of memberships shown for a job of blocks: the newest."""


def explain(store: Store, job_id: int, decisions: int) -> dict[str, Any]:
    """Return what `slurm-ones why` shows about a job, as a JSON object."""
    (one,) = read_live(store, only=[job_id]).jobs
    return {
        "job": record(JOB, one),
        "deadline": [flat(one.promise)] if one.promise else [],
        "runs": [flat(run) for run in store.runs(job_id)],
        "slow_nodes": [asdict(node) for node in _slow_nodes(store, job_id)],
        "blocks": [flat(block) for block in store.blocks(job_id)],
        "memberships": [asdict(member) for member in store.memberships(job_id, MEMBERSHIPS)],
        "decisions": [record(DECISION, one) for one in decided(store, job_id, decisions)],
        "resizes": [record(RESIZE, one) for one in resizes_of(store, job_id)],
    }


def decided(store: Store, job_id: int, most: int) -> list[ShownDecision]:
    """Return the `most` newest decisions about a job, newest first."""
    found = store.decisions(job_id, most)
    by_decision = {one.decision_id: one for one in store.resizes(job_id)}
    return [
        ShownDecision(one, given, resize=by_decision.get(one.id))
        for one in found for given in one.jobs if given.job_id == job_id
    ]  # fmt: skip


def with_names(store: Store, newest: Sequence[DecisionRecord]) -> list[tuple[DecisionRecord, list[ShownDecision]]]:
    """Return these decisions, each with its parts: the jobs' names, and the resizes that carry it out."""
    jobs = store.jobs(sorted({given.job_id for one in newest for given in one.jobs}))
    resizes = {(one.decision_id, one.job_id): one for one in store.resizes(decisions=[one.id for one in newest])}
    return [
        (
            one,
            [
                ShownDecision(one, given, jobs[given.job_id].name, resizes.get((one.id, given.job_id)))
                for given in one.jobs if given.job_id in jobs
            ],
        )
        for one in newest
    ]  # fmt: skip


def resizes_of(store: Store, job_id: int, most: int = 0) -> list[ShownResize]:
    """Return the `most` newest resizes of a job (0 for all), oldest first, each with the start that followed it."""
    found = store.resizes(job_id)[-most:]
    begun = text.starts(found, {(job_id, run.restart): run for run in store.runs(job_id)})
    return [ShownResize(one, store.resize_steps(one.id), begun.get(one.id, "")) for one in found]


def _of_blocks(store: Store, job_id: int, *, running: bool) -> Iterator[str]:
    blocks, members = store.blocks(job_id), store.memberships(job_id, MEMBERSHIPS + 1)
    if not blocks and not members:
        return
    if running:
        yield f"It {text.trains_on(members, blocks)}"
    for block in blocks:
        if block.end_time is None:
            yield f"    {text.ran(block)} since {text.clock(block.start_time)}"
    for new, old in pairwise(members):
        yield f"    {text.clock(new.time)} generation {new.report.generation}: {text.change(new, old)}"


def _slow_nodes(store: Store, job_id: int) -> list[SlowNode]:
    names = {name for run in store.runs(job_id)[-1:] if run.end_time is None for name in run.node_list}
    slow = slow_nodes_of(store, time.time()).values() if names else ()
    return sorted((node for node in slow if node.name in names), key=lambda node: node.factor)


def _deadline(store: Store, job_id: int) -> Iterator[str]:
    said = store.promises([job_id]).get(job_id)
    record = store.jobs([job_id])[job_id]
    try:
        optin = parse_comment(record.comment)
    except BadComment:
        return
    if optin is None or optin.deadline is None:
        return
    at = optin.deadline.after(record.submit_time)
    # One that was promised before the comment was changed holds no longer.
    yield text.deadline(said) if said is not None and abs(said.deadline - at) < 1.0 else text.open_deadline(at)


def plain_pace(run: RunRecord) -> str:
    """Return a text on the pace of a run whose script never called `ones.init`, if the pace is known; else "".

    Such a run reports its start only after its first step. If its ranks were started again, its pace is unknown.
    """
    took_s = (run.report_time or 0.0) - (run.hello_time or math.inf)
    if run.batch != 0 or not run.step or run.attempts or took_s <= 0:
        return ""
    pace = f"{run.step} optimizer steps on {run.shape}, {(run.step - 1) / took_s:.4g} a second"
    return f"took {pace}, and has not called ones.init: it keeps its size"


def why_lines(store: Store, summary: JobSummary, decisions: int) -> Iterator[str]:
    """Yield the lines of `slurm-ones why` about a job, in rich's markup."""
    job = summary.job_id
    each = f" ({text.per_gpu(summary)} per GPU)" if summary.local_batch is not None else ""
    yield (
        f"[bold]job {job}[/] {text.safe(summary.name)} of {text.safe(summary.user)}: {summary.state}, "
        f"{f'shape {text.shape(summary)}, ' if summary.running else ''}batch {summary.batch or 'unknown'}{each}, "
        f"epochs {text.progress(summary)}"
    )
    for line in _of_job(store, summary):
        yield f"  {line}"
    found = decided(store, job, decisions)
    for one in found:
        became = DECIDES["outcome"].text(one).strip()
        says_more = (one.given.outcome or one.resize) and became
        outcome = f" [dim]({text.safe(became, 300)})[/]" if says_more else ""
        gets = f"{DECIDES['shape'].text(one)}: " if one.given.shape else ""
        head = f"{text.clock(one.decision.time)} {one.decision.policy} ({one.decision.mode})"
        yield f"  {head}: {gets}{text.safe(str(one.given.reason), 500)}{outcome}"
        if one.given.alternatives:
            yield f"      weighed: {DECIDES['alternatives'].text(one)}"
    if not found:
        yield "  Nothing was decided for it yet."
    for resize in resizes_of(store, job):
        yield from _resize(resize)


def _of_job(store: Store, summary: JobSummary) -> Iterator[str]:
    job = summary.job_id
    if summary.refusal:
        yield f"It is left alone: {text.safe(str(summary.refusal), 500)}"
    for limit in text.described(summary.limits) if summary.limits is not None else ():
        yield f"Its strategy: {text.safe(str(limit), 500)}."
    if summary.report_note:
        yield f"Not believed of its reports: {text.safe(summary.report_note, 500)}"
    for line in _deadline(store, job):
        yield f"Its {text.safe(line, 500)}."
    for slow in _slow_nodes(store, job)[:1]:
        percent = 100 * slow.factor
        said = reason("on_slow_node", node=slow.name, percent=percent, runs=slow.runs, owners=slow.owners)
        yield f"Slow node: {text.safe(str(said), 500)}."
    for trouble in text.troubles(summary):
        yield f"[bold red]Look at it[/]: {trouble}."
    for line in _of_blocks(store, job, running=summary.running):
        yield text.safe(line, 500)
    for run in store.runs(job):
        if run.note:
            began = f", begun {text.clock(run.start_time)}" if run.start_time else ""
            yield f"Run {run.restart}{began}: {text.safe(run.note, 500)}"
        if pace := plain_pace(run):
            yield f"Run {run.restart} {pace}"
        if run.attempts:
            yield f"Run {run.restart} started its ranks {run.attempts + 1} times."


def _resize(one: ShownResize) -> Iterator[str]:
    resize, blocks = one.resize, text.planned(one.resize)
    change = text.changed(resize) + (f" ({blocks})" if blocks else "")
    yield (
        f"  {text.clock(resize.started)} resize {change}: {resize.stage}"
        + (f", {text.safe(str(resize.outcome), 300)}" if resize.outcome else "")
        + (f", training paused for {text.seconds(resize.pause_s)}" if resize.pause_s is not None else "")
    )
    for step in one.steps:
        yield f"      {step.time - resize.started:7.1f} s  {step.stage}  [dim]{text.safe(str(step.detail), 300)}[/]"
    if one.start:
        yield f"      the start after it: {one.start}"


def slow_nodes_of(store: Store, now: float) -> dict[str, SlowNode]:
    """Return the slow nodes by name, as measured by the jobs in the store: in a user's own view, by the user's jobs."""
    # Most commands need no models, and do not wait for numpy.
    from slurm_ones.learn.nodes import slow_nodes

    return slow_nodes([*store.finished_histories(), *store.histories().values()], now)

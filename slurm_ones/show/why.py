"""Why a job has what it has: its decisions with their reasons, its resizes with their steps, its blocks and runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ones_db import JobSummary, ReasonRecord, RunRecord, Store
from ones_db.reasons import reason
from slurm_ones.observe.optin import BadComment, parse_comment
from slurm_ones.show.table import as_json
from slurm_ones.show.words import change, deadline, open_deadline, pause, ran, trains_on
from slurm_ones.show.words import planned as planned_blocks
from slurm_ones.text import clock, described, per_gpu, progress, resized, safe, seconds, shape, starts, troubles

if TYPE_CHECKING:
    from slurm_ones.learn.nodes import SlowNode

MEMBERSHIPS = 5
"""Newest memberships of a job of blocks that are shown."""
_CHANGE = (
    *("old_nodes", "old_gpus_per_node", "new_nodes", "new_gpus_per_node", "old_batch", "new_batch"),
    *("old_kind", "new_kind"),
)


def explain(store: Store, summary: JobSummary, decisions: int) -> dict[str, Any]:
    """All that the database knows of why a job has the shape it has."""
    job_id = summary.job_id
    return {
        "job": as_json(summary),
        "deadline": [asdict(said) for said in store.promises([job_id]).values()],
        "runs": [asdict(run) for run in store.runs(job_id)],
        "slow_nodes": [asdict(node) for node in _slow_nodes(store, job_id)],
        "blocks": [asdict(block) for block in store.blocks(job_id)],
        "memberships": [asdict(member) for member in store.memberships(job_id, MEMBERSHIPS)],
        "decisions": [
            {
                "time": d.time,
                "policy": d.policy,
                "mode": d.mode,
                **_flattened(j),
                "alternatives": [one._asdict() for one in j.alternatives],
            }
            for d in store.decisions(job_id, decisions)
            for j in d.jobs
            if j.job_id == job_id
        ],
        "resizes": [
            {**_flattened(r), "steps": [_flattened(step) for step in store.resize_steps(r.id)]}
            for r in store.resizes(job_id)
            if r.id is not None
        ],
    }


def _flattened(record: Any) -> dict[str, Any]:
    """The record's fields; of a reason its sentence, and beside it its code and arguments, as in the database."""
    found = asdict(record)
    for name, value in vars(record).items():
        if isinstance(value, ReasonRecord):
            found |= {name: value.text, f"{name}_code": value.code, f"{name}_arguments": dict(value.arguments)}
    return found


def _allocation(decision: dict[str, Any]) -> str:
    if decision["nodes"] is None:
        return ""
    return f"{decision['nodes']}x{decision['gpus_per_node']}, batch {decision['batch']}: "


def _weighed(alternatives: list[dict[str, Any]]) -> str:
    """The sizes that were weighed, each with its worth."""
    sizes = ("{nodes}x{gpus_per_node}, batch {batch}" if one["nodes"] else "waiting" for one in alternatives)
    return "; ".join(
        f"{size.format(**one)} (worth {one['worth']:.4g})" for size, one in zip(sizes, alternatives, strict=True)
    )


def _pause(resize: dict[str, Any]) -> str:
    by_blocks = resize["mechanism"] == "blocks"
    return pause(resize["pause_s"]) if by_blocks else seconds(resize["pause_s"])


def _of_blocks(store: Store, job_id: int, *, running: bool) -> Iterator[str]:
    """What there is to say of a job of blocks, a line each; nothing of any other job."""
    blocks, members = store.blocks(job_id), store.memberships(job_id, MEMBERSHIPS + 1)
    if not blocks and not members:
        return
    if running:
        yield f"It {trains_on(members, blocks)}"
    for block in blocks:
        if block.end_time is None:
            yield f"    {ran(block)} since {clock(block.start_time)}"
    for new, old in pairwise(members):
        yield f"    {clock(new.time)} generation {new.report.generation}: {change(new, old)}"


def _slow_nodes(store: Store, job_id: int) -> list[SlowNode]:
    """The slow ones among the nodes that it runs on, the slowest first."""
    names = {name for run in store.runs(job_id)[-1:] if run.end_time is None for name in run.node_list}
    slow = slow_nodes_of(store, time.time()).values() if names else ()
    return sorted((node for node in slow if node.name in names), key=lambda node: node.factor)


def _deadline(store: Store, job_id: int) -> Iterator[str]:
    """What is said of its deadline; nothing of a job without one."""
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
    yield deadline(said) if said is not None and abs(said.deadline - at) < 1.0 else open_deadline(at)


def plain_pace(run: RunRecord) -> str:
    """How fast a run stepped whose script says nothing of its samples; empty of any other, and before it can be told.
    The hello of such a run is written at the end of its first step. Where its ranks were started again, the time of the
    first hello is known and the steps since the last."""
    if run.batch != 0 or not run.step or run.attempts or run.hello_time is None or run.report_time is None:
        return ""
    took = run.report_time - run.hello_time
    size = f"{run.nodes}x{run.gpus_per_node}"
    if took <= 0:
        return ""
    pace = f"{run.step} optimizer steps on {size}, {(run.step - 1) / took:.4g} a second"
    return f"took {pace}, and has not called ones.init: it keeps its size"


def told(store: Store, summary: JobSummary, decisions: int) -> Iterator[str]:
    """What the command prints of a job, in rich's markup, a line each."""
    job, found = summary.job_id, explain(store, summary, decisions)
    yield (
        f"[bold]job {job}[/] {safe(summary.name)} of {safe(summary.user)}: {summary.state}, "
        f"shape {shape(summary) or 'none'}, batch {summary.batch or 'unknown'} ({per_gpu(summary)} per GPU), "
        f"epochs {progress(summary)}"
    )
    if summary.refusal:
        yield f"  It is left alone: {safe(summary.refusal, 500)}"
    for limit in described(summary.limits) if summary.limits is not None else ():
        yield f"  Its strategy: {safe(str(limit), 500)}."
    if summary.report_note:
        yield f"  Not believed of its reports: {safe(summary.report_note, 500)}"
    for line in _deadline(store, job):
        yield f"  Its {safe(line, 500)}."
    for slow in found["slow_nodes"][:1]:
        node, percent, runs, owners = slow["name"], 100 * slow["factor"], slow["runs"], slow["owners"]
        said = reason("on_slow_node", node=node, percent=percent, runs=runs, owners=owners)
        yield f"  Where it is: {safe(str(said), 500)}."
    for trouble in troubles(summary):
        yield f"  [bold red]Look at it[/]: {trouble}."
    for line in _of_blocks(store, job, running=summary.running):
        yield f"  {safe(line, 500)}"
    runs = store.runs(job)
    begun = starts(store.resizes(job), {(job, run.restart): run for run in runs})
    for run in runs:
        if run.note:
            when = f" ({clock(run.hello_time)})" if run.hello_time else ""
            yield f"  Run {run.restart} said{when}: {safe(run.note, 500)}"
        if pace := plain_pace(run):
            yield f"  Run {run.restart} {pace}"
        if run.attempts:
            yield f"  Run {run.restart} started its ranks {run.attempts + 1} times."
    for d in found["decisions"]:
        outcome = f" [dim]({safe(d['outcome'], 300)})[/]" if d["outcome"] else ""
        yield f"  {clock(d['time'])} {d['policy']} ({d['mode']}): {_allocation(d)}{safe(d['reason'], 500)}{outcome}"
        if d["alternatives"]:
            yield f"      weighed: {_weighed(d['alternatives'])}"
    if not found["decisions"]:
        yield "  Nothing was decided for it yet."
    planned = {resize.id: planned_blocks(resize) for resize in store.resizes(job)}
    for r in found["resizes"]:
        blocks = f" ({planned[r['id']]})" if planned.get(r["id"]) else ""
        yield (
            f"  {clock(r['started'])} resize {resized(*(r[name] for name in _CHANGE))}{blocks}: {r['state']}"
            + (f", {safe(r['outcome'], 300)}" if r["outcome"] else "")
            + (f", training stood still for {_pause(r)}" if r["pause_s"] is not None else "")
        )
        for step in r["steps"]:
            yield (f"      {step['time'] - r['started']:7.1f} s  {step['state']}  [dim]{safe(step['detail'], 300)}[/]")
        if r["id"] in begun:
            yield f"      the start after it: {begun[r['id']]}"


def slow_nodes_of(store: Store, now: float) -> dict[str, SlowNode]:
    """The slow nodes by the jobs that the store knows: all of the site, or those of one user."""
    # Most commands need no models, and do not wait for numpy.
    from slurm_ones.learn.nodes import slow_nodes

    return slow_nodes([*store.finished_histories(), *store.histories().values()], now)

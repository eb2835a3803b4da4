"""The exact commands of a resize, for people: what advise mode prints and `why` repeats."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from ones_wrapper.protocol import Order, encode
from slurm_ones.act.orders import order_path
from slurm_ones.rules.blocks import Moves, task_of
from slurm_ones.rules.plan import PlannedChange
from slurm_ones.slurm.command import defer_command, hold_command, release_commands, requeue_command, reshape_command
from slurm_ones.slurm.model import Task
from slurm_ones.text import plain


def waiting_commands(job_id: int, defer_s: float) -> list[str]:
    """Shell lines that keep a waiting job from starting."""
    return [
        f"# it starts by itself after {defer_s:.0f} s, unless this is repeated:",
        shlex.join(defer_command(job_id, f"now+{defer_s:.0f}")),
    ]


def commands(
    change: PlannedChange, number: int, spool: Path | None, defer_s: float, *, start_now: bool = True
) -> list[str]:
    """Shell lines that carry the change out by hand, in order; comments say what to wait for."""
    job, path = change.elastic.job, order_path(change.elastic.job, spool)

    def order(drain: bool) -> str:
        text = json.dumps(json.loads(encode(Order(number, job.restart, change.new_batch, drain, change.blocks))))
        quoted = shlex.quote(str(path))
        return f"printf '%s\\n' {shlex.quote(text)} > {quoted}.new && mv {quoted}.new {quoted}"

    if not change.resizes:
        return [order(drain=False)]
    if change.moves is not None:
        return _moves(change, change.moves, order(drain=False))
    if change.parks:
        end = [*waiting_commands(job.job_id, defer_s), *map(shlex.join, release_commands(job.job_id))]
    else:
        reshape = reshape_command(job.job_id, change.new, whole_nodes=change.elastic.whole_nodes, kind=change.new_kind)
        start = "now" if start_now and not job.pending else ""
        end = [shlex.join(reshape), *map(shlex.join, release_commands(job.job_id, start=start))]
    if job.pending:
        return [shlex.join(hold_command(job.job_id)), *end]
    return [
        order(drain=True),
        # Its owner chose the name: a line break in it must not begin a command.
        f"# wait until {plain(str(path.parent))} reports the checkpoint, then within a minute:",
        shlex.join(requeue_command(job.job_id)),
        f"# wait until job {job.job_id} is PENDING and no longer COMPLETING, then:",
        *end,
    ]


def _moves(change: PlannedChange, moves: Moves, order: str) -> list[str]:
    """Blocks join and leave while the job trains."""
    job_id = change.job_id
    lines = [shlex.join(hold_command(Task(job_id, task))) for task in change.to_hold]
    if moves.added and any(job.throttle for job in change.elastic.blocks):
        lines.append(shlex.join(["scontrol", "update", f"JobId={job_id}", "ArrayTaskThrottle=0"]))
    tasks = {task_of(job): job for job in change.elastic.blocks}
    for task, shape in moves.added:
        if not tasks[task].pending:
            lines.append(shlex.join(["scontrol", "requeuehold", str(Task(job_id, task))]))
        key, whole = Task(job_id, task), change.elastic.whole_nodes
        lines.append(shlex.join(reshape_command(key, shape, whole_nodes=whole, kind=change.new_kind)))
    lines.append(order)
    for task, _ in moves.added:
        start = "" if tasks[task].pending and not tasks[task].restart else "now"
        lines += map(shlex.join, release_commands(Task(job_id, task), start=start))
    if moves.dropped:
        lines.append(
            f"# when tasks {','.join(map(str, moves.dropped))} have completed, so that they can be used again:"
        )
        lines += [shlex.join(["scontrol", "requeuehold", str(Task(job_id, task))]) for task in moves.dropped]
    return lines

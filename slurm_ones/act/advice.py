"""The exact commands of a resize, for people: what advise mode prints and `why` repeats."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from ones_wrapper.protocol import Order, encode
from slurm_ones.act.orders import order_path
from slurm_ones.act.plan import Change
from slurm_ones.slurm.command import hold_command, release_commands, requeue_command, reshape_command


def commands(change: Change, number: int, spool: Path | None, *, start_now: bool = True) -> list[str]:
    """Shell lines that carry the change out by hand, in order; comments say what to wait for."""
    job, path = change.elastic.job, order_path(change.elastic.job, spool)

    def order(drain: bool) -> str:
        text = json.dumps(json.loads(encode(Order(number, job.restart, change.new_batch, drain))))
        quoted = shlex.quote(str(path))
        return f"printf '%s\\n' {shlex.quote(text)} > {quoted}.new && mv {quoted}.new {quoted}"

    if change.old == change.new:
        return [order(drain=False)]
    whole = change.elastic.whole_nodes
    end = [
        shlex.join(reshape_command(job.job_id, change.new, whole_nodes=whole)),
        *(shlex.join(command) for command in release_commands(job.job_id, start_now=start_now and not job.pending)),
    ]
    if job.pending:
        return [shlex.join(hold_command(job.job_id)), *end]
    return [
        order(drain=True),
        f"# wait until {path.parent} reports the checkpoint, then within a minute:",
        shlex.join(requeue_command(job.job_id)),
        f"# wait until job {job.job_id} is PENDING and no longer COMPLETING, then:",
        *end,
    ]

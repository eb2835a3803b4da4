"""A job of blocks as one job of Slurm's, for tests that look at either kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.slurm.model import SlurmJob


def as_one(whole: WholeJob) -> SlurmJob:
    """The block whose state is the job's, with what all that run have."""
    nodes, comment = whole.node_list, whole.home.comment
    one = replace(whole.first, job_id=whole.job_id, restart=whole.restart, comment=comment)
    if not whole.running:
        return replace(one, start_time=whole.start_time, submit_time=whole.submit_time)
    gpus = {name: sum(b.gpus_per_node for b in whole.running_blocks if name in b.node_list) for name in nodes}
    each = gpus[nodes[0]] if len({*gpus.values()}) == 1 else 0
    held: dict[str, Any] = {"nodes": len(nodes), "gpus_per_node": each, "gpus_total": whole.gpus, "node_list": nodes}
    return replace(one, start_time=whole.start_time, end_time=whole.end_time, submit_time=whole.submit_time, **held)

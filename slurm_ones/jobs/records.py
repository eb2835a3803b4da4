"""Observed jobs, nodes and runs, as the store's records."""

from __future__ import annotations

from collections.abc import Mapping

from ones_db import JobRecord, NodeRecord, RunRecord
from ones_db.reasons import NO_REASON
from ones_db.shape import Shape
from slurm_ones.jobs.eligibility import Elastic
from slurm_ones.slurm.model import Node, kind_of
from slurm_ones.slurm.parse import usable
from slurm_ones.text import plain


def job_record(elastic: Elastic, note: str) -> JobRecord:
    """The job as it goes into the database: its user's texts printable, whatever they are read with there."""
    job = elastic.job
    return JobRecord(
        job_id=job.job_id,
        name=plain(job.name),
        user=plain(job.user),
        submit_time=job.submit_time,
        requested_shape=Shape(job.nodes, elastic.shape.gpus_per_node),
        account=plain(job.account),
        partition=plain(",".join(job.partitions)),
        comment=plain(job.comment, 1000),
        work_dir=plain(job.work_dir, 4096),
        restart=job.restart,
        elastic=not elastic.refusal,
        refusal=elastic.refusal or NO_REASON,
        state=job.state.value,
        end_time=job.end_time if job.ended else None,
        exit_code=job.exit_code if job.ended else None,
        report_note=note,
    )


def node_record(node: Node) -> NodeRecord:
    """The node as it goes into the database, where jobs that come and go are no change of it."""
    # What a reservation sets aside goes on being idle or busy.
    state = "UP" if node.usable else "RESERVED" if usable(node.state) else node.state
    return NodeRecord(node.name, state, node.usable, node.gpus, ",".join(node.partitions))


def run_record(elastic: Elastic, before: RunRecord | None = None, kinds: Mapping[str, str] | None = None) -> RunRecord:
    """The run that goes on. Of a job of blocks that is a term, of which Slurm knows no start but the first one's;
    `before` is what was recorded last. The kind of its GPUs is what it asked for, else that of its nodes by `kinds`."""
    job, shape = elastic.job, elastic.shape
    same = before if before is not None and before.restart == job.restart else None
    kind = (job.kind if job.of_one_kind and not elastic.blocks else "") or kind_of(job.node_list, kinds or {})
    if elastic.blocks and same is not None and same.kind and "," not in same.kind:
        # Others join before they train, and a term in which others lead may be read later than these.
        kind = same.kind
    start: float | None = job.start_time
    if elastic.blocks:
        first = min((block.start_time for block in elastic.blocks if block.start_time), default=start)
        known = same.start_time if same is not None else None
        start = known or (None if job.restart else first)
    return RunRecord(
        job_id=job.job_id,
        restart=job.restart,
        shape=shape,
        node_list=job.node_list,
        start_time=start,
        end_time=job.end_time if job.ended else None,
        kind=kind or None,
    )

"""Jobs as the companion sees them, for plans and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ones_db import JobHistory, JobRecord
from ones_db.reasons import Reason
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.optin import OptIn
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, WholeJob, guests_of, is_guest
from slurm_ones.slurm.model import JobState
from tests.slurm.make import job_of

NOW = 10_000.0
FULL = 4


def elastic(
    job_id: int, shape: Shape, *nodes: str, refusal: Reason | None = None, whole: bool = False, **changes: Any
) -> Elastic:
    """A job that runs on these nodes since long ago, or waits where there are none."""
    job = replace(
        job_of(shape),
        job_id=job_id,
        state=JobState.RUNNING if nodes else JobState.PENDING,
        reason="",
        held=False,
        restart=0,
        max_nodes=0,
        gpus_per_node=0 if whole else shape.gpus_per_node,
        node_list=nodes,
        start_time=1.0 if nodes else 0.0,
        time_limit_s=0.0,
    )
    return Elastic(WholeJob.of(replace(job, **changes)), OptIn((1, 16), None, None), FULL, whole, refusal)


def changed(one: Elastic, **changes: Any) -> Elastic:
    """A job of one block, of which Slurm now shows this."""
    return replace(one, job=WholeJob.of(replace(one.job.first, **changes)))


def with_guests(jobs: Mapping[int, Elastic], settings: Settings) -> dict[int, Elastic]:
    """The jobs, whose blocks in the queues that the settings name are guests."""
    queues = guests_of(settings)

    def lent(one: Elastic) -> Elastic:
        tasks = frozenset(task for job in one.job.blocks if is_guest(job, queues) for task in job.array_tasks)
        return replace(one, job=replace(one.job, guests=tasks))

    return {job_id: lent(one) for job_id, one in jobs.items()}


def history(job_id: int, **changes: Any) -> JobHistory:
    """A job that has said what it can do."""
    told = JobHistory(
        job=JobRecord(job_id, "job", "alice", 1.0, Shape(1, 1)),
        spec=Spec(32, 512, 64, 1000, 10),
        epochs=(),
        throughput=(),
        samples=0.0,
        batch=32,
        ended_runs_s=0.0,
        running_since=1.0,
        resizes=0,
        last_resize_end=None,
        epochs_since_change=0,
        first_loss=None,
    )
    return replace(told, **changes)

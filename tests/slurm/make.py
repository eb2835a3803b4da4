"""Jobs as data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ones_db.shape import Shape
from slurm_ones.slurm.model import JobState, SlurmJob

PENDING = SlurmJob(
    job_id=7,
    name="train",
    user="alice",
    uid=2001,
    account="",
    partitions=("gpu",),
    state=JobState.PENDING,
    flags=frozenset(),
    reason="JobHeldUser",
    held=True,
    admin_held=False,
    restart=1,
    requeue=True,
    nodes=1,
    max_nodes=1,
    gpus_per_node=1,
    gpus_total=0,
    tasks=1,
    task_counts=False,
    node_list=(),
    submit_time=1000.0,
    start_time=0.0,
    end_time=0.0,
    time_limit_s=3600.0,
    work_dir="/scratch",
    comment="ones: gpus=1-16",
)


def job_of(shape: Shape, **other: Any) -> SlurmJob:
    """A held job that asks for the shape; without GPUs it asks for whole nodes."""
    n = shape.nodes
    return replace(PENDING, nodes=n, max_nodes=n, tasks=n, gpus_per_node=shape.gpus_per_node, **other)

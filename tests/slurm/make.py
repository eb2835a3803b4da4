"""Jobs as data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ones_db.shape import Shape
from slurm_ones.slurm.model import JobState, SlurmJob

DATA = Path(__file__).parent / "data"
"""What Slurms of two releases printed, a record a line."""
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


def recorded_jobs(release: str) -> list[dict[str, Any]]:
    """Entries of `squeue --json`: jobs that wait, run and failed, and three records of an array."""
    return [json.loads(line) for line in (DATA / f"squeue-{release}.jsonl").read_text().splitlines()]

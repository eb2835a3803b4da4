"""Jobs of ours in a queue, and the first words of their wrappers."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ones_wrapper.protocol import Hello
from slurm_ones.slurm.model import JobState, Node, Partition, SlurmJob, Snapshot
from tests.slurm.make import PENDING

HELLO = Hello(1, 1, 1, 32, 1.0, 32, 256, 1000, 5, 0, 0, 0, "")


def job(job_id: int = 1, **changes: Any) -> SlurmJob:
    """A running elastic job of ours on one GPU."""
    values: dict[str, Any] = {
        "user": "me",
        "uid": os.geteuid(),
        "state": JobState.RUNNING,
        "reason": "None",
        "held": False,
        "restart": 0,
        "max_nodes": 0,
        "gpus_total": 1,
        "node_list": ("n1",),
        "submit_time": 100.0,
        "start_time": 110.0,
        "work_dir": "/nowhere",
        "comment": "ones: gpus=1-4",
    }
    return replace(PENDING, job_id=job_id, **(values | changes))


class Queue:
    """A client of which a tick asks one thing."""

    def __init__(self) -> None:
        self.jobs: dict[int, SlurmJob] = {}
        self.now = 1000.0
        self.nodes = {"n1": Node("n1", "MIXED", True, 4, 1, ("gpu",), False)}

    def details(self, job_ids: Collection[int]) -> dict[int, SlurmJob]:
        return {job_id: job for job_id, job in self.jobs.items() if job_id in job_ids}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.now, dict(self.jobs), self.nodes, {"gpu": Partition("gpu", True, ("n1",), 0, 0, False)})

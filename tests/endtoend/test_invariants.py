"""What the invariants of a job of blocks say, without any Slurm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ones_wrapper.files.job_io import ReportWriter
from ones_wrapper.protocol import Membership
from tests.endtoend.fault_site import JobExpectation
from tests.endtoend.harness import BlockTask
from tests.endtoend.invariants import check_blocks

RUNS = BlockTask("RUNNING", "None", 1, 1, "n1")


@pytest.mark.parametrize(
    ("pids", "found"),
    [
        ({0: [10], 1: []}, []),
        ({0: [10], 1: [11]}, ["job 7: (0,) train, [0, 1] run"]),
    ],
)
def test_a_task_that_only_slurm_believes_to_run_is_no_fault(
    tmp_path: Path, pids: dict[int, list[int]], found: list[str]
) -> None:
    """Protects from faults of Slurm's own: a killed slurmctld forgets that a task has ended. A block that does run and
    trains by itself is found."""
    seen = Membership(1, (0,), (0,), 1, 1, 1, 0, 16, 0.01, 0, 0.0, 0.0, None, "first")
    ReportWriter(tmp_path, 0).send(seen)
    site: Any = SimpleNamespace(
        directory=lambda job_id: tmp_path, tasks=lambda job_id: {0: RUNS, 1: RUNS}, pids=lambda job_id, task: pids[task]
    )
    running = SimpleNamespace(value="RUNNING")
    job: Any = SimpleNamespace(job_id=7, state=running, restart=0, running=True)
    store: Any = SimpleNamespace(
        jobs=lambda ids: {7: SimpleNamespace(state="RUNNING", restart=0)},
        runs=lambda job_id: [],
        memberships=lambda job_id, count: [SimpleNamespace(report=seen)],
    )
    assert check_blocks(site, job, JobExpectation("elastic", "alice", blocks=True), store) == found

"""What a resize is told of a job's reports."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from ones_wrapper.protocol import Checkpoint
from slurm_ones.jobs.observer import DrainReports

NOW = 1000.0


def drained(last: int, *, stands: bool = True, reported: bool = True) -> float | None:
    """The answer where the checkpoint is the third report of the run, and its last has the number `last`."""
    found = (3, NOW - 5, Checkpoint("step-1", 0, 0, 1, 0, 0.0, order=7)) if reported else None
    store = SimpleNamespace(
        checkpoint_for_order=lambda job, restart, order: found,
        report_positions=lambda jobs: {(1, 0): (100, last)},
    )
    observer = SimpleNamespace(collect=lambda jobs, now: None, checkpoint_stands=lambda job, name: stands)
    job = SimpleNamespace(job_id=1, work_dir=str(Path("/")), uid=os.geteuid())
    return DrainReports(observer, store, lambda: NOW).drained(job, 0, 7)  # type: ignore[arg-type]


def test_a_job_that_says_more_after_its_checkpoint_trains_on() -> None:
    """It waits for its requeue in silence; so no clock need tell when its minute is over."""
    assert drained(3) == NOW - 5
    assert drained(4) is None
    assert drained(3, stands=False) is None
    assert drained(3, reported=False) is None

"""What goes wrong in a job or its submission is said in words, and loses nothing."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from ones_wrapper.protocol import CHECKPOINTS, Bye, Checkpoint, Hello
from slurm_ones.act.transitions import State
from tests.endtoend.harness import Harness

pytestmark = pytest.mark.cluster


@pytest.mark.nightly
def test_a_job_directory_that_goes_missing(harness: Harness) -> None:
    """A running job whose directory is gone is left alone, and `why` says so."""
    job_id = harness.light()
    harness.trains(job_id)
    settings = harness.settings()
    harness.cluster.run(["slurm-ones", "run", "--config", settings, "--own", "--ticks", "2"])
    shutil.rmtree(harness.directory(job_id))
    process = harness.scripted(settings, {job_id: [[1, 2, 32]]})
    harness.resize_ended(settings, job_id)
    process.terminate()
    resize = harness.why(settings, job_id)["resizes"][0]
    assert resize["state"] == State.ABANDONED and "no such directory" in resize["outcome"]
    job = harness.job(job_id)
    assert job.running and job.restart == 0 and not job.held


@pytest.mark.nightly
def test_a_checkpoint_cut_short(harness: Harness) -> None:
    """The one before it is used, and people are told: in the reports, in the log, and by `why`."""
    job_id = harness.submit()
    harness.trains(job_id)
    checkpoints = harness.directory(job_id) / CHECKPOINTS
    for count in (1, 2):
        harness.cluster.run(["scancel", "--signal=USR1", str(job_id)])
        harness.report(
            job_id,
            0,
            lambda report, count=count: (
                isinstance(report, Checkpoint)  # type: ignore[misc]
                and len(list(checkpoints.glob("step-*"))) >= count
            ),
            f"checkpoint {count}",
        )
        time.sleep(2.2)  # a signal this soon after a checkpoint counts as the same
    harness.cluster.run(["scontrol", "requeuehold", str(job_id)])
    harness.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
    # The requeue's own signal may have made a third.
    older, newer = sorted(checkpoints.glob("step-*"))[-2:]
    part = max(newer.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with part.open("rb+") as file:
        file.truncate(part.stat().st_size // 2)
    harness.cluster.run(["scontrol", "release", str(job_id)])
    hello = harness.report(job_id, 1, lambda report: isinstance(report, Hello), "hello")
    assert isinstance(hello, Hello)
    assert hello.checkpoint == older.name and f"checkpoint {newer.name} is damaged" in hello.note
    assert "is damaged" in harness.log(job_id)
    settings = harness.settings()
    harness.cluster.run(["slurm-ones", "run", "--config", settings, "--own", "--ticks", "2"])
    assert f"checkpoint {newer.name} is damaged" in json.dumps(harness.why(settings, job_id))
    spoken = harness.cluster.run(["slurm-ones", "why", str(job_id), "--config", settings]).stdout
    assert f"checkpoint {newer.name} is damaged" in spoken
    assert not [report for report in harness.reports(job_id, 1) if isinstance(report, Bye)]

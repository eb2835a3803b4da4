"""What goes wrong in a job or its submission is said in words, and loses nothing."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from ones_wrapper.protocol import CHECKPOINTS, Bye, Checkpoint, Hello
from slurm_ones.act.transitions import State
from slurm_ones.slurm.model import JobState
from tests.endtoend.harness import FOR_EVER, TRAIN, Harness

pytestmark = pytest.mark.cluster


@pytest.mark.nightly
def test_what_cannot_be_resized_says_why(harness: Harness) -> None:
    """Unreadable comments, --no-requeue, task counts, GPUs per job, interactive: each has its sentence in `why`."""
    gpu, gpus = "--gres=gpu:1", "--comment=ones: gpus=1-4"
    cases = [
        ((gpu, "--requeue", "--comment=ones: gpu=1-4"), "'gpu=1-4'"),
        ((gpu, "--requeue", "--comment=ones: gpus=4-1"), "'gpus=4-1'"),
        ((gpu, "--no-requeue", gpus), "without --requeue"),
        ((gpu, "--requeue", "--ntasks=2", gpus), "task counts"),
        (("--gpus=1", "--requeue", gpus), "GPUs per job"),
        ((gpu, "--requeue", "--array=1", gpus), "job array"),
        (("--partition=whole", "--requeue", "--comment=ones: nodes=1-4"), "whole_node_gpus.whole"),
    ]
    reasons = {harness.rigid(*options, user="alice"): words for options, words in cases}
    for job_id in reasons:
        harness.wait(job_id, lambda job: job.running, "running")
    settings = harness.settings()
    harness.cluster.run(["slurm-ones", "run", "--config", settings, "--act", "--ticks", "2"])
    listed = json.loads(harness.cluster.run(["slurm-ones", "jobs", "--config", settings, "--json"]).stdout)
    told = {job["job_id"]: job for job in listed}
    for job_id, words in reasons.items():
        assert words in told[job_id]["refusal"], told[job_id]
        assert not told[job_id]["elastic"] and not told[job_id]["resizing"]
        assert harness.job(job_id).running and harness.job(job_id).restart == 0
    for job_id in list(reasons)[:4]:
        spoken = harness.cluster.run(["slurm-ones", "why", str(job_id), "--config", settings]).stdout
        assert reasons[job_id] in spoken


@pytest.mark.nightly
def test_a_script_that_fails_at_once(harness: Harness) -> None:
    """Its exit code passes through, Slurm sees it fail, and nobody requeues it, a companion least of all."""
    folder = harness.folder("failing")
    (folder / "fail.py").write_text("import sys\nsys.exit(7)\n")
    failing = harness.submit(f"/scratch/{folder.name}/fail.py")
    unwritable = harness.submit("/scratch/none.py")
    settings = harness.settings()
    with harness.running(settings, "--act", "--own"):
        job = harness.wait(failing, lambda job: job.ended and not job.completing, "ended")
        harness.wait(unwritable, lambda job: job.ended and not job.completing, "ended")
        harness.ticks(settings)
    assert (job.state, job.exit_code, job.restart) == (JobState.FAILED, 7, 0)
    assert "there is no such file" in harness.log(unwritable)
    assert harness.job(unwritable).exit_code == 2
    with harness.store(settings) as store:
        record = store.jobs([failing])[failing]
        assert (record.state, record.exit_code, record.restart) == ("FAILED", 7, 0)
        assert not store.resizes()


@pytest.mark.nightly
def test_a_job_directory_that_cannot_be_used(harness: Harness) -> None:
    """Not writable or another's: the job fails at once with a message, before a GPU is used."""
    home = harness.cluster.home("alice")
    folder = harness.folder("directories")
    (folder / "bobs").mkdir()
    script = folder / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --gres=gpu:1 --requeue --output=%x-%j.out --job-name=bad\n"
        f"exec ones-run {TRAIN} {' '.join(FOR_EVER)}\n"
    )
    paths = {"/etc/none": "cannot be made", f"/scratch/{folder.name}/bobs": "belongs to user 0", "/no/such": "parent"}
    jobs = {}
    for path, words in paths.items():
        command = ["sbatch", "--parsable", f"/scratch/{folder.name}/job.sh"]
        jobs[int(harness.cluster.run(command, env={"ONES_JOB_DIR": path}).stdout)] = words
    for job_id, words in jobs.items():
        job = harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
        assert (job.state, job.exit_code, job.restart) == (JobState.FAILED, 2, 0)
        assert words in harness.log(job_id) and "job directory" in harness.log(job_id)
    assert home.exists()


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

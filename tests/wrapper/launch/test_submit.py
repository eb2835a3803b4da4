"""A function as a job: what sbatch is given, what a rank does with it, and how its result comes back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import ones_wrapper
from ones_wrapper.launch import submit

SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > {asked}
for last in "$@"; do :; done
test "{refuses}" && echo "sbatch: error: Invalid partition" >&2 && exit 1
echo "7;here"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that stand for Slurm's: nothing is in the queue."""
    for name, text in (("sbatch", SBATCH), ("squeue", "#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")):
        path = tmp_path / name
        path.write_text(text.format(asked=tmp_path / "asked", refuses=""))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_is_submitted_and_returns(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comment, options in place of ours, closures, the ranks that keep nothing, and who may read it."""
    factor = 3
    job = ones_wrapper.submit(lambda x, y: factor * x + y, 2, y=1, gpus="2-8", batch="32-256", options={"time": "9"})
    asked = (slurm / "asked").read_text().splitlines()
    assert job.job_id == 7 and {"--gres=gpu:2", "--nodes=1", "--time=9"} < set(asked)
    text = (job.folder / submit.SCRIPT).read_text()
    assert "#SBATCH --comment='ones: gpus=2-8 batch=32-256'\n" in text and job.folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(sys, "argv", ["submit", str(job.folder)])
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    for rank, there in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        submit.main()
        assert (job.folder / submit.RESULT).exists() is there
    assert synced == [(job.folder / submit.RESULT).stat().st_size], "a node without power would leave it empty"
    assert job.result() == 7


def test_a_job_in_the_queue_is_waited_for(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that narrow `squeue` would hide the job."""
    (slurm / "squeue").write_text('#!/bin/sh\ntest -n "$SQUEUE_PARTITION" || echo 7\n')
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setattr(submit, "LATE_S", 0.0)
    monkeypatch.setattr(submit, "LOOK_S", 0.01)
    with pytest.raises(TimeoutError, match="job 7 has not ended"):
        ones_wrapper.submit(print, gpus="1").result(timeout_s=0.5)


def test_what_goes_wrong_is_said(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that is none before anything is written; sbatch's words; a job that ended without a result."""
    with pytest.raises(ValueError, match="gpus=8-2"):
        ones_wrapper.submit(print, gpus="8-2")
    assert not (slurm / "ones-submitted").exists()
    monkeypatch.setattr(submit, "LATE_S", 0.0)
    monkeypatch.setattr(submit, "LOOK_S", 0.01)
    with pytest.raises(RuntimeError, match="job 7 ended without a result; its log is in"):
        ones_wrapper.submit(print, gpus="1").result()
    (slurm / "sbatch").write_text(SBATCH.format(asked=slurm / "asked", refuses="1"))
    with pytest.raises(RuntimeError, match="sbatch refuses it: sbatch: error: Invalid partition"):
        ones_wrapper.submit(print, gpus="1")

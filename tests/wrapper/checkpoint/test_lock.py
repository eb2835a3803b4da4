"""One job at a time in a directory."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from ones_wrapper.checkpoint import Checkpoints
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files import job_lock as lock
from ones_wrapper.group import Group, RankError
from tests.marks import nightly
from tests.wrapper.checkpoint.test_checkpoints import group, state
from tests.wrapper.checkpoint_ranks import make, start

__all__ = ["group"]


def holding(group: Group, job: Path, job_id: int) -> None:
    box = Checkpoints(job, group, job_id, 0)
    box.save(make("plain", group, seed=1), TrainingProgress(step=1))
    (job / "checkpoints" / ".tmp-step-000000002").mkdir()
    (job / "there").touch()
    time.sleep(120)


@pytest.mark.parametrize("job_id", [7, nightly(0)])
def test_second_job_in_a_directory_is_refused(
    tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch, job_id: int
) -> None:
    """Protects a job's checkpoints from another job that was started in its directory; not from its own next run."""
    monkeypatch.setattr(lock, "WAIT_S", 0.3)
    (process,) = start(holding, (tmp_path, job_id), 1, tmp_path / "store")
    try:
        while not (tmp_path / "there").exists():
            assert process.is_alive()
            time.sleep(0.05)
        other = 8 if job_id else 0
        with pytest.raises(
            RankError, match=rf"job {job_id} is running in .* \(process {process.pid} on .*ONES_JOB_DIR"
        ):
            Checkpoints(tmp_path, group, other, 0)
        assert (tmp_path / "checkpoints" / ".tmp-step-000000002").exists()
        if job_id:
            Checkpoints(tmp_path, group, job_id, 1)  # its own run before may hang on a node that is gone
    finally:
        process.kill()
    box = Checkpoints(tmp_path, group, 8, 0)
    assert box._folder.names() == ["step-000000001"]
    box.close()


def test_no_locks_no_alarm(tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects jobs on file systems that have no locks: they run as before."""

    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", none)
    box = Checkpoints(tmp_path, group, 7, 0)
    box.save(state(), TrainingProgress(step=1))
    assert box.load(state()).name == "step-000000001"

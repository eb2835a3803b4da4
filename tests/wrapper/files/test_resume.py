"""A later job goes on from an earlier one: with its checkpoints in a directory of its own, or in the earlier one's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.checkpoint import Checkpoints
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files import checksums
from ones_wrapper.files.job_lock import LOCK
from ones_wrapper.files.resume import prepare_job_directory
from ones_wrapper.group import Group
from ones_wrapper.launch import LaunchError
from ones_wrapper.protocol import CHECKPOINTS, encode_pointer
from tests.wrapper.checkpoint.test_checkpoints import group, state

__all__ = ["group"]

ENV = {"SLURM_JOB_ID": "8"}


@pytest.fixture
def earlier(tmp_path: Path, group: Group) -> Path:
    """The directory of job 7, which has ended after two checkpoints."""
    folder = tmp_path / "ones-7"
    folder.mkdir()
    box = Checkpoints(folder, group, 7, 0)
    for step in (1, 2):
        box.save(state(float(step)), TrainingProgress(step=step, batch=64, noise=3.0))
    box.close()
    (folder / "reports-0.jsonl").write_text("{}\n")
    (folder / "orders.json").write_text("{}\n")
    (folder / ".memory.json").write_text("{}\n")
    return folder


def begin(path: Path, resume_from: str = "", **env: str) -> Path:
    prepare_job_directory(path, {**ENV, "SLURM_SUBMIT_DIR": str(path.parent), **env}, path.parent, resume_from)
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_job_begins_where_another_one_stopped(tmp_path: Path, earlier: Path, group: Group) -> None:
    """By id or directory; progress and batch go on, people are told, and the earlier job's files stay as they are."""
    before = content(earlier)
    for source, directory in (("7", "ones-8"), ("7_0", "other"), (str(earlier), "third")):
        own = begin(tmp_path / directory, source)
        loaded = state()
        box = Checkpoints(own, group, 8, 0)
        found = box.load(loaded)
        assert (found.name, found.progress.step, found.progress.batch) == ("step-000000002", 2, 64)
        assert found.note == "going on from checkpoint step-000000002 of job 7"
        assert loaded.model.bias.item() == 2.0  # type: ignore[union-attr, operator]
        assert (own / ".memory.json").exists() and not (own / "reports-0.jsonl").exists()
        box.save(loaded, TrainingProgress(step=3))
        begin(own, source)  # a requeue of the job: it has gone on
        assert box.load(state()).name == "step-000000003"
        box.close()
        assert not list(own.glob(".resumed-*"))
    assert content(earlier) == before


def test_it_may_be_elsewhere(tmp_path: Path, earlier: Path) -> None:
    """Its pointer leads there."""
    (tmp_path / "new").mkdir()
    with pytest.raises(LaunchError, match=r"ones-7 is not in .*/new; name the directory itself"):
        begin(tmp_path / "new/ones-8", "7")
    (tmp_path / "new/ones-7.where").write_bytes(encode_pointer(str(earlier)))
    own = begin(tmp_path / "new/ones-8", "7")
    assert sorted(path.name for path in (own / CHECKPOINTS).iterdir()) == ["step-000000001", "step-000000002"]


def test_where_files_cannot_be_linked_they_are_copied(
    tmp_path: Path, earlier: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    own = begin(tmp_path / "ones-8", "7")
    assert Checkpoints(own, group, 8, 0).load(state()).name == "step-000000002"


def test_a_file_system_that_does_not_answer_is_no_damage(
    tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends with the file's name, and begins with no older checkpoint."""
    real = os.open

    def stale(path: Any, *how: Any, **others: Any) -> int:
        if str(path).endswith("step-000000002/rest.pt"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *how, **others)

    monkeypatch.setattr(checksums, "_AGAIN_S", 0.0)
    monkeypatch.setattr(os, "open", stale)
    with pytest.raises(LaunchError, match=r"Stale file handle.*rest.pt"):
        begin(tmp_path / "ones-8", "7")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one before it is taken; and without a good one nothing starts from scratch unasked."""
    files = [next((earlier / CHECKPOINTS / f"step-00000000{step}").glob("*.safetensors")) for step in (1, 2)]
    os.truncate(files[1], 10)
    own = begin(tmp_path / "ones-8", "7")
    assert [path.name for path in (own / CHECKPOINTS).iterdir()] == ["step-000000001"]
    assert "step-000000002 is damaged" in capsys.readouterr().err
    os.truncate(files[0], 10)
    with pytest.raises(LaunchError, match="there is no good checkpoint in"):
        begin(tmp_path / "ones-9", "7", SLURM_JOB_ID="9")


def test_what_is_no_earlier_job(tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence each, before a GPU is used."""
    with pytest.raises(LaunchError, match="no such directory"):
        begin(tmp_path / "ones-8", "nowhere")
    (tmp_path / "ones-6").mkdir()
    with pytest.raises(LaunchError, match="no good checkpoint"):
        begin(tmp_path / "ones-8", "6")
    if os.geteuid() == 0:
        os.chown(tmp_path / "ones-6", 12345, -1)
        with pytest.raises(LaunchError, match="belongs to user 12345"):
            begin(tmp_path / "ones-8", "6")
    begin(tmp_path / "ones-8", "7")
    with pytest.raises(LaunchError, match="has checkpoints of another job"):
        begin(tmp_path / "ones-8", "6", SLURM_JOB_ID="9")


HOLD = (
    "import sys, time; from pathlib import Path; from ones_wrapper.files.job_lock import lock_directory\n"
    "handle = lock_directory(Path(sys.argv[1]), 7); print('held', flush=True); time.sleep(60)"
)


def test_a_job_that_still_runs(tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is its training done twice, nor its directory shared."""
    monkeypatch.setattr("ones_wrapper.files.resume.WAIT_S", 0.1)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(earlier)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(LaunchError, match=r"job 7 \(process .*still runs"):
            begin(tmp_path / "ones-8", "7")
        with pytest.raises(LaunchError, match=r"job 7 \(process .*two jobs cannot share it"):
            begin(earlier)
    finally:
        process.kill()
        process.wait()
    assert (earlier / "reports-0.jsonl").exists()
    begin(tmp_path / "ones-8", "7")


def test_a_later_job_in_the_same_directory(earlier: Path, group: Group) -> None:
    """An old drain is not for it, and the companion counts its reports from one."""
    (earlier / "hot").mkdir()
    sweep = ["fusion.json", "left", "result.json", "taken.json"]
    for name in sweep:
        (earlier / name).write_text("{}")
    for _ in range(2):  # a requeue of it finds all as it left it
        begin(earlier)
        assert not (earlier / "orders.json").exists() and not (earlier / "hot").exists()
    moved = {path.name for path in (earlier / "earlier-7").iterdir()}
    assert moved == {"hot", "orders.json", "reports-0.jsonl", *sweep}
    (earlier / "reports-0.jsonl").write_text("mine\n")
    begin(earlier)
    assert (earlier / "reports-0.jsonl").read_text() == "mine\n"
    begin(earlier, SLURM_JOB_ID="9")
    assert (earlier / "earlier-8/reports-0.jsonl").read_text() == "mine\n"
    assert Checkpoints(earlier, group, 9, 0).load(state()).note == "going on from checkpoint step-000000002 of job 7"
    assert json.loads((earlier / ".job").read_text()) == 9


def test_the_first_start_under_a_newer_wrapper(tmp_path: Path, earlier: Path) -> None:
    """A job that was requeued while the wrapper was upgraded keeps its reports."""
    (earlier / LOCK).unlink()
    begin(earlier, SLURM_JOB_ID="7")
    assert (earlier / "reports-0.jsonl").exists() and (earlier / ".job").read_text() == "7\n"

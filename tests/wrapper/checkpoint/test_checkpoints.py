"""Checkpoints: whole or not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from ones_wrapper.api import join
from ones_wrapper.checkpoint import Checkpoints, Saved, SavedState, checkpoints, folder
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.devices import streams
from ones_wrapper.files import checksums
from ones_wrapper.group import Group, RankError, TorchGroup


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """A process group of this process alone."""
    group = join()
    yield group
    group.close()


def state(value: float = 0.0, width: int = 3, adam: bool = True) -> SavedState:
    model = torch.nn.Linear(width, 1)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.constant_(model.bias, value)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if not adam:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    return SavedState(model, {"": optimizer}, {"scheduler": scheduler})


def step(at: SavedState) -> None:
    at.optimizers[""].zero_grad()
    at.model(torch.ones(1, at.model.in_features)).sum().backward()  # type: ignore[operator]
    at.optimizers[""].step()
    at.extras["scheduler"].step()  # type: ignore[attr-defined]


def test_two_are_kept_and_leftovers_go(tmp_path: Path, group: Group) -> None:
    """Protects the disk, and the checkpoint before the newest."""
    left = tmp_path / "checkpoints" / ".tmp-step-000000009"
    left.mkdir(parents=True)
    box = Checkpoints(tmp_path, group, 7, 0)
    assert not left.exists()
    for number in (3, 20, 100, 100):  # the last twice: before and after the end of an epoch
        box.save(state(number), TrainingProgress(step=number, epoch=number))
    box.close()
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000000020", "step-000000100"]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("harm", ["short", "changed", "missing", "manifest", "no manifest", "outside"])
def test_damaged_newest_is_passed_over(
    tmp_path: Path, group: Group, harm: str, ahead: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Protects from a checkpoint that was cut short: the one before it is used, and it is said."""
    box = Checkpoints(tmp_path, group, 7, 0)
    box.save(state(1.0), TrainingProgress(step=1))
    newest = tmp_path / "checkpoints" / box.save(state(2.0), TrainingProgress(step=2)).name
    data = next(newest.glob("tensors-*"))
    content = bytearray(data.read_bytes())
    if harm == "short":
        data.write_bytes(content[:-10])
    elif harm == "changed":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif harm == "missing":
        data.unlink()
    elif harm == "manifest":
        (newest / "manifest.json").write_text('{"files": [')
    elif harm == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        manifest = json.loads((newest / "manifest.json").read_text())
        manifest["files"]["../../../etc/passwd"] = [1, 1]
        (newest / "manifest.json").write_text(json.dumps(manifest))
    if ahead:
        box.check_ahead()
    loaded = state()
    found = box.load(loaded)
    assert found.name == "step-000000001"
    assert loaded.model.weight[0, 0].item() == 1.0  # type: ignore[index, union-attr, operator]
    assert "step-000000002 is damaged" in found.note
    assert found.note in capsys.readouterr().err
    # What is newer than all to come must not push good ones out.
    box.save(state(), TrainingProgress(step=2))
    assert box.load(state()).name == "step-000000002"


def test_a_checkpoint_is_checked_once(tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of its loading, while the script makes its model; at its loading if it came later, or is loaded again."""
    looked: list[tuple[str, bool]] = []

    def damage(path: Path, part: int, parts: int) -> str:
        looked.append((path.name, threading.current_thread() is threading.main_thread()))
        return checksums.damage(path, part, parts)

    monkeypatch.setattr(folder, "damage", damage)
    box = Checkpoints(tmp_path, group, 7, 0)
    box.check_ahead()
    box.save(state(), TrainingProgress(step=1))
    assert box.load(state()).name == "step-000000001"
    box.check_ahead()
    for _ in range(2):
        box.load(state())
    box.check_ahead()
    box.save(state(), TrainingProgress(step=2))
    assert box.load(state()).name == "step-000000002"
    one, two = "step-000000001", "step-000000002"
    assert [it for it in looked if it[1]] == [(one, True), (one, True), (two, True)]
    assert [it for it in looked if not it[1]] == [(one, False), (one, False)]


def test_averages_on_a_gpu_are_copied_on_the_rescues_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a rescue of a model with an average: on the default stream its copy would wait for lost ranks for ever.
    The device is emulated."""
    taken: list[tuple[str, str]] = []

    def name(device: torch.device | None = None) -> str:
        return threading.current_thread().name.partition("_")[0]

    monkeypatch.setattr(torch.cuda, "current_stream", name)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: taken.append((name(), stream)))
    group = Group(rank=0, world=1, local_rank=0, nodes=1, gpus_per_node=1, device=torch.device("cuda", 1))
    Checkpoints(tmp_path, group, 7, 0).save(state(), TrainingProgress(step=1))
    assert taken == [("ones-rest", "MainThread")]


def test_all_that_are_damaged_at_once_stay_for_people(tmp_path: Path, group: Group) -> None:
    """Protects the last copies of the work, though there is a way on, and people hear of it: what one start hid, it
    does not remove; the next start may."""
    box = Checkpoints(tmp_path, group, 7, 0)
    for number in (1, 2):
        box.save(state(), TrainingProgress(step=number))
        (tmp_path / "checkpoints" / f"step-{number:09d}" / "rest.pt").write_bytes(b"")
    found = box.load(state())
    assert (found.name, found.progress) == ("", TrainingProgress()) and "rest.pt" in found.note
    hidden = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert hidden == {".damaged-step-000000001", ".damaged-step-000000002"}
    box.save(state(), TrainingProgress(step=3))
    (tmp_path / "checkpoints" / "step-000000003" / "rest.pt").write_bytes(b"")
    box.close()
    Checkpoints(tmp_path, group, 7, 1).load(state())
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {".damaged-step-000000003"}


@pytest.mark.parametrize("times", [2, 99])
def test_a_file_system_that_does_not_answer_damages_nothing(
    tmp_path: Path, group: Group, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects all work from a server that fails over: its checkpoints would be hidden, and training begin anew."""
    box, real, failed = Checkpoints(tmp_path, group, 7, 0), os.open, list[str]()
    for number in (1, 2):
        box.save(state(), TrainingProgress(step=number))

    def stale(path: Any, flags: int, *mode: int, **others: Any) -> int:
        if str(path).endswith(".safetensors") and len(failed) < times:
            failed.append(str(path))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, flags, *mode, **others)

    monkeypatch.setattr(checksums, "_AGAIN_S", 0.0)
    monkeypatch.setattr(os, "open", stale)
    if times == 2:
        assert box.load(state()).name == "step-000000002"
    else:
        with pytest.raises(RankError, match=r"Stale file handle.*step-000000002/tensors"):
            box.load(state())
    assert len([*(tmp_path / "checkpoints").glob("step-*")]) == 2


def test_failed_save_leaves_the_older(tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from a disk that is full or fails at the last moment."""
    box = Checkpoints(tmp_path, group, 7, 0)
    box.save(state(1.0), TrainingProgress(step=1))

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ones_wrapper.checkpoint.folder.sync", full)
    with pytest.raises(RankError, match="No space left"):
        box.save(state(2.0), TrainingProgress(step=2))
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]
    assert box.load(state()).name == "step-000000001"


def test_directory_named_for_another_job_goes_on_and_says_so(tmp_path: Path, group: Group) -> None:
    """Protects a long training that a new job continues (ONES_JOB_DIR): it goes on, never silently."""
    Checkpoints(tmp_path, group, 7, 0).save(state(1.0), TrainingProgress(step=1))
    found = Checkpoints(tmp_path, group, 8, 0).load(state())
    assert (found.name, found.note) == ("step-000000001", "going on from checkpoint step-000000001 of job 7")


def test_checkpoint_strayed_into_a_jobs_own_directory_is_refused(tmp_path: Path, group: Group) -> None:
    """Protects from another job's parameters where nobody named the directory: it says what to do."""
    own = tmp_path / "ones-8"
    own.mkdir()
    Checkpoints(own, group, 7, 0).save(state(1.0), TrainingProgress(step=1))
    loaded = state(3.0)
    with pytest.raises(RankError, match=r"is of job 7, but ones-8 is the directory of job 8. Move .* away"):
        Checkpoints(own, group, 8, 0).load(loaded)
    assert loaded.model.bias.item() == 3.0  # type: ignore[union-attr, operator]


def test_another_format_is_an_error(tmp_path: Path, group: Group) -> None:
    """Protects work written by another version: not taken for damage, and not passed over."""
    box = Checkpoints(tmp_path, group, 7, 0)
    manifest = tmp_path / "checkpoints" / box.save(state(), TrainingProgress(step=1)).name / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 1'))
    with pytest.raises(RankError, match="has format 1"):
        box.load(state())


def test_another_optimizer_is_named(tmp_path: Path, group: Group) -> None:
    """Protects the optimizer's state: one that keeps other quantities is no silent start of them from nothing."""
    box = Checkpoints(tmp_path, group, 7, 0)
    saved = state()
    step(saved)
    box.save(saved, TrainingProgress(step=1))
    with pytest.raises(RankError, match=r"optimizer\.state\.weight\.exp_avg is in the checkpoint and not here"):
        box.load(state(adam=False))


class NoThreads(TorchGroup):
    """As MPI without MPI_THREAD_MULTIPLE."""

    def duplicate(self) -> Any:
        return None


def test_without_threads_it_is_written_at_once(tmp_path: Path, group: Group) -> None:
    """Protects checkpoints under an MPI that takes one thread: slower, but there."""
    assert isinstance(group, TorchGroup)
    alone = NoThreads(**{field.name: getattr(group, field.name) for field in fields(TorchGroup)})
    box = Checkpoints(tmp_path, alone, 7, 0)
    box.begin(state(1.0), TrainingProgress(step=1))
    end = box.ended()
    assert isinstance(end, Saved) and end.stall_s == end.seconds
    assert box.load(state()).name == end.name


def test_the_device_is_waited_for_last(tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects what a thread writes of a GPU: a moving average is cloned on the training's stream, and read on another
    one, before the next step changes it."""
    happened: list[str] = []
    monkeypatch.setattr(checkpoints, "tree_map_only", lambda kind, clone, rest: happened.append("cloned") or rest)
    monkeypatch.setattr(streams, "wait", lambda device: happened.append("waited"))
    box = Checkpoints(tmp_path, group, 7, 0)
    box.begin(state(1.0), TrainingProgress(step=1))
    box.close()
    assert happened == ["cloned", "waited"]


def test_one_under_way_is_waited_for_and_buffers_are_reused(tmp_path: Path, group: Group) -> None:
    """Protects the copy: the next checkpoint does not overwrite one that is still being written."""
    box = Checkpoints(tmp_path, group, 7, 0, keep=5)
    at = state(0.0, width=200_000)
    for number in range(1, 5):
        torch.nn.init.constant_(at.model.weight, number)  # type: ignore[arg-type]
        box.begin(at, TrainingProgress(step=number))
    torch.nn.init.constant_(at.model.weight, -1)  # type: ignore[arg-type]
    box.close()
    folder = tmp_path / "checkpoints"
    for number in (4, 3, 2, 1):
        loaded = state(width=200_000)
        assert box.load(loaded).progress.step == number
        assert bool((loaded.model.weight == number).all())  # type: ignore[union-attr, operator]
        shutil.rmtree(folder / f"step-{number:09d}")


def test_killed_between_the_renames_the_old_one_comes_back(tmp_path: Path, group: Group) -> None:
    """Protects the only checkpoint while its step is saved once more."""
    name = Checkpoints(tmp_path, group, 7, 0).save(state(1.0), TrainingProgress(step=1)).name
    folder = tmp_path / "checkpoints"
    (folder / name).rename(folder / f".old-{name}")
    assert Checkpoints(tmp_path, group, 7, 1).load(state()).name == name


def test_a_rescue_keeps_as_many_checkpoints_as_the_job(tmp_path: Path, group: Group) -> None:
    """Protects checkpoints that the script asked to keep: a rescue counts as one more of the same job."""
    kept = Checkpoints(tmp_path, group, 7, 0, keep=4)
    for number in range(1, 4):
        kept.save(state(), TrainingProgress(step=number))
    name = kept.rescue(state(), TrainingProgress(step=4), str)
    kept.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        f"step-{number:09d}" for number in range(1, 5)
    ]
    assert name == "step-000000004"


def test_a_rescue_at_the_step_of_a_checkpoint_under_way(
    tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects the rescue of ranks that are lost while a checkpoint of the same step is written: that one fails, and
    its clean-up must leave the rescue's files alone."""
    writing, lost, write = threading.Event(), threading.Event(), checkpoints.write_tensors

    def written(*given: Any) -> Any:
        if threading.current_thread().name != "ones-checkpoint":
            lost.set()
            kept._wait()  # until the other has cleaned up
            return write(*given)
        writing.set()
        lost.wait(10.0)
        raise OSError("the others are lost")

    monkeypatch.setattr(checkpoints, "write_tensors", written)
    kept, progress = Checkpoints(tmp_path, group, 7, 0), TrainingProgress(step=5)
    kept.begin(state(1.0), progress)
    assert writing.wait(10.0)
    name = kept.rescue(state(1.0), progress, str)
    kept.close()
    assert Checkpoints(tmp_path, group, 7, 1).load(state()).name == name == "step-000000005"


def test_the_folder_is_as_durable_as_its_checkpoints(
    tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects all checkpoints: a folder whose own name was never synced may be gone after a power cut."""
    synced: list[Path] = []
    monkeypatch.setattr("ones_wrapper.checkpoint.folder.sync", synced.append)
    Checkpoints(tmp_path, group, 7, 0).close()
    assert tmp_path in synced

"""A checkpoint in the node's memory: read as those on the disk are, believed while it lasts, and gone once they are."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.checkpoint import Checkpoints, files
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files import node_memory
from ones_wrapper.files.job_directory import newest_checkpoint
from ones_wrapper.files.node_memory import HELD, NodeMemory
from ones_wrapper.group import Group
from tests.wrapper.checkpoint.test_checkpoints import group, state

__all__ = ["group"]


class Killed(BaseException):
    """Comes in place of a write, and of all that come after it: nothing is cleaned up."""


class Kill:
    """Kills at the n-th change below a folder: a file made or written, a rename, a removal."""

    left: int | None = None
    folder = ""

    def count(self, path: object) -> None:
        if self.left is not None and str(path).startswith(self.folder):
            if self.left <= 0:
                raise Killed
            self.left -= 1

    def see(self, event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and bool(given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            self.count(given[0])


KILL = Kill()
sys.addaudithook(KILL.see)


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[], Any]], bool]]:
    """Does something, which is killed at that change; whether it was."""
    write = files._write

    def counted(handle: int, pieces: list[memoryview]) -> int:
        KILL.count(Path(f"/proc/self/fd/{handle}").readlink())
        return write(handle, pieces)

    def run(after: int, do: Callable[[], Any]) -> bool:
        KILL.left, KILL.folder = after, str(tmp_path)
        try:
            do()
        except Killed:
            return True
        finally:
            KILL.left = None
        return False

    monkeypatch.setattr(files, "_write", counted)
    yield run
    KILL.left = None


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "memory").mkdir()
    memory = NodeMemory({"ONES_MEMORY": str(tmp_path / "memory")})
    found = node_memory.common([memory.name])
    assert found is not None
    yield found
    memory.remove()


def value(job: Path, group: Group) -> tuple[str, int, float]:
    """Name, step and weight of what the next start loads."""
    into = state()
    with closing(Checkpoints(job, group, 7, 1)) as box:
        found = box.load(into)
    return found.name, found.progress.step, float(into.model.state_dict()["bias"][0])


def at(step: int) -> TrainingProgress:
    return TrainingProgress(step=step)


def test_it_is_loaded_until_the_disk_has_a_newer_one(tmp_path: Path, group: Group, place: Path) -> None:
    """Only the disk's counts as progress; a second one is not left in memory before that."""
    box = Checkpoints(tmp_path, group, 7, 0)
    box.save(state(1), at(1))
    assert box.hold(state(2), at(2), place) and not box.hold(state(3), at(3), place)
    (path,) = (place / "checkpoints").iterdir()
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-000000001"
    box.close()
    assert value(tmp_path, group) == (str(path), 2, 2.0)
    box.save(state(4), at(4))
    assert not path.exists() and value(tmp_path, group) == ("step-000000004", 4, 4.0)
    assert box.hold(state(4), at(4), place)  # the same step again: an epoch ended
    assert value(tmp_path, group)[0].startswith("/")


@pytest.mark.parametrize("harm", ["changed", "gone", "others", "older"])
def test_what_is_not_sound_is_passed_over(
    tmp_path: Path, group: Group, place: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the disk's last one counts, for good."""
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        assert box.hold(state(2), at(2), place)
        (path,) = (place / "checkpoints").iterdir()
        if harm == "changed":
            (path / "rest.pt").write_bytes(b"1")
        elif harm == "gone":
            shutil.rmtree(place)
        elif harm == "others":
            place.chmod(0o755)
        else:  # killed between the two: the disk had it already
            box.save(state(3), at(3))
            node_memory.hold(tmp_path / "checkpoints", path)
    step = 3 if harm == "older" else 1
    assert value(tmp_path, group) == (f"step-{step:09d}", step, float(step))
    assert ("was passed over" in capsys.readouterr().err) == (harm != "older")
    assert (tmp_path / "checkpoints" / HELD).exists() == (harm == "older")


def test_one_that_goes_while_it_is_loaded(
    tmp_path: Path, group: Group, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that is killed leaves it to the next start's broom; other errors are errors."""
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        box.hold(state(2), at(2), place)
    read = Checkpoints._read

    def gone(box: Checkpoints, name: str, into: Any) -> Any:
        if name.startswith("/"):
            shutil.rmtree(place)
        return read(box, name, into)

    monkeypatch.setattr(Checkpoints, "_read", gone)
    assert value(tmp_path, group) == ("step-000000001", 1, 1.0)


def test_without_room_it_is_written_to_the_disk(
    tmp_path: Path, group: Group, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole; and where memory cannot be written."""
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        monkeypatch.setattr(node_memory, "room", lambda folder: 15)  # a weight of 3 and a bias, in float32
        assert not box.hold(state(2), at(2), place) and not list((place / "checkpoints").iterdir())
        monkeypatch.setattr(node_memory, "room", lambda folder: 16)
        assert not box.hold(state(2), at(2), tmp_path / "nowhere")
        assert box.hold(state(2), at(2), place)


@pytest.mark.parametrize("what", ["hold", "save"])
def test_killed_at_every_write(
    tmp_path: Path, group: Group, place: Path, killed: Callable[[int, Callable[[], Any]], bool], what: str
) -> None:
    """Of one in memory, or of the disk's that follows it: what loads is whole, and what was complete before or newer.
    Then all goes on, and nothing is left in memory."""
    for after in range(200):
        job = tmp_path / f"job-{after}"
        job.mkdir()
        with closing(Checkpoints(job, group, 7, 0)) as box:
            box.save(state(1), at(1))
            if what == "save":
                assert box.hold(state(2), at(2), place)
            do = partial(box.hold, state(2), at(2), place) if what == "hold" else partial(box.save, state(3), at(3))
            was_killed = killed(after, do)
        _, step, weight = value(job, group)
        assert step in ((1, 2) if what == "hold" else (2, 3)) and weight == step, after
        with closing(Checkpoints(job, group, 7, 1)) as box:
            box.save(state(4), at(4))
            assert box.hold(state(5), at(5), place)
            box.save(state(6), at(6))
        assert not list((place / "checkpoints").iterdir()) and not (job / "checkpoints" / HELD).exists()
        assert value(job, group) == ("step-000000006", 6, 6.0)
        if not was_killed:
            break
    assert 10 < after < 100

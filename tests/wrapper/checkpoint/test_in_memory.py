"""A checkpoint in the nodes' memory: read as those on the disk are, believed while it lasts, and gone once they are."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.checkpoint import Checkpoints, Failed, Saved, checkpoints, files
from ones_wrapper.checkpoint.folder import Folder
from ones_wrapper.checkpoint.held import HeldFolder
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files import node_memory
from ones_wrapper.files.job_directory import newest_checkpoint
from ones_wrapper.files.node_memory import FOLDER, HELD, HeldCheckpoint, MemoryFolder, held
from ones_wrapper.group import Group
from ones_wrapper.network import pieces
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.protocol import HOT
from tests.waiting import until
from tests.wrapper.checkpoint.test_checkpoints import group, state
from tests.wrapper.lent_memory import Lender

__all__ = ["group"]


class Killed(BaseException):
    """Comes in place of a write, and of all that come after it: nothing is cleaned up."""


class Kill:
    """Kills at the n-th change below a folder: a file made or written, a rename, a removal."""

    left: int | None = None
    folder = ""
    struck = False

    def count(self, path: object) -> None:
        if self.left is not None and str(path).startswith(self.folder):
            if self.left <= 0:
                self.struck = True
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
        KILL.left, KILL.folder, KILL.struck = after, str(tmp_path), False
        with suppress(Killed):  # which torch may have made an error of its own
            do()
        KILL.left = None
        return KILL.struck

    monkeypatch.setattr(files, "_write", counted)
    yield run
    KILL.left = None


@pytest.fixture
def lenders(tmp_path: Path) -> Iterator[list[Lender]]:
    """Launchers of two nodes; this rank's is the first."""
    made = [Lender(tmp_path / f"memory-{name}", tmp_path) for name in "ab"]
    yield made
    for one in made:
        one.kill()


Move = Callable[[int], None]


@pytest.fixture
def on(lenders: list[Lender], monkeypatch: pytest.MonkeyPatch) -> Move:
    """Moves this rank to that node."""

    def move(number: int) -> None:
        monkeypatch.setenv(FOLDER, lenders[number].text)

    move(0)
    return move


@pytest.fixture
def place(lenders: list[Lender], on: Move) -> MemoryFolder:
    return lenders[0].folder


def job_in(path: Path) -> Path:
    """A job's directory there, with the secret of all jobs here."""
    (path / HOT).mkdir(parents=True, exist_ok=True)
    if path.name.startswith("job-"):
        shutil.copy(path.parent / HOT / "secret", path / HOT / "secret")
    else:
        JobSecret.make(path / HOT)
    return path


@pytest.fixture(autouse=True)
def secret(tmp_path: Path) -> None:
    job_in(tmp_path)


def value(job: Path, group: Group) -> tuple[str, int, float]:
    """Name, step and weight of what the next start loads."""
    into = state()
    with closing(Checkpoints(job, group, 7, 1)) as box:
        found = box.load(into)
    return found.name, found.progress.step, float(into.model.state_dict()["bias"][0])


def held_in(box: Checkpoints, place: MemoryFolder, step: int = 2, most: int = 1 << 20) -> bool:
    return box.hold(state(step), at(step), place, most)


def at(step: int) -> TrainingProgress:
    return TrainingProgress(step=step)


def test_it_is_loaded_until_the_disk_has_a_newer_one(tmp_path: Path, group: Group, place: MemoryFolder) -> None:
    """Only the disk's counts as progress; the next start leaves none in memory before that."""
    box = Checkpoints(tmp_path, group, 7, 0)
    box.save(state(1), at(1))
    assert held_in(box, place)
    with closing(Checkpoints(tmp_path, group, 7, 1)) as later:
        assert not held_in(later, place, 3)
    (path,) = place.checkpoints.iterdir()
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-000000001"
    box.close()
    assert value(tmp_path, group) == (str(path), 2, 2.0)
    box.save(state(4), at(4))
    assert not path.exists() and value(tmp_path, group) == ("step-000000004", 4, 4.0)
    assert held_in(box, place, 4)  # the same step again: an epoch ended
    assert value(tmp_path, group)[0].startswith("/")


@pytest.mark.parametrize("harm", ["changed", "gone", "others", "older"])
def test_what_is_not_sound_is_passed_over(
    tmp_path: Path, group: Group, place: MemoryFolder, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the disk's last one counts, for good."""
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        assert held_in(box, place)
        (path,) = place.checkpoints.iterdir()
        description = (tmp_path / "checkpoints" / HELD).read_bytes()
        if harm == "changed":
            (path / "rest.pt").write_bytes(b"1")
        elif harm == "gone":
            shutil.rmtree(place.path)
        elif harm == "others":
            place.path.chmod(0o755)
        else:  # killed between the two: the disk had it already
            box.save(state(3), at(3))
            (tmp_path / "checkpoints" / HELD).write_bytes(description)
    step = 3 if harm == "older" else 1
    assert value(tmp_path, group) == (f"step-{step:09d}", step, float(step))
    assert ("was passed over" in capsys.readouterr().err) == (harm != "older")
    assert (tmp_path / "checkpoints" / HELD).exists() == (harm == "older")


def test_one_that_goes_while_it_is_loaded(
    tmp_path: Path, group: Group, place: MemoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that is killed leaves it to the next start's broom; other errors are errors."""
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        held_in(box, place)
    read = Checkpoints._read

    def gone(box: Checkpoints, folder: Folder, name: str, into: Any) -> Any:
        if isinstance(folder, HeldFolder):
            shutil.rmtree(place.path)
        return read(box, folder, name, into)

    monkeypatch.setattr(Checkpoints, "_read", gone)
    assert value(tmp_path, group) == ("step-000000001", 1, 1.0)


def test_without_room_it_is_written_to_the_disk(tmp_path: Path, group: Group, place: MemoryFolder) -> None:
    """Of the whole; and where memory cannot be written."""
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        assert not held_in(box, place, most=15)  # a weight of 3 and a bias, in float32
        assert not place.checkpoints.exists()
        assert not held_in(box, replace(place, path=tmp_path / "nowhere"))
        assert held_in(box, place, most=16)


@pytest.mark.parametrize("what", ["hold", "save"])
def test_killed_at_every_write(
    tmp_path: Path, group: Group, place: MemoryFolder, killed: Callable[[int, Callable[[], Any]], bool], what: str
) -> None:
    """Of one in memory, or of the disk's that follows it: what loads is whole, and what was complete before or newer.
    Then all goes on, and nothing is left in memory."""
    for after in range(200):
        job = tmp_path / f"job-{after}"
        job_in(job)
        with closing(Checkpoints(job, group, 7, 0)) as box:
            box.save(state(1), at(1))
            if what == "save":
                assert held_in(box, place)
            do = partial(held_in, box, place) if what == "hold" else partial(box.save, state(3), at(3))
            was_killed = killed(after, do)
        _, step, weight = value(job, group)
        assert step in ((1, 2) if what == "hold" else (2, 3)) and weight == step, after
        with closing(Checkpoints(job, group, 7, 1)) as box:
            box.save(state(4), at(4))
            assert held_in(box, place, 5)
            box.save(state(6), at(6))
        assert not list(place.checkpoints.iterdir()) and not (job / "checkpoints" / HELD).exists()
        assert value(job, group) == ("step-000000006", 6, 6.0)
        if not was_killed:
            break
    assert 10 < after < 100


def moved(tmp_path: Path, group: Group, place: MemoryFolder, on: Move) -> None:
    """The disk has step 1, this node's memory step 2, and this rank goes to the other node."""
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        assert held_in(box, place)
    on(1)


def test_another_node_fetches_it(
    tmp_path: Path, group: Group, place: MemoryFolder, lenders: list[Lender], on: Move
) -> None:
    """Then it lies there, whole and its user's only, and the node that had it may end; the disk's next one empties that
    memory."""
    moved(tmp_path, group, place, on)
    lenders[0].leave()
    time.sleep(0.3)
    assert not lenders[0].ended()
    name, step, weight = value(tmp_path, group)
    assert Path(name).is_relative_to(lenders[1].folder.path) and (step, weight) == (2, 2.0)
    assert {file.stat().st_mode & 0o777 for file in Path(name).iterdir()} == {0o600}
    until(lenders[0].ended)
    assert not place.path.exists()
    assert value(tmp_path, group) == (name, 2, 2.0)
    with closing(Checkpoints(tmp_path, group, 7, 2)) as box:
        box.save(state(3), at(3))
    assert not list(lenders[1].folder.checkpoints.iterdir()) and value(tmp_path, group) == ("step-000000003", 3, 3.0)


def test_a_launcher_of_the_same_node_takes_it_over(
    tmp_path: Path, group: Group, place: MemoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the network, and without a copy: the bytes stay as the other launcher goes."""
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        assert held_in(box, replace(place, port=1))
    other = Lender(tmp_path / "memory-a", tmp_path)
    try:
        monkeypatch.setenv(FOLDER, other.text)
        name, step, _ = value(tmp_path, group)
        assert step == 2 and Path(name).is_relative_to(other.folder.path)
        (theirs,) = place.checkpoints.iterdir()
        assert (theirs / "rest.pt").samefile(Path(name) / "rest.pt")
        shutil.rmtree(place.path)
        assert value(tmp_path, group) == (name, 2, 2.0)
    finally:
        other.kill()


@pytest.mark.parametrize("harm", ["server", "launcher", "piece", "longer", "changed", "secret", "full", "own"])
def test_a_piece_that_cannot_be_had(
    tmp_path: Path,
    group: Group,
    place: MemoryFolder,
    lenders: list[Lender],
    on: Move,
    harm: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk's last one counts, for good, and nothing stays of it in memory."""
    moved(tmp_path, group, place, on)
    (path,) = place.checkpoints.iterdir()
    if harm == "server":
        os.kill(lenders[0].server, signal.SIGKILL)
    elif harm == "launcher":
        lenders[0].kill()
    elif harm == "piece":
        (path / "rest.pt").unlink()
    elif harm == "longer":
        with (path / "rest.pt").open("ab") as file:
            file.write(b"1")
    elif harm == "changed":
        (path / "rest.pt").write_bytes(bytes((path / "rest.pt").stat().st_size))
    elif harm == "secret":
        JobSecret.renew(tmp_path / HOT)
    elif harm == "full":
        monkeypatch.setattr(pieces, "room", lambda folder: 10)
    else:
        monkeypatch.setenv(FOLDER, "")
    assert value(tmp_path, group) == ("step-000000001", 1, 1.0)
    assert "was passed over" in capsys.readouterr().err and not (tmp_path / "checkpoints" / HELD).exists()
    monkeypatch.undo()
    on(1)
    assert value(tmp_path, group) == ("step-000000001", 1, 1.0)
    assert not [file for file in lenders[1].folder.path.rglob("*") if file.name.startswith(".tmp")]


def test_killed_at_every_write_of_a_fetch(
    tmp_path: Path, group: Group, lenders: list[Lender], on: Move, killed: Callable[[int, Callable[[], Any]], bool]
) -> None:
    """The next start goes on from what is whole, and so it does in place of a lender that was killed."""
    for after in range(200):
        job = job_in(tmp_path / f"job-{after}")
        on(0)
        moved(job, group, lenders[0].folder, on)
        was_killed = killed(after, partial(value, job, group))
        name, step, weight = value(job, group)
        assert (step, weight) == (2, 2.0) and name.startswith("/"), after
        with closing(Checkpoints(job, group, 7, 1)) as box:
            box.save(state(4), at(4))
        assert not list(lenders[1].folder.checkpoints.iterdir()) and not (job / "checkpoints" / HELD).exists()
        if not was_killed:
            break
    assert 8 < after < 100


BRING = checkpoints.bring


@pytest.fixture
def both(lenders: list[Lender], on: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank plays also that of the other node, which fetches a second copy of all files."""
    there, second_at = lenders[1].text, HeldCheckpoint.second_at

    def fetched(*given: Any) -> str:
        on(1)
        try:
            return BRING(*given)
        finally:
            on(0)

    monkeypatch.setattr(checkpoints, "neighbour", lambda *_: there)
    monkeypatch.setattr(HeldCheckpoint, "second_at", lambda held, _: second_at(held, there))
    monkeypatch.setattr(checkpoints, "bring", fetched)


def copied(box: Checkpoints, place: MemoryFolder, step: int) -> Saved | Failed | None:
    """Write a copy of that step, in this thread."""
    box._alone = True
    box.begin(state(step), at(step), place)
    return box.ended()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.usefixtures("both")
def test_killed_at_every_write_of_a_copy(
    tmp_path: Path,
    group: Group,
    lenders: list[Lender],
    on: Move,
    killed: Callable[[int, Callable[[], Any]], bool],
    monkeypatch: pytest.MonkeyPatch,
    lost: int,
) -> None:
    """Also with one of the nodes that have it: the copy before or the new one loads, whole. Later memory is empty."""
    for after in range(200):
        job = job_in(tmp_path / f"job-{after}")
        with closing(Checkpoints(job, group, 7, 0)) as box:
            box.save(state(1), at(1))
            assert isinstance(copied(box, lenders[0].folder, 2), Saved)
            was_killed = killed(after, partial(copied, box, lenders[0].folder, 3))
        shutil.rmtree(lenders[lost].folder.checkpoints)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "bring", BRING)
            on(1 - lost)
            name, step, weight = value(job, group)
            assert step in ((2, 3) if was_killed else (3,)) and weight == step and name.startswith("/"), after
            with closing(Checkpoints(job, group, 7, 1)) as box:
                box.save(state(4), at(4))
            assert not (job / "checkpoints" / HELD).exists()
            assert not list(lenders[1 - lost].folder.checkpoints.iterdir())
            on(0)
        if not was_killed:
            break
    assert 12 < after < 100


@pytest.mark.usefixtures("both")
def test_a_copy_takes_the_place_of_the_one_before_once_it_is_complete(
    tmp_path: Path, group: Group, place: MemoryFolder, lenders: list[Lender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then that one counts, and after that a planned term's, which the same start may leave."""
    folder = tmp_path / "checkpoints"
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        assert isinstance(copied(box, place, 2), Saved)
        described = held(folder)
        assert described is not None and len(described.folders) == 2
        assert {tuple(at) for at in described.places.values()} == {(0, 1)}
        with monkeypatch.context() as patch:
            patch.setattr(pieces, "room", lambda folder: 10)
            end = copied(box, place, 3)
        assert isinstance(end, Failed) and "no room" in end.why and held(folder) == described
        assert isinstance(copied(box, place, 4), Saved)
        assert [one.name for one in place.checkpoints.iterdir()] == ["step-000000004"]
        assert held_in(box, place, 4)  # the same step again
        assert [one.name for one in place.checkpoints.iterdir()] == ["step-000000004"]
        newest = newest_checkpoint(tmp_path)
        assert newest is not None and newest.name == "step-000000001"
        assert {file.stat().st_mode & 0o777 for file in (place.checkpoints / "step-000000004").iterdir()} == {0o600}


@pytest.mark.parametrize(("what", "fails"), [(copied, "bring"), (copied, "complete"), (held_in, "complete")])
@pytest.mark.usefixtures("both")
def test_one_that_failed_takes_no_room(
    tmp_path: Path, group: Group, place: MemoryFolder, what: Any, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a memory for two copies: the one that counts, which stays meanwhile, and the next."""

    def failing(*given: Any) -> None:
        raise ValueError("a node is not reached")

    def room(folder: Path) -> int:
        return 2 * size - sum(file.stat().st_size for file in place.checkpoints.glob("*/*"))

    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        assert isinstance(copied(box, place, 2), Saved)
        described = held(tmp_path / "checkpoints")
        assert described is not None
        size = sum(size for size, _ in described.manifest["files"].values())
        monkeypatch.setattr(node_memory, "room", room)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints if fails == "bring" else HeldFolder, fails, failing)
            assert not isinstance(what(box, place, 3), Saved)
        assert held(tmp_path / "checkpoints") == described
        assert [one.name for one in place.checkpoints.iterdir()] == ["step-000000002"]
        assert isinstance(copied(box, place, 4), Saved)


@pytest.mark.parametrize("harm", ["changed", "gone", "lender"])
@pytest.mark.usefixtures("both")
def test_a_file_comes_from_its_other_copy(
    tmp_path: Path, group: Group, place: MemoryFolder, lenders: list[Lender], harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        assert isinstance(copied(box, place, 2), Saved)
    described = held(tmp_path / "checkpoints")
    assert described is not None
    mine, theirs = (lender.folder.checkpoints / described.name for lender in lenders)
    if harm == "changed":
        (mine / "rest.pt").write_bytes(b"1")
        assert pieces.take(described, JobSecret.read(tmp_path / HOT), 0, 1) == ""
        assert (mine / "rest.pt").read_bytes() == (theirs / "rest.pt").read_bytes()
        return
    third = Lender(tmp_path / "memory-c", tmp_path)
    try:
        if harm == "lender":
            lenders[0].kill()
        else:
            (mine / "rest.pt").unlink()
        monkeypatch.setenv(FOLDER, third.text)
        assert pieces.take(described, JobSecret.read(tmp_path / HOT), 0, 1) == ""
        path = third.folder.checkpoints / described.name / "rest.pt"
        assert path.read_bytes() == (theirs / "rest.pt").read_bytes()
    finally:
        third.kill()


def test_a_lone_block_makes_no_copy(tmp_path: Path, group: Group, place: MemoryFolder) -> None:
    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        end = copied(box, place, 2)
    assert isinstance(end, Failed) and "no other block" in end.why and not (tmp_path / "checkpoints" / HELD).exists()


@pytest.mark.usefixtures("both")
def test_a_rank_that_is_lost_as_the_copy_is_described(
    tmp_path: Path, group: Group, place: MemoryFolder, lenders: list[Lender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is described stays, although the ranks cannot agree on it any more, and the lost node had the other."""
    complete = HeldFolder.complete

    def lost(*given: Any) -> int:
        complete(*given)
        raise ValueError("a rank is lost")

    with closing(Checkpoints(tmp_path, group, 7, 0)) as box:
        box.save(state(1), at(1))
        monkeypatch.setattr(HeldFolder, "complete", lost)
        assert isinstance(copied(box, place, 2), Failed)
    shutil.rmtree(lenders[1].folder.checkpoints)
    monkeypatch.setattr(checkpoints, "bring", BRING)
    assert value(tmp_path, group)[1] == 2

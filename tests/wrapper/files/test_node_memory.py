"""The folder of a launcher in its node's memory: only its owner's, gone with its launcher, and never too full."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.files import node_memory
from ones_wrapper.files.node_memory import (
    COPY_STEPS,
    FOLDER,
    HELD,
    HeldCheckpoint,
    MemoryFolder,
    NodeMemory,
    clear,
    copy_steps,
    drop,
    folder_for,
    held,
    hold,
    least_room,
    neighbour,
    ours,
)
from ones_wrapper.protocol import CHECKPOINTS
from tests.wrapper.files.test_places import root_only


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"ONES_MEMORY": str(tmp_path)}


def folder(memory: NodeMemory) -> Path:
    assert memory.folder is not None
    return memory.folder.path


def test_it_is_its_owners_and_goes_with_its_launcher(env: dict[str, str], tmp_path: Path) -> None:
    memory = NodeMemory(env)
    path = folder(memory)
    assert (path.parent, path.stat().st_mode & 0o777) == (tmp_path, 0o700) and ours(path)
    (path / CHECKPOINTS).mkdir()
    memory.remove()
    assert not list(tmp_path.iterdir()) and not ours(path)


@pytest.mark.parametrize("place", ["", "nowhere", "/proc/nowhere"])
def test_a_node_may_have_none(place: str) -> None:
    assert NodeMemory({"ONES_MEMORY": place}).folder is None


def test_the_next_start_removes_what_the_killed_left(env: dict[str, str], tmp_path: Path) -> None:
    """Not what a living launcher has, nor a rank that outlives its launcher for a moment."""
    (tmp_path / "said").touch()
    rank = os.fork()
    if rank == 0:  # it inherits the lock, as ranks do
        memory = NodeMemory(env)
        (folder(memory) / CHECKPOINTS).mkdir()
        (tmp_path / "said").write_text(str(folder(memory)))
        time.sleep(60)
        os._exit(0)
    while not (name := (tmp_path / "said").read_text()):
        time.sleep(0.01)
    path = Path(name)
    NodeMemory(env).remove()
    assert path.exists()
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    NodeMemory(env).remove()
    assert not path.exists()


@root_only
def test_others_folders_are_not_believed_nor_touched(env: dict[str, str], tmp_path: Path) -> None:
    """Of another user, readable by others, a link, or by another name."""
    mine = folder(NodeMemory(env))
    theirs = tmp_path / ".ones-blocks-theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 4242, 4242)
    (tmp_path / ".ones-blocks-link").symlink_to(mine)
    named = tmp_path / "other"
    named.mkdir(mode=0o700)
    assert not ours(theirs) and not ours(tmp_path / ".ones-blocks-link") and not ours(named)
    with pytest.raises(PermissionError):
        clear(theirs)
    NodeMemory(env)
    assert theirs.exists() and ours(mine)
    mine.chmod(0o750)
    assert not ours(mine)


def text(node: str, name: str, room: int, path: Path) -> str:
    return MemoryFolder(node, name, 7, room, path / f".ones-blocks-{name}").text


def test_into_which_folder_a_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the first coming launcher that sees its memory, else its own; the node with the least room counts."""
    monkeypatch.setattr(node_memory, "room", lambda folder: 50)
    a, b, c, d = (text(*one, tmp_path) for one in (("x", "a", 9), ("x", "b", 8), ("y", "c", 90), ("y", "d", 70)))
    monkeypatch.setenv(FOLDER, a)
    for coming, there, room in (([a], "a", 9), ([c, b, a], "b", 8), ([c], "a", 50), ([d, c], "a", 50)):
        assert (found := folder_for(coming, [a])) is not None
        assert (found[0].path.name, found[1]) == (f".ones-blocks-{there}", room)
    assert folder_for([a, ""], [a]) is None and folder_for([a], [a, ""]) is None
    monkeypatch.delenv(FOLDER)
    assert folder_for([a], [a]) is None
    assert least_room([a, b]) == b and least_room([a, ""]) == ""


def test_where_a_second_copy_lies(tmp_path: Path) -> None:
    """With the next block on another node; on the same node only if there is no other."""
    a, b, c, d = (text(*one, tmp_path) for one in (("x", "a", 9), ("x", "b", 8), ("y", "c", 90), ("y", "d", 70)))
    four = [(0, a), (0, a), (1, b), (2, c), (2, d)]
    assert [neighbour(four, rank) for rank in range(5)] == [c, c, c, a, a]
    assert [neighbour([(0, a), (1, b)], rank) for rank in range(2)] == [b, a]
    with pytest.raises(ValueError, match="no other block"):
        neighbour([(0, a), (0, c)], 0)  # both end with the block


@pytest.mark.parametrize(("given", "steps"), [("", 0), ("0", 0), ("10", 10)])
def test_how_often_copies_are_made(given: str, steps: int) -> None:
    assert copy_steps({COPY_STEPS: given}) == steps and copy_steps({}) == 0


@pytest.mark.parametrize("given", ["ten", "-1", "1.5", "²"])
def test_what_is_no_number_of_steps(given: str) -> None:
    with pytest.raises(ValueError, match=COPY_STEPS):
        copy_steps({COPY_STEPS: given})


def described(*files: str, **other: Any) -> dict[str, Any]:
    """A description as JSON has it, of files that all lie in one folder."""
    folders = [text("x", "a", 1, Path("/dev/shm"))]
    manifest = {"files": {file: [1, 2] for file in files}}
    of = {"name": "step-000000001", "manifest": manifest, "folders": folders, "places": {file: [0] for file in files}}
    return of | other


def test_a_description_is_read_back(tmp_path: Path) -> None:
    one = HeldCheckpoint.parse(described("tensors-00000.safetensors", "rest.pt"))
    hold(tmp_path, one)
    assert held(tmp_path) == one and (tmp_path / HELD).stat().st_mode & 0o777 == 0o600
    more = one.at([text("x", "b", 1, Path("/dev/shm")), text("y", "c", 1, Path("/a b"))] * 2)
    assert len(more.folders) == 2 and {one.path.name for file in more.places for one in more.folders_of(file)} == {
        ".ones-blocks-b", ".ones-blocks-c"
    }  # fmt: skip
    drop(tmp_path)
    drop(tmp_path)
    assert held(tmp_path) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        described("rest.pt", name="step-1x"),
        described("rest.pt", name="../step-000000001"),
        described("../rest.pt"),
        described("manifest.json"),
        described("tensors-00000.safetensors/x"),
        described("rest.pt", places={}),
        described("rest.pt", places={"rest.pt": [1]}),
        described("rest.pt", places={"rest.pt": ["0"]}),
        described("rest.pt", places={"rest.pt": []}),
        described("rest.pt", places={"rest.pt": 0}),
        described("rest.pt", folders=["x host 7 8"]),
        described("rest.pt", folders=["x host 7 8 /etc"]),
        described("rest.pt", folders=["x host seven 8 /dev/shm/.ones-blocks-a"]),
        described("rest.pt", manifest={"files": {}}),
        described("rest.pt", manifest=[]),
    ],
)
def test_a_wrong_description_is_none(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / HELD).write_text(json.dumps(wrong))
    assert held(tmp_path) is None


def test_only_a_launchers_folder_is_emptied(env: dict[str, str], tmp_path: Path) -> None:
    precious = tmp_path / "runs"
    mine = folder(NodeMemory(env))
    for path in (precious, mine):
        (path / CHECKPOINTS / "step-000000007").mkdir(parents=True)
    with pytest.raises(PermissionError):
        clear(precious)
    clear(mine)
    assert list((precious / CHECKPOINTS).iterdir()) and not list((mine / CHECKPOINTS).iterdir())


def test_room_is_the_least_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the node, and below the limits of this cgroup and of those above it, in both versions; pages of files go."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/slurm/job\n3:cpu,cpuacct:/\n1:name=systemd:/x\n0::/up/mine\n")
    for place, names, values, cached in (
        ("up/mine", ("max", "current"), ("max", "900"), "inactive_file 100"),
        ("up", ("max", "current"), ("5000", "1000"), "anon 7\ninactive_file 300"),
        ("memory/slurm/job", ("limit_in_bytes", "usage_in_bytes"), ("8000", "2000"), "total_inactive_file 500"),
    ):
        group = tmp_path / "sys/fs/cgroup" / place
        group.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, values, strict=True):
            (group / f"memory.{name}").write_text(value)
        (group / "memory.stat").write_text(f"cache 1\n{cached}\n")
    assert sorted(node_memory._free(tmp_path)) == [4300, 6500, 65536]
    now = os.statvfs(tmp_path)  # other tests write there meanwhile
    monkeypatch.setattr(os, "statvfs", {tmp_path: now}.__getitem__)
    assert 0 < node_memory.room(tmp_path) <= now.f_bavail * now.f_frsize

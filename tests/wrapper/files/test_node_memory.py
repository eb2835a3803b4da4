"""The folder of a launcher in its node's memory: only its owner's, gone with its launcher, and never too full."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ones_wrapper.files import node_memory
from ones_wrapper.files.node_memory import HELD, NodeMemory, clear, common, drop, held, hold, ours
from ones_wrapper.protocol import CHECKPOINTS
from tests.wrapper.files.test_places import root_only


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"ONES_MEMORY": str(tmp_path)}


def folder(memory: NodeMemory) -> Path:
    path = common([memory.name])
    assert path is not None
    return path


def test_it_is_its_owners_and_goes_with_its_launcher(env: dict[str, str], tmp_path: Path) -> None:
    memory = NodeMemory(env)
    path = folder(memory)
    assert (path.parent, path.stat().st_mode & 0o777) == (tmp_path, 0o700) and ours(path)
    (path / CHECKPOINTS).mkdir()
    memory.remove()
    assert not list(tmp_path.iterdir()) and not ours(path)


@pytest.mark.parametrize("place", ["", "nowhere", "/proc/nowhere"])
def test_a_node_may_have_none(place: str) -> None:
    assert NodeMemory({"ONES_MEMORY": place}).name == ""


def test_the_next_start_removes_what_the_killed_left(env: dict[str, str], tmp_path: Path) -> None:
    """Not what a living launcher has, nor a rank that outlives its launcher for a moment."""
    (tmp_path / "said").touch()
    rank = os.fork()
    if rank == 0:  # it inherits the lock, as ranks do
        memory = NodeMemory(env)
        (folder(memory) / CHECKPOINTS).mkdir()
        (tmp_path / "said").write_text(memory.name)
        time.sleep(60)
        os._exit(0)
    while not (name := (tmp_path / "said").read_text()):
        time.sleep(0.01)
    path = common([name])
    assert path is not None
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


def test_all_must_see_one_folder(env: dict[str, str], tmp_path: Path) -> None:
    """Blocks of other nodes, or with a file system in memory of their own, do not."""
    one, two, far = NodeMemory(env).name, NodeMemory(env).name, NodeMemory({"ONES_MEMORY": str(tmp_path.parent)}).name
    assert common([one, two]) == Path(one.partition(":")[2]) and common([two, one]) == Path(two.partition(":")[2])
    assert [common(names) for names in ([one, far], [one, ""], [""])] == [None, None, None]


@pytest.mark.parametrize(
    "text", ["", "step-000000001", "/step-000000001", "/home/me", "/home/me/step-1x", "/tmp/\0/step-000000001"]
)
def test_a_wrong_name_is_none(tmp_path: Path, text: str) -> None:
    """And what it names stays."""
    (tmp_path / HELD).write_text(text)
    assert held(tmp_path) is None
    drop(tmp_path)
    assert not (tmp_path / HELD).exists()


def test_only_a_launchers_folder_is_emptied(env: dict[str, str], tmp_path: Path) -> None:
    """A name may point anywhere."""
    precious = tmp_path / "runs" / CHECKPOINTS / "step-000000007"
    mine = folder(NodeMemory(env)) / CHECKPOINTS / "step-000000007"
    for path in (precious, mine):
        path.mkdir(parents=True)
        hold(tmp_path, path)
        assert held(tmp_path) == path
        drop(tmp_path)
    assert precious.exists() and not mine.exists()


def test_room_is_the_least_that_is_free(tmp_path: Path) -> None:
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
    assert 0 < node_memory.room(tmp_path) <= os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize

"""Terms whose checkpoint lies in the nodes' memory: whatever is killed, each sample is used once, and nothing stays.

With `apart`, each task's node has memory of its own, as far as a folder for each emulates that.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.checkpoint import Checkpoints, checkpoints, files
from ones_wrapper.checkpoint.folder import Folder
from ones_wrapper.checkpoint.held import HeldFolder
from ones_wrapper.files.job_directory import checkpoint_names
from ones_wrapper.files.node_memory import HELD, NodeMemory
from ones_wrapper.launch import pieces as lent
from ones_wrapper.launch.node import Ranks
from ones_wrapper.launch.pieces import LentMemory
from ones_wrapper.membership.files import HotFolder
from ones_wrapper.network import pieces
from ones_wrapper.protocol import Checkpoint, First, Hello
from tests.marks import nightly
from tests.waiting import until
from tests.wrapper.membership.blocks import Job


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture(params=[False, True], ids=["together", "apart"])
def job(request: pytest.FixtureRequest, tmp_path: Path, memory: Path, kept: Callable[[Job], Job]) -> Job:
    (memory / "node").mkdir()
    together = {} if request.param else {"ONES_MEMORY": str(memory / "node")}
    apart = memory if request.param else None
    return kept(Job(tmp_path / "job", "--sharded", "--step-ms", "60", apart=apart, **together))


def assert_nothing_stays(job: Job, memory: Path) -> None:
    """On any node, once another block has started there; nor does the job's directory name any."""
    for node in memory.iterdir():
        NodeMemory({"ONES_MEMORY": str(node)}).remove()
        assert not list(node.iterdir())
    assert not (job.directory / "checkpoints" / HELD).exists()


def assert_ends(job: Job, memory: Path) -> None:
    """With the result of an undisturbed run, and nothing left in memory."""
    job.hurry()
    job.end()
    assert job.blocks[-1].end() == 0, job.errors()
    assert_nothing_stays(job, memory)
    job.assert_as_undisturbed()


def durable(job: Job, after: int) -> Checkpoint:
    return job.wait(Checkpoint, lambda one: one.step > after)


@pytest.mark.slow
def test_the_disk_gets_it_behind_the_training(job: Job, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grow and shrink to the other block: the term begins before the disk has anything, and reports only what the disk
    has. What memory had goes then."""
    slow, write = job.directory / "slow", checkpoints.write_tensors

    def written(path: Path, *given: Any) -> Any:
        if path.is_relative_to(job.directory):
            until(lambda: not slow.exists())
        return write(path, *given)

    monkeypatch.setattr(checkpoints, "write_tensors", written)  # of forked blocks too
    monkeypatch.setattr(lent, "STAY_S", 600.0)
    job.start(0)
    job.wait(First)
    slow.touch()
    job.start(1)
    job.order(0, 1, batch=32)
    grown = job.wait_for(0, 1)
    assert not job.of(Checkpoint) and not checkpoint_names(job.directory / "checkpoints")
    assert (job.directory / "checkpoints" / HELD).exists()
    time.sleep(1.5)
    slow.unlink()
    assert durable(job, grown.step).stall_s < 1.0 and list(memory.glob("*/.*/checkpoints/*")) == []
    job.order(1)
    shrunk = job.wait_for(1)
    until(job.blocks[0].ended, job.errors)
    durable(job, shrunk.step)
    job.finish()
    assert [hello.step for hello in job.of(Hello)] == [0, grown.step, shrunk.step]
    assert [hello.checkpoint for hello in job.of(Hello)] == ["", "", ""]
    assert [block.end() for block in job.blocks] == [0, 0]
    assert_nothing_stays(job, memory)
    job.assert_as_undisturbed()


MOMENTS: dict[str, tuple[type | Any, str, Callable[..., bool]]] = {
    "writes": (files, "_write", lambda handle, _: "/memory/" in str(Path(f"/proc/self/fd/{handle}").readlink())),
    "has written": (HotFolder, "announce", lambda *_: True),
    "is forked": (Ranks, "fork", lambda ranks: bool(ranks._codes)),
    "fetches": (pieces, "_received", lambda *_: True),
    "has fetched": (pieces, "replace_small", lambda *_: True),
    "loads": (Checkpoints, "_read", lambda box, folder, name, state: isinstance(folder, HeldFolder)),
    "has loaded": (Checkpoints, "_lies_in", lambda *_: True),
    "writes to the disk": (Folder, "_publish", lambda folder, name: (folder._path / HELD).exists()),
}
"""What a process is about to do, and whether a call is that."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "whole"), [("loads", False), *(nightly(one, whole) for one in MOMENTS for whole in (False, True))]
)
def test_killed_as_a_term_begins(
    job: Job, memory: Path, monkeypatch: pytest.MonkeyPatch, moment: str, whole: bool
) -> None:
    """A launcher with its ranks, which dies as it or its rank is about to do that, or with it all blocks."""
    if moment == "fetches" and job.apart is None:
        pytest.skip("one node has all of it")
    owner, name, meant = MOMENTS[moment]
    now, struck, do = job.directory / "now", job.directory / "struck", getattr(owner, name)

    def die(*given: Any, **named: Any) -> Any:
        if now.exists() and meant(*given):
            try:
                struck.touch(exist_ok=False)
            except FileExistsError:
                return do(*given, **named)
            struck.write_text(os.environ["SLURM_ARRAY_TASK_ID"])
            launcher = os.getpid() if owner is Ranks else os.getppid()
            for pid in (launcher, os.getpid()):
                os.kill(pid, signal.SIGKILL)
        return do(*given, **named)

    monkeypatch.setattr(owner, name, die)  # of forked blocks too
    two = job.begin(0, 1)
    before = durable(job, two.step).step
    now.touch()
    job.start(2)
    job.order(0, 1, 2)
    victim = int(until(lambda: struck.exists() and struck.read_text(), job.errors))
    until(job.blocks[victim].ended, job.errors)
    if whole:
        job.kill()
    known = len(job.of(Hello))
    job.start(victim, restart=1)
    if whole:
        until(lambda: len(job.of(Hello)) > known, job.errors)
    else:
        job.wait_for(0, 1, 2, after=two.generation)
    assert min(hello.step for hello in job.of(Hello)[2:]) >= before
    assert_ends(job, memory)


@pytest.mark.slow
@pytest.mark.parametrize("job", [True], ids=["apart"], indirect=True)
@pytest.mark.parametrize("harm", ["killed", nightly("no room"), nightly("silent")])
def test_a_node_that_left_takes_its_part_with_it(
    job: Job, memory: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """Between the announcement and the next start its launcher is killed, or what it has cannot be had: the disk's last
    checkpoint counts."""

    now, mute = job.directory / "now", job.directory / "mute"

    def harmed(function: Callable[..., Any], instead: Callable[..., Any], once: Path = now) -> Callable[..., Any]:
        return lambda *given, **named: (instead if once.exists() else function)(*given, **named)

    def killed(*given: Any, **named: Any) -> None:
        now.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    if harm == "killed":
        monkeypatch.setattr(LentMemory, "end", harmed(LentMemory.end, killed))  # of forked blocks too
        # Else its part may be fetched before its block has ended.
        monkeypatch.setattr(pieces, "_send", harmed(pieces._send, lambda *_: time.sleep(60), mute))
    elif harm == "no room":
        monkeypatch.setattr(pieces, "room", harmed(pieces.room, lambda folder: 10))
    else:
        monkeypatch.setattr(pieces, "_send", harmed(pieces._send, lambda *_: time.sleep(60)))
        monkeypatch.setattr(pieces, "TIMEOUT_S", 1.0)
    last = durable(job, job.begin(0, 1).step)
    now.touch()
    mute.touch()
    job.order(1)
    job.wait_for(1)
    hello = job.of(Hello)[-1]
    assert (hello.checkpoint, hello.step) == (last.name, last.step) and "was passed over" in job.errors()
    job.hurry()
    assert job.blocks[1].end() == 0, job.errors()
    assert_nothing_stays(job, memory)
    job.assert_as_undisturbed()

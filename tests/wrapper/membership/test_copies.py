"""Copies of a sharded training in the memory of other nodes: what is killed without notice costs the steps since the
last copy, no sample, and nothing of the result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.checkpoint import checkpoints, files
from ones_wrapper.checkpoint.folder import Folder
from ones_wrapper.files import node_memory
from ones_wrapper.files.job_directory import newest_checkpoint
from ones_wrapper.files.node_memory import COPY_STEPS, HELD, HeldCheckpoint
from ones_wrapper.network import pieces
from ones_wrapper.protocol import Checkpoint, Hello, Membership, Note
from tests.marks import nightly
from tests.waiting import until
from tests.wrapper.membership.blocks import Job
from tests.wrapper.membership.forked import kill_at_once
from tests.wrapper.membership.test_terms_in_memory import assert_ends, durable, memory

__all__ = ["memory"]

STEPS = 4


@pytest.fixture
def job(tmp_path: Path, memory: Path, kept: Callable[[Job], Job]) -> Job:
    """Each task's node has memory of its own (emulated)."""
    return kept(Job(tmp_path / "job", "--sharded", "--step-ms", "60", apart=memory, **{COPY_STEPS: str(STEPS)}))


def copy(job: Job, after: int = 0) -> HeldCheckpoint | None:
    """The copy that counts, if it is of a later step."""
    found = node_memory.held(job.directory / "checkpoints")
    return found if found is not None and step_of(found) > after else None


def step_of(held: HeldCheckpoint) -> int:
    return int(held.name[5:])


def trained(job: Job, *tasks: int) -> int:
    """Until these blocks train, the disk has a checkpoint of it, and two copies were made since; the disk's step."""
    last = durable(job, job.begin(*tasks).step).step
    first = until(lambda: copy(job, last), job.errors)
    until(lambda: copy(job, step_of(first)), job.errors)
    return last


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, nightly(1)])
def test_a_node_that_is_lost_costs_the_steps_since_the_last_copy(job: Job, memory: Path, victim: int) -> None:
    """Each of its blocks at once, also the leader. What was copied is no progress before the disk has it."""
    last = trained(job, 0, 1)
    assert len([one for one in job.of(Note) if "second copy" in one.note]) == 1
    before = until(lambda: copy(job), job.errors)
    assert all(len(set(at)) == 2 for at in before.places.values())
    newest = newest_checkpoint(job.directory)
    assert newest is not None and newest.name == job.of(Checkpoint)[-1].name == f"step-{last:09d}"
    known = len(job.of(Hello))
    job.blocks[victim].kill()
    hello = until(lambda: job.of(Hello)[known:], job.errors)[0]
    assert hello.step >= step_of(before) > last and hello.checkpoint == "", job.errors()
    durable(job, hello.step)
    job.start(victim, restart=1)
    job.wait_for(0, 1, after=job.of(Membership)[-1].generation)
    assert_ends(job, memory)


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "writes": (files, "_write", lambda handle, _: "/memory/" in str(Path(f"/proc/self/fd/{handle}").readlink())),
    "fetches": (pieces, "_received", lambda *_: True),
    "has fetched": (pieces, "replace_small", lambda *_, **__: True),
    "describes": (Folder, "hold", lambda _, held: held is not None),
    "has described": (checkpoints, "free_memory", lambda but: "/memory/" in but),
    "removes the one before": (node_memory.shutil, "rmtree", lambda path, **_: "/memory/" in str(path)),
    "trains": (checkpoints.Checkpoints, "ended", lambda *_: True),
}
"""What a process is about to do while a copy is made, and whether a call is that."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["fetches", *(nightly(one) for one in MOMENTS if one != "fetches")])
@pytest.mark.parametrize("whole", [False, nightly(True)])
@pytest.mark.parametrize("alone", [False, nightly(True)])
def test_killed_while_a_copy_is_made(
    job: Job, memory: Path, monkeypatch: pytest.MonkeyPatch, moment: str, whole: bool, alone: bool
) -> None:
    """A launcher with its ranks, which dies as its rank is about to do that, or that rank `alone`, or with it all
    blocks. The copy before counts until the new one is complete; without any block the disk's last checkpoint does."""
    owner, name, meant = MOMENTS[moment]
    now, struck, do = job.directory / "now", job.directory / "struck", getattr(owner, name)

    def die(*given: Any, **named: Any) -> Any:
        if now.exists() and meant(*given, **named):
            try:
                struck.touch(exist_ok=False)
            except FileExistsError:
                return do(*given, **named)
            struck.write_text(os.environ["SLURM_ARRAY_TASK_ID"])
            for pid in (() if alone else (os.getppid(),)) + (os.getpid(),):
                os.kill(pid, signal.SIGKILL)
        return do(*given, **named)

    monkeypatch.setattr(owner, name, die)  # of forked blocks too
    last = trained(job, 0, 1, 2)
    before = until(lambda: copy(job), job.errors)
    known = len(job.of(Hello))
    now.touch()
    victim = int(until(lambda: struck.exists() and struck.read_text(), job.errors))
    until(job.blocks[victim].ended, job.errors)
    if whole:
        job.kill()
    else:
        until(lambda: job.of(Hello)[known:], job.errors)
    job.start(victim, restart=1)
    hello = until(lambda: job.of(Hello)[known:], job.errors)[0]
    if whole:
        assert hello.step == last and hello.checkpoint == f"step-{last:09d}"
    else:
        assert hello.step >= step_of(before) and hello.checkpoint == ""
        job.wait_for(0, 1, 2, after=job.of(Membership)[-1].generation)
    assert_ends(job, memory)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["no room", nightly("silent"), nightly("both")])
def test_what_cannot_be_copied(job: Job, memory: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    """Training goes on, which is said once. After a loss the copy before counts; the disk's, if a file's two copies are
    gone."""
    now = job.directory / "now"

    def harmed(function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: (instead if now.exists() else function)(*given, **named)

    if harm == "no room":
        monkeypatch.setattr(node_memory, "room", harmed(node_memory.room, lambda folder: 10))
    elif harm == "silent":
        monkeypatch.setattr(pieces, "_send", harmed(pieces._send, lambda *_: time.sleep(60)))
        monkeypatch.setattr(pieces, "TIMEOUT_S", 1.0)
    last = trained(job, *((0, 1, 2) if harm == "both" else (0, 1)))
    known = len(job.of(Hello))
    if harm == "both":
        kill_at_once(*job.blocks[1:])
        hello = until(lambda: job.of(Hello)[known:], job.errors)[0]
        assert (hello.step, hello.checkpoint) == (last, f"step-{last:09d}"), "where a shard lay on those two only"
        assert "was passed over" in job.errors()
        job.hurry()
        assert job.blocks[0].end() == 0, job.errors()
        job.assert_as_undisturbed()
        return
    now.touch()
    job.wait(Note, lambda one: "could not be made" in one.note)
    before = until(lambda: copy(job), job.errors)
    time.sleep(1.5)
    assert copy(job) == before
    assert len([one for one in job.of(Note) if "could not be made" in one.note]) == 1
    now.unlink()
    job.blocks[0].kill()
    hello = until(lambda: job.of(Hello)[known:], job.errors)[0]
    assert hello.step >= step_of(before) > last
    job.hurry()
    assert job.blocks[1].end() == 0, job.errors()
    job.assert_as_undisturbed()


@pytest.mark.slow
def test_without_the_setting_no_copy_is_made(tmp_path: Path, memory: Path, kept: Callable[[Job], Job]) -> None:
    """The disk's last checkpoint counts after a loss."""
    job = kept(Job(tmp_path / "job", "--sharded", "--step-ms", "60", apart=memory))
    last = durable(job, job.begin(0, 1).step)
    time.sleep(1.0)
    assert not (job.directory / "checkpoints" / HELD).exists()
    known = len(job.of(Hello))
    job.blocks[1].kill()
    hello = until(lambda: job.of(Hello)[known:], job.errors)[0]
    assert (hello.step, hello.checkpoint) == (last.step, last.name)
    job.hurry()
    assert job.blocks[0].end() == 0, job.errors()
    job.assert_as_undisturbed()

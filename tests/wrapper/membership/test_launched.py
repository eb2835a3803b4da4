"""Blocks as users start them, each by an `ones-run` of its own: what dies comes back, and what has ended stays ended.

The other tests of this folder fork node launchers; here `ones-run` is part of it, and by night its imports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_wrapper.launch.tries import read_tries
from ones_wrapper.membership.files import HotFolder
from ones_wrapper.process.exit_codes import STOP_CODE
from ones_wrapper.protocol import Bye, Checkpoint, First, Hello, Membership
from tests.wrapper.launch.test_blocks import SRUN
from tests.wrapper.membership.blocks import ARRAY, Job
from tests.wrapper.membership.forked import ForkedBlock
from tests.wrapper.preloaded import Started, forkable
from tests.wrapper.runs import TRAIN

TOOL = '#!/bin/sh\necho "$(basename "$0") $@" >> "{folder}/asked"\n'
CANCELLED = f"scancel --state=PENDING {ARRAY}"


class LaunchedBlock(ForkedBlock):
    """One block: `ones-run`, its node launcher and the ranks."""

    def __init__(self, arguments: list[str], env: dict[str, str], log: Path, forked: bool) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))} | env
        self._log, self._code = log, -1
        self._process: Started | subprocess.Popen[bytes]
        if forked and forkable(env):
            self._process = Started(arguments, env, log)
        else:
            command = [sys.executable, "-m", "ones_wrapper.launch", *arguments]
            with log.open("ab") as file:
                self._process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        self.pid = self._process.pid

    def ended(self) -> bool:
        code = self._process.poll()
        if code is not None:
            self._code = abs(code)
        return code is not None

    def launchers(self) -> list[int]:
        """The process of the node launcher; none while there is none."""
        return children(self.pid)

    def ranks(self) -> list[int]:
        return [rank for launcher in self.launchers() for rank in children(launcher)]

    def kill(self) -> None:
        if not self.ended():
            for pid in [*self.ranks(), *self.launchers(), self.pid]:
                os.kill(pid, signal.SIGKILL)
            self.end()


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class LaunchedJob(Job):
    """A job whose blocks are Slurm's, but for Slurm."""

    forked = True
    """Whether `ones-run` is a fork of a process that has imported torch, where that makes no difference."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        super().__init__(directory, "--step-ms", "80", *arguments, epochs=60)
        tools = directory / "bin"
        tools.mkdir()
        for name in ("scontrol", "scancel"):
            (tools / name).write_text(TOOL.format(folder=directory))
            (tools / name).chmod(0o755)
        self._path = f"{tools}:{os.environ['PATH']}"
        self.more: dict[str, str] = {}
        """What else is in the environment of blocks."""

    def start(self, task: int, ranks: int = 1, restart: int = 0) -> LaunchedBlock:
        env = {
            "PATH": self._path,
            "ONES_JOB_DIR": str(self.directory),
            "ONES_REPORT_EVERY_S": "0.2",
            "ONES_TRACE": str(self.directory / "trace-{restart}-{rank}.jsonl"),
            "ONES_LAUNCHER": "local",
            "SLURM_ARRAY_JOB_ID": str(ARRAY),
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_ARRAY_TASK_MIN": "0",
            "SLURM_JOB_ID": str(ARRAY + task + 1),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": str(restart),
            **self.more,
        }
        arguments = ["--blocks", f"--gpus-per-node={ranks}", str(TRAIN), *self.arguments]
        block = LaunchedBlock(arguments, env, self.directory / f"log-{len(self.blocks)}", self.forked)
        self.blocks.append(block)
        return block

    def asked(self) -> list[str]:
        """What Slurm was asked for."""
        path = self.directory / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LaunchedJob]:
    job = LaunchedJob(tmp_path / "job")
    yield job
    job.kill()


def two(job: LaunchedJob) -> tuple[LaunchedBlock, LaunchedBlock, Membership]:
    """Tasks 0 and 1 train together, the first leads."""
    first = job.start(0)
    job.wait(First)
    job.order(0, 1)
    second = job.start(1)
    return first, second, job.wait_for(0, 1)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("leader", "forked"),
    [(True, True), (True, False), (False, True)],
    ids=["leader", "command", "member"],
)
def test_a_block_whose_rank_was_killed_comes_back(job: LaunchedJob, leader: bool, forked: bool) -> None:
    """Protects the size that the companion gave: the block whose rank was killed joins again by itself, without a
    requeue, and only it counts the failure; the other goes on meanwhile, with the same `ones-run` and node launcher.
    At the end what waits is cancelled, once."""
    job.forked = forked
    first, second, whole = two(job)
    victim, other = (first, second) if leader else (second, first)
    launcher = other.launchers()
    time.sleep(0.5)
    os.kill(victim.ranks()[0], signal.SIGKILL)
    alone = job.wait(Membership, lambda m: m.generation > whole.generation and m.world == 1)
    assert job.of(Hello)[-1].step >= whole.step, "the rescue was not used"
    job.wait_for(0, 1, after=alone.generation)
    assert other.launchers() == launcher
    assert "other blocks were lost; starting the ranks again" in other.errors
    job.hurry()
    assert job.end() == [0, 0], job.errors()
    task = 0 if leader else 1
    assert read_tries(job.directory, ARRAY + 1 + task, task).restarts == 1
    assert not (job.directory / f"tries-{1 - task}.json").exists()
    assert job.asked() == [CANCELLED]
    assert job.terms() == 2
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sharded_model_grows_and_shrinks(tmp_path: Path) -> None:
    """Protects a model sharded by FSDP2 from a requeue, and from imports: it gains and loses a block, the one that led,
    by two checkpoints; `ones-run` and the node launcher of the block that stays are the same to the end."""
    job = LaunchedJob(tmp_path / "job", "--sharded")
    try:
        first, second, whole = two(job)
        assert whole.pause_s < 20.0
        launchers = second.launchers()
        job.order(1)
        alone = job.wait_for(1)
        assert first.end() == 0, first.errors
        assert second.launchers() == launchers
        assert job.asked() == []
        job.hurry()
        assert second.end() == 0, second.errors
        assert [hello.step for hello in job.of(Hello)] == [0, whole.step, alone.step]
        assert job.asked() == [CANCELLED]
        assert not (job.directory / "tries-1.json").exists()
        job.assert_as_undisturbed()
    finally:
        job.kill()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sharded_model_on_a_block_of_two_nodes(tmp_path: Path) -> None:
    """Protects terms whose ranks several launchers fork, each on a node of its own: a model sharded by FSDP2 on one
    node is joined by a block of two, goes on with that alone, and is taken over by one node again."""
    job = LaunchedJob(tmp_path / "job", "--sharded")
    (job.directory / "bin/srun").write_text(SRUN)
    (job.directory / "bin/srun").chmod(0o755)
    try:
        first = job.start(0)
        job.wait(First)
        job.order(0, 1)
        job.more = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "localhost,localhost", "ONES_LAUNCHER": "srun"}
        second = job.start(1)
        job.wait_for(0, 1)
        job.order(1)
        job.wait_for(1)
        assert first.end() == 0, first.errors
        job.order(2)
        job.more = {}
        third = job.start(2)
        job.wait_for(2)
        assert second.end() == 0, second.errors
        job.hurry()
        assert third.end() == 0, third.errors
        assert [(one.nodes, one.world) for one in job.of(Membership)] == [(1, 1), (3, 3), (2, 2), (1, 1)]
        assert [bye.reason for bye in job.of(Bye)] == ["moved"] * 3 + ["finished"]
        job.assert_as_undisturbed()
    finally:
        job.kill()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_node_that_is_gone_and_its_block_requeued(job: LaunchedJob) -> None:
    """Protects a job from the end of its leader's node: the other leads from its memory; the block that Slurm requeues
    joins hot; a task that starts when all is over does not import torch."""
    first, second, whole = two(job)
    time.sleep(0.5)
    first.kill()
    alone = job.wait(Membership, lambda m: m.generation > whole.generation)
    assert alone.blocks == (1,)
    job.start(0, restart=1)
    again = job.wait_for(0, 1, after=alone.generation)
    assert (again.blocks, again.restarts) == ((1, 0), (0, 1))
    job.hurry()
    assert (second.end(), job.blocks[2].end()) == (0, 0), job.errors()
    assert job.asked() == [CANCELLED]
    (job.directory / "bin/torch.py").write_text("raise AssertionError('torch is imported')\n")
    job.more["PYTHONPATH"] = str(job.directory / "bin")
    late = job.start(5)
    assert late.end() == 0
    assert f"job {ARRAY} has ended" in late.errors and "torch" not in late.errors
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
def test_time_limits_one_after_the_other(job: LaunchedJob) -> None:
    """Protects a job that outlives the time limit of each of its blocks: the leader leaves, with code 0 and without a
    requeue; the last one left is requeued, and goes on from its checkpoint; nothing that waits is cancelled."""
    first, second, _ = two(job)
    first.signal(signal.SIGUSR2)
    moved = job.wait_for(1)
    assert moved.why == "leaving"
    assert first.end() == 0, first.errors
    assert job.asked() == []
    second.signal(signal.SIGUSR2)
    assert second.end() == STOP_CODE, second.errors
    assert job.asked() == [f"scontrol requeue {ARRAY}_1"]
    saved = job.of(Checkpoint)[-1]
    assert not HotFolder(job.directory, ARRAY).over()
    job.hurry()
    again = job.start(1, restart=1)
    assert again.end() == 0, again.errors
    assert job.of(Hello)[-1].step == saved.step
    assert [bye.reason for bye in job.of(Bye)] == ["moved", "signal", "finished"]
    assert job.asked()[1:] == [CANCELLED]
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_script_that_has_enough(tmp_path: Path) -> None:
    """Protects from training anew what the script itself ended, early say: no block takes the job over, those that are
    about to join included."""
    job = LaunchedJob(tmp_path / "job", "--enough", "600")
    try:
        two(job)
        third = job.start(2)
        job.order(0, 1, 2)
        while not third.ranks():
            assert not third.ended(), third.errors
            time.sleep(0.05)
        job.hurry()
        assert job.end() == [0, 0, 0], job.errors()
        assert (job.terms(), [bye.reason for bye in job.of(Bye)]) == (1, ["stopped"])
        assert job.asked() == [CANCELLED]
        assert HotFolder(job.directory, ARRAY).over()
    finally:
        job.kill()


@pytest.mark.slow
def test_a_block_that_is_not_wanted_leaves_before_it_trains(job: LaunchedJob) -> None:
    """Protects those who train, and the GPUs: Slurm starts a task that no order names, and it ends at once."""
    job.start(0)
    job.wait(First)
    job.order(0)
    stray = job.start(3)
    assert stray.end() == 0
    assert "task 3 is not wanted now; those that are: 0" in stray.errors
    job.hurry()
    assert job.blocks[0].end() == 0, job.errors()
    assert [m.blocks for m in job.of(Membership)] == [(0,)]
    job.assert_as_undisturbed()

"""Blocks as users start them, each by an `ones-run` of its own: what dies comes back, and what has ended stays ended.

The other tests of this folder fork node launchers; here `ones-run` is part of it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ones_wrapper.launch.supervise import read_tries
from ones_wrapper.membership.files import HotFolder
from ones_wrapper.protocol import Bye, First, Hello, Membership
from tests.waiting import until
from tests.wrapper.launch.tools import asked, on_node
from tests.wrapper.membership.blocks import ARRAY, Job
from tests.wrapper.membership.forked import ForkedBlock
from tests.wrapper.preloaded import Started
from tests.wrapper.runs import TRAIN, children, ranks_of

CANCELLED = f"scancel --state=PENDING {ARRAY}"


class LaunchedBlock(ForkedBlock):
    """One block: `ones-run`, its node launcher and the ranks."""

    def __init__(self, arguments: list[str], env: dict[str, str], log: Path) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))} | env
        self._log, self._code = log, -1
        self._process = Started(arguments, env, log)
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
        return [rank for launcher in self.launchers() for rank in ranks_of(launcher)]

    def processes(self) -> list[int]:
        return [self.pid, *self.launchers(), *self.ranks()]


class LaunchedJob(Job):
    def __init__(self, directory: Path, *arguments: str) -> None:
        super().__init__(directory, "--step-ms", "80", *arguments, epochs=60)
        self._node = on_node(directory)

    def start(self, task: int, ranks: int = 1, restart: int = 0) -> LaunchedBlock:
        env = {
            **self._node, **self.environment(task, restart), "SLURM_ARRAY_TASK_MIN": "0",
            "SLURM_JOB_ID": str(ARRAY + task + 1),
        }  # fmt: skip
        arguments = ["--blocks", f"--gpus-per-node={ranks}", str(TRAIN), *self.arguments]
        block = LaunchedBlock(arguments, env, self.directory / f"log-{len(self.blocks)}")
        self.blocks.append(block)
        return block


@pytest.fixture
def job(tmp_path: Path, kept: Callable[[Job], LaunchedJob]) -> LaunchedJob:
    return kept(LaunchedJob(tmp_path / "job"))


def two(job: LaunchedJob) -> tuple[LaunchedBlock, LaunchedBlock, Membership]:
    """Tasks 0 and 1 train together, the first leads."""
    first = job.start(0)
    job.wait(First)
    job.order(0, 1)
    second = job.start(1)
    return first, second, job.wait_for(0, 1)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("leader", [True, False])
def test_a_block_whose_rank_was_killed_comes_back(job: LaunchedJob, leader: bool) -> None:
    """It joins again by itself, without a requeue, and only it counts the failure; the other goes on meanwhile, with
    the same `ones-run` and node launcher. At the end what waits is cancelled, once."""
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
    job.finish()
    task = 0 if leader else 1
    assert read_tries(job.directory, ARRAY + 1 + task, task).restarts == 1
    assert not (job.directory / f"tries-{1 - task}.json").exists()
    assert asked(job.directory) == [CANCELLED]
    assert job.terms() == 2
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_script_that_has_enough(tmp_path: Path, kept: Callable[[Job], LaunchedJob]) -> None:
    """Early, say: no block takes the job over, those that are about to join included."""
    job = kept(LaunchedJob(tmp_path / "job", "--enough", "300"))
    two(job)
    third = job.start(2)
    job.order(0, 1, 2)
    until(third.ranks, job.errors)
    job.finish()
    (bye,) = job.of(Bye)
    assert (job.terms(), bye.reason) == (1, "finished") and bye.step < 350, bye
    assert asked(job.directory) == [CANCELLED] and HotFolder(job.directory, ARRAY).over()

"""What survivors have in memory when others die is written, wherever in an epoch they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ones_wrapper.checkpoint import Checkpoints
from ones_wrapper.membership import blocks, coordinator, link, rescue
from ones_wrapper.membership.agent import NodeAgent
from ones_wrapper.network.server import StoreServer
from ones_wrapper.process.exit_codes import DEVICE_FAILED
from ones_wrapper.protocol import First, Hello
from ones_wrapper.run import changing
from ones_wrapper.run.run import Run
from tests.marks import NIGHTLY, nightly
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once

EPOCHS, SAMPLES, GAMMA = 180, 16, 0.99


@pytest.fixture
def job(tmp_path: Path, kept: Callable[[Job], Job]) -> Job:
    """Every step is an epoch: ranks meet at an epoch's end as often as in a step."""
    return kept(Job(tmp_path / "job", "--samples", str(SAMPLES), "--gamma", str(GAMMA), epochs=EPOCHS))


@pytest.mark.slow
def test_a_death_at_the_end_of_an_epoch(job: Job) -> None:
    """Neither an epoch nor the scheduler's step after it is done twice."""
    job.start(0)
    job.wait(First)
    for cycle in range(4 if NIGHTLY else 2):
        job.order(cycle, cycle + 1)
        job.start(cycle + 1)
        both = job.wait_for(cycle, cycle + 1)
        time.sleep(0.1 + 0.007 * cycle)
        os.kill(job.blocks[cycle].ranks()[0], signal.SIGKILL)  # the leader's
        job.wait_for(cycle + 1, after=both.generation)
        assert job.of(Hello)[-1].step >= both.step, f"the rescue was not used: {job.errors()}"
    job.finish(-1)
    assert_exactly_once(job.directory, EPOCHS, SAMPLES)
    torch.testing.assert_close(job.parameters(), job.undisturbed(EPOCHS, SAMPLES, GAMMA), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_two_threads_that_notice_a_loss(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the script's thread notices while the watch's, which did not wait for it any longer, writes:
    its exit must not cut the other's checkpoint short, for which the next leader would wait."""
    is_peer_lost, write = changing.is_peer_lost, Checkpoints.rescue

    def slow(error: BaseException) -> bool:
        time.sleep(2.5)
        return is_peer_lost(error)

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(2.5)
        return write(*arguments)

    monkeypatch.setattr(link, "MAIN_S", 0.1)
    monkeypatch.setattr(rescue, "WAIT_S", 120.0)
    monkeypatch.setattr(changing, "is_peer_lost", slow)
    monkeypatch.setattr(Checkpoints, "rescue", write_slowly)
    both = job.begin(0, 1)
    time.sleep(0.3)
    killed = time.monotonic()
    job.blocks[0].kill()
    job.wait_for(1, after=both.generation)
    assert time.monotonic() - killed < 60.0, job.errors()
    assert job.of(Hello)[-1].step >= both.step, f"the rescue was not used: {job.errors()}"
    job.finish(-1)


WROTE = "was written by one rank"


def late(patch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    """Each call takes so long before it begins, in forked blocks too."""
    act = getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return act(*arguments)

    patch.setattr(owner, name, slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "victim"),
    [("the error", 0), ("the error", 2), *(nightly(*one) for one in product(("the board", "the watch", ""), range(3)))],
)
def test_a_rank_of_the_only_block_dies(job: Job, monkeypatch: pytest.MonkeyPatch, first: str, victim: int) -> None:
    """gloo's error, which a script may raise too, nearly always comes before the board says who is gone. The other
    ranks ended by it, and what they had in memory was lost."""
    if first == "the error":
        late(monkeypatch, NodeAgent, "_drop", 0.7)
        late(monkeypatch, StoreServer, "_leave", 0.7)
    elif first:
        late(monkeypatch, changing, "is_peer_lost", 0.5 if first == "the board" else 1.5 * link.MAIN_S)
    block = job.start(0, ranks=3)
    job.wait(First)
    os.kill(block.ranks()[victim], signal.SIGKILL)
    assert block.end() == 128 + signal.SIGKILL
    assert block.errors.count(WROTE) == 1, block.errors
    monkeypatch.undo()
    job.start(0, ranks=3)  # as `ones-run` does
    job.wait(Hello, lambda hello: hello.step > 0)
    job.finish(-1)
    assert_exactly_once(job.directory, EPOCHS, SAMPLES)
    torch.testing.assert_close(job.parameters(), job.undisturbed(EPOCHS, SAMPLES, GAMMA), rtol=1e-9, atol=1e-12)


PEERS = "Connection refused by the host of the data"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, nightly(1), None])
def test_a_script_s_own_error_is_no_loss(job: Job, monkeypatch: pytest.MonkeyPatch, rank: int | None) -> None:
    """Of one rank, whose others get gloo's error, or of all, even if it reads like that of a lost peer: nothing is
    written, and the job ends."""
    monkeypatch.setattr(blocks, "LOST_S", 2.0 if rank is None else 120.0)
    commit = Run.commit

    def fail(run: Run, total: int) -> None:
        commit(run, total)
        if run.progress.step == 5 and rank in (None, run.rank):
            raise RuntimeError(PEERS if rank is None else "no such layer")

    monkeypatch.setattr(Run, "commit", fail)
    block = job.start(0, ranks=3)
    began = time.monotonic()
    assert block.end() == 1 and WROTE not in block.errors, block.errors
    assert time.monotonic() - began < 60.0  # the others learn of it at once


@pytest.mark.slow
def test_a_rank_whose_gpu_fails_takes_nobody_s_steps(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by itself, and the ranks start again."""
    monkeypatch.setattr(coordinator, "DEAD_S", 3.0)
    commit = Run.commit

    def fail(run: Run, total: int) -> None:
        commit(run, total)
        if run.progress.step == 5 and run.rank == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(Run, "commit", fail)
    block = job.start(0, ranks=3)
    assert block.end() == DEVICE_FAILED and block.errors.count(WROTE) == 1, block.errors

"""What survivors have in memory when others die is written, wherever in an epoch they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ones_wrapper.checkpoint import Checkpoints
from ones_wrapper.membership import link, rescue
from ones_wrapper.protocol import First, Hello
from ones_wrapper.run import changing
from tests.marks import NIGHTLY
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

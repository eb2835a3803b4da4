"""What survivors have in memory when others die is written, wherever in an epoch they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ones_wrapper.protocol import First, Hello
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once

EPOCHS, SAMPLES, GAMMA = 300, 16, 0.99


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Every step is an epoch: ranks meet at an epoch's end as often as in a step."""
    job = Job(tmp_path / "job", "--samples", str(SAMPLES), "--gamma", str(GAMMA), epochs=EPOCHS)
    yield job
    job.kill()


@pytest.mark.slow
def test_a_death_at_the_end_of_an_epoch(job: Job) -> None:
    """Protects the work since the last checkpoint; neither an epoch nor the scheduler's step after it is done twice."""
    job.start(0)
    job.wait(First)
    for cycle in range(4):
        job.order(cycle, cycle + 1)
        job.start(cycle + 1)
        both = job.wait_for(cycle, cycle + 1)
        time.sleep(0.1 + 0.007 * cycle)
        os.kill(job.blocks[cycle].ranks()[0], signal.SIGKILL)  # the leader's
        job.wait_for(cycle + 1, after=both.generation)
        assert job.of(Hello)[-1].step >= both.step, f"the rescue was not used: {job.errors()}"
    job.hurry()
    assert job.blocks[-1].end() == 0, job.errors()
    assert_exactly_once(job.directory, EPOCHS, SAMPLES)
    torch.testing.assert_close(job.parameters(), job.undisturbed(EPOCHS, SAMPLES, GAMMA), rtol=1e-9, atol=1e-12)

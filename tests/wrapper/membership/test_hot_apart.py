"""Jobs whose ranks train models of their own grow, move and shrink by blocks while they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ones_wrapper.protocol import Checkpoint, First, Hello, Membership
from tests.wrapper.membership import apart_train
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once
from tests.wrapper.strategies import script
from tests.wrapper.strategies.apart_script import SAMPLES, SEED, data

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
"""By day blocks of ranks with one model come, go and are killed (`test_hot`, `test_loss`)."""

EPOCHS = 30


def plain() -> list[float]:
    """Momentum SGD in one process, on the same batches."""
    model, (x, y) = apart_train.model_of(), data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=apart_train.RATE, momentum=apart_train.MOMENTUM)
    for chosen in script.steps(SAMPLES, apart_train.BATCH, EPOCHS, SEED):
        optimizer.zero_grad()
        (model(x[chosen]) - y[chosen]).square().mean().backward()
        optimizer.step()
    return script.flat(model.parameters())


@pytest.mark.parametrize("strategy", ["lsgd", "decentlam"])
def test_blocks_come_and_go(strategy: str, tmp_path: Path) -> None:
    """Newcomers get the leader, or the means, and those who stay go on from it. In a ring of up to three ranks
    DecentLaM is momentum SGD on the whole batch, so there what one process ends with is found again."""
    job = Job(tmp_path / "job", "--strategy", strategy, epochs=EPOCHS, script=Path(apart_train.__file__))
    try:
        job.start(0)
        job.wait(First)
        job.order(0, 1)
        job.start(1, ranks=2)
        grown = job.wait_for(0, 1)
        job.wait(Checkpoint, lambda report: report.step > grown.step)
        job.order(1)
        moved = job.wait_for(1)
        assert (grown.world, moved.world) == (3, 2)
        job.hurry()
        assert job.end() == [0, 0], job.errors()
    finally:
        job.kill()
    assert_exactly_once(job.directory, EPOCHS, SAMPLES)
    tolerance = 1e-9 if strategy == "decentlam" else 0.02
    assert torch.load(job.directory / "out.json") == pytest.approx(plain(), abs=tolerance)


@pytest.mark.parametrize("strategy", ["lsgd", "decentlam"])
def test_the_others_go_on_when_one_is_killed(strategy: str, tmp_path: Path) -> None:
    """From the last checkpoint: a rank may be ahead of the one that is lost, and so cannot say what that one did."""
    job = Job(tmp_path / "job", "--strategy", strategy, epochs=EPOCHS, script=Path(apart_train.__file__))
    try:
        job.start(0)
        job.wait(First)
        job.order(0, 1, 2)
        job.start(1), job.start(2)
        whole = job.wait_for(0, 1, 2)
        job.wait(Checkpoint, lambda report: report.step > whole.step)
        job.blocks[1].kill()
        job.wait(Membership, lambda report: report.generation > whole.generation and report.world == 2)
        job.hurry()
        assert [block.end() for block in (job.blocks[0], job.blocks[2])] == [0, 0], job.errors()
    finally:
        job.kill()
    assert whole.step < job.of(Hello)[-1].step in [report.step for report in job.of(Checkpoint)]
    assert_exactly_once(job.directory, EPOCHS, SAMPLES)
    tolerance = 1e-9 if strategy == "decentlam" else 0.02
    assert torch.load(job.directory / "out.json") == pytest.approx(plain(), abs=tolerance)

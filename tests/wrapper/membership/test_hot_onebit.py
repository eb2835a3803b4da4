"""A job of 1-bit LAMB grows and shrinks by blocks while it trains, and its residual with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ones_wrapper.membership.coming import LOST
from ones_wrapper.protocol import Checkpoint, First, Membership, Throughput
from ones_wrapper.strategies.onebit_lamb.onebit import OneBitMean
from tests.wrapper.membership import onebit
from tests.wrapper.membership.blocks import Job, hellos
from tests.wrapper.runs import assert_exactly_once

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_the_residual_travels_to_new_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects what ranks kept back: as one vector it reaches old and new ranks alike at each change of the compressed
    phase. A block dies in an exchange, within the step of the optimizers: nobody writes that state, and all go on from
    the last checkpoint. An order's batch is not taken there. All end with the same model, which has learnt."""
    job = Job(tmp_path / "job", epochs=60, script=Path(onebit.__file__))
    now, exchange = tmp_path / "now", OneBitMean.__call__

    def dies(mean: OneBitMean, *vectors: torch.Tensor) -> Any:
        if now.exists() and os.environ["SLURM_ARRAY_TASK_ID"] == "2":
            time.sleep(1.0)  # the others are in the exchange by then
            for pid in (os.getppid(), os.getpid()):
                os.kill(pid, signal.SIGKILL)
        return exchange(mean, *vectors)

    monkeypatch.setattr(OneBitMean, "__call__", dies)  # of forked blocks too
    try:
        job.start(0)
        job.wait(First)
        job.wait(Throughput, lambda report: report.step > 12)
        job.order(0, 1)
        job.start(1, ranks=2)
        grown = job.wait_for(0, 1)
        job.wait(Throughput, lambda report: report.step > grown.step + 3)
        job.order(0, 1, 2)
        job.start(2)
        four = job.wait_for(0, 1, 2)
        assert four.world == 4
        job.blocks[0].signal(signal.SIGUSR1)
        kept = job.wait(Checkpoint, lambda one: one.step > four.step)
        job.wait(Throughput, lambda report: report.step > kept.step + 3)
        now.touch()
        left = job.wait(Membership, lambda m: m.generation > four.generation and m.world == 3)
        assert left.why == LOST and left.step == hellos(job)[-1] == job.of(Checkpoint)[-1].step
        assert "written by one rank" not in job.errors()
        number = job.order(1, batch=24)
        assert job.wait_for(1, after=left.generation).batch == onebit.BATCH
        job.hurry()
        job.end()
        assert [block.end() for block in job.blocks[:2]] == [0, 0], job.errors()
    finally:
        job.kill()
    assert f"order {number}: the batch stays {onebit.BATCH}, which must not change now" in job.errors()
    assert_exactly_once(job.directory, job.epochs, onebit.SAMPLES)
    ends = [torch.load(path) for path in job.directory.glob("end-*.pt")]
    assert len(ends) == 2
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1][0] > 0.7
    kept: dict[tuple[int, int], list[torch.Tensor]] = {}
    for path in job.directory.glob("seen-*.pt"):
        for step, world, residual in torch.load(path):
            kept.setdefault((step, world), []).append(residual)
    changes = [(world, found) for (_, world), found in sorted(kept.items())]
    worlds = [world for world, _ in changes]
    assert worlds[:3] == [1, 3, 4] and worlds[-2:] == [3, 2]
    for world, found in changes:
        assert len(found) == world and all(torch.equal(found[0], other) for other in found)
    # Alone a rank keeps nothing back, as the first block did before others joined it.
    assert [bool(found[0].any()) for _, found in changes[1:4]] == [False, True, True]
    assert bool(changes[-1][1][0].any())

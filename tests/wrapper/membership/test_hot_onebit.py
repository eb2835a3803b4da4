"""A job of 1-bit LAMB grows and shrinks by blocks while it trains, and its residual with it."""

from __future__ import annotations

from pathlib import Path

import torch

from ones_wrapper.protocol import First, Throughput
from tests.wrapper.membership import onebit
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once


def test_the_residual_travels_to_new_blocks(tmp_path: Path) -> None:
    """Protects what ranks kept back: as one vector it reaches old and new ranks alike at each change of the compressed
    phase, and all of them end with the same model, which has learnt."""
    job = Job(tmp_path / "job", epochs=60, script=Path(onebit.__file__))
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
        job.wait(Throughput, lambda report: report.step > four.step + 3)
        job.order(1)
        job.wait_for(1)
        job.hurry()
        assert job.end() == [0, 0, 0], job.errors()
    finally:
        job.kill()
    assert_exactly_once(job.directory, job.epochs, onebit.SAMPLES)
    ends = [torch.load(path) for path in job.directory.glob("end-*.pt")]
    assert len(ends) == 2
    state, score, seen = ends[0]
    assert torch.equal(state, ends[1][0])
    assert score[0] > 0.7
    assert ends[1][2] == seen
    kept = {world: residual for _, world, residual in seen}
    assert set(kept) == {3, 4, 2}
    # Alone, the first block kept nothing back.
    assert not any(kept[3])
    assert any(kept[4]) and any(kept[2])

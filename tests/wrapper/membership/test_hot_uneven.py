"""Uneven ranks in blocks: shares follow the speeds of whoever trains now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ones_wrapper.protocol import First, Throughput
from tests.wrapper.membership.blocks import Job

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_shares_are_measured_anew_as_blocks_come_and_go(tmp_path: Path) -> None:
    """1 → 2 → 3 → 1 ranks while it trains: rank 1, which is slow, gets less than others, each sample is used once and
    the parameters are those of one process."""
    job = Job(tmp_path / "job", "--uneven", "--sample-ms", "2", "--step-ms", "0", epochs=60)
    try:
        job.start(0)
        job.wait(First)
        for tasks in ((0, 1), (0, 1, 2)):
            job.start(tasks[-1])
            job.order(*tasks)
            changed = job.wait_for(*tasks)
            job.wait(Throughput, lambda report, step=changed.step: report.step > step + 25)  # type: ignore[misc]
        job.order(0)
        job.wait_for(0, after=changed.generation)
        job.hurry()
        assert job.end() == [0, 0, 0], job.errors()
    finally:
        job.kill()
    job.assert_as_undisturbed()
    lines = [json.loads(text) for path in job.directory.glob("trace-*.jsonl") for text in path.read_text().splitlines()]
    for world in (2, 3):
        steps = [line for line in lines if line.get("world") == world and "samples" in line]
        last = sorted({line["step"] for line in steps})[-6:]
        used = [
            sum(len(line["samples"]) for line in steps if line["rank"] == r and line["step"] in last) for r in (0, 1)
        ]
        assert used[1] < 0.8 * used[0], f"{world} ranks: {used}"

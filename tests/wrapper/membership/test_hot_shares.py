"""Equal shares in blocks: a script gathers its batch over whoever trains now."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from ones_wrapper.protocol import Membership
from tests.wrapper.membership.blocks import SAMPLES, Job

pytestmark = pytest.mark.slow


def test_shares_stay_equal_as_blocks_come_and_go(tmp_path: Path) -> None:
    """1 → 2 → 1 ranks while it trains: in each step all ranks have equally many samples, none is used twice in an
    epoch, and less than one of each rank is left out."""
    job = Job(tmp_path / "job", "--gathers")
    job.move()
    shares: dict[tuple[int, int], list[int]] = defaultdict(list)
    used: dict[int, list[int]] = defaultdict(list)
    for path in job.directory.glob("trace-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if "samples" in line:
                shares[line["epoch"], line["step"]].append(len(line["samples"]))
                used[line["epoch"]] += line["samples"]
    assert {len(each) for each in shares.values()} == {1, 2}
    assert all(len(set(each)) == 1 for each in shares.values())
    assert len(used) == job.epochs
    for samples in used.values():
        assert SAMPLES - 2 < len(samples) == len(set(samples)) <= SAMPLES


def test_a_batch_that_was_asked_for_ahead_is_used_once(tmp_path: Path) -> None:
    """1 → 2 → 1 ranks while the script holds its next batch: no sample of it is left out or used twice."""
    job = Job(tmp_path / "job", "--ahead")
    job.move()
    job.assert_as_undisturbed()
    steps_of_an_epoch = -(-SAMPLES // 16)
    assert [change.step % steps_of_an_epoch for change in job.of(Membership)] == [0, 0, 0]

"""A ring's ranks change while it trains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_wrapper.protocol import Bye, First, Membership
from tests.cluster.paths import REPOSITORY
from tests.wrapper.forked import Team
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once
from tests.wrapper.strategies import ring
from tests.wrapper.strategies.ring_script import EPOCHS, SAMPLES
from tests.wrapper.strategies.rows import HERE
from tests.wrapper.strategies.script import HURRY, LATER_MS, OUT, PACE_MS

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / "job"
    env = {OUT: str(folder / "out.json"), HURRY: str(folder / "hurry"), PACE_MS: "600", LATER_MS: "1000"}
    job = Job(folder, script=HERE / "ring_script.py", PYTHONPATH=str(REPOSITORY), **env)
    yield job
    job.kill()


def test_blocks_join_and_leave_a_ring(teams: dict[int, Team], job: Job) -> None:
    """1 → 2 → 4 → 1 ranks without a restart, the same ring object: dense attention's parameters, each sample once. An
    order of three ranks, which the sequences do not split over, leaves training as it is."""
    job.start(0)
    job.wait(First)
    job.order(0, 1)
    job.start(1)
    assert job.wait_for(0, 1).world == 2
    job.start(2)
    job.order(0, 1, 2)
    time.sleep(1.0)
    job.start(3)
    job.order(0, 1, 2, 3)
    assert job.wait_for(0, 1, 2, 3).world == 4
    job.order(0)
    job.wait_for(0, after=2)
    job.hurry()
    assert job.end() == [0, 0, 0, 0], job.errors()
    assert [bye.reason for bye in job.of(Bye)] == ["finished"]
    assert [one.world for one in job.of(Membership)] == [1, 2, 4, 1], job.errors()
    assert_exactly_once(job.directory, EPOCHS, SAMPLES)
    found = json.loads((job.directory / "out.json").read_text())
    (wanted,) = teams[1].run(ring.expected)
    ring.ROW.check(found, wanted)

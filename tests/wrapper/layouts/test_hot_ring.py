"""A ring's ranks change while it trains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_wrapper.protocol import Bye, First, Membership
from tests.wrapper.forked import Team
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once
from tests.wrapper.strategies import ring
from tests.wrapper.strategies.ring_script import EPOCHS, SAMPLES

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    script = Path(ring.__file__).with_name("ring_blocks_script.py")
    job = Job(
        tmp_path / "job", "--step-ms", "600", epochs=EPOCHS, script=script, PYTHONPATH=str(Path(__file__).parents[3])
    )
    yield job
    job.kill()


def test_blocks_join_and_leave_a_ring(job: Job) -> None:
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
    found = json.loads((job.directory / "out.json").read_text())["parameters"]
    team = Team(1)
    try:
        (wanted,) = team.run(ring.expected)
    finally:
        team.close()
    assert max(abs(one - other) for one, other in zip(found, wanted, strict=True)) < 1e-9

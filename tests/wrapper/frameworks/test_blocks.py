"""Frameworks' jobs of blocks: each change begins a term, which the framework takes for a new start."""

from __future__ import annotations

import importlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ones_wrapper.protocol import Bye, Checkpoint, First, Hello, Membership, decode_spec
from tests.marks import nightly
from tests.wrapper.membership.blocks import ARRAY, Job
from tests.wrapper.runs import assert_exactly_once

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "blocks_script.py"
EPOCHS, SAMPLES = 30, 45


@pytest.fixture(params=[nightly("transformers"), "accelerate", nightly("lightning")])
def framework(request: pytest.FixtureRequest) -> str:
    """One that is installed; blocks that are forked find it imported."""
    name: str = request.param
    pytest.importorskip(name)
    importlib.import_module(f"ones_wrapper.frameworks.{name}")
    return name


def job_of(directory: Path, framework: str, *more: str) -> Job:
    return Job(directory, "--step-ms", "60", *more, framework, epochs=EPOCHS, script=SCRIPT)


def steps(job: Job) -> list[dict[str, Any]]:
    """What each step showed, as it counted: one that was lost was made again."""
    lines = [json.loads(line) for line in (job.directory / "out.json.steps").read_text().splitlines()]
    return [*{line["step"]: line for line in lines}.values()]


def test_a_trainer_grows_loses_a_block_and_outlives_its_first(tmp_path: Path, framework: str) -> None:
    """Protects a framework's job of blocks: 1 → 2 ranks, one is killed in a step, 1 → 3, and then the first leaves.
    Every sample is used once, with the learning rates and the result of a job that nobody disturbed. What the launcher
    tells a script of the ranks is true of all of them, before its first line."""
    still, moved = (job_of(tmp_path / name, framework) for name in ("still", "moved"))
    try:
        moved.start(0)
        moved.wait(First)
        assert not decode_spec((moved.directory / "spec.json").read_bytes()).hot
        moved.start(1)
        moved.order(0, 1)
        grown = moved.wait_for(0, 1)
        moved.wait(First, lambda report: report.step > grown.step)
        time.sleep(0.3)
        moved.blocks[1].kill()
        alone = moved.wait_for(0, after=grown.generation)
        saved = {grown.step} | {one.step for one in moved.of(Checkpoint)}  # of the term, or behind its training
        assert alone.why == "lost" and alone.step in saved
        moved.start(2, ranks=2)
        moved.order(0, 2)
        again = moved.wait_for(0, 2)
        begun = re.findall("begins with 3 ranks.*", "".join(block.errors for block in moved.blocks))
        assert begun == [f"begins with 3 ranks, start {moved.terms() - 1} of run {ARRAY}"] * 3
        moved.order(2)
        shrunk = moved.wait_for(2)
        moved.hurry()
        assert [moved.blocks[0].end(), moved.blocks[2].end()] == [0, 0], moved.errors()
        still.hurry()
        still.start(0)
        assert still.end() == [0], still.errors()
    finally:
        still.kill()
        moved.kill()
    assert [one.world for one in moved.of(Membership)] == [1, 2, 1, 3, 2], moved.errors()
    assert [hello.step for hello in moved.of(Hello)] == [0, grown.step, alone.step, again.step, shrunk.step]
    assert [bye.reason for bye in moved.of(Bye)] == ["moved", "error", "moved", "moved", "finished"], moved.errors()
    assert all(0.0 < one.pause_s < 60.0 and not one.bytes for one in (grown, again, shrunk))
    assert_exactly_once(moved.directory, EPOCHS, SAMPLES)
    torch.testing.assert_close(moved.parameters(), still.parameters(), rtol=1e-9, atol=1e-12)
    for one, other in zip(steps(moved), steps(still), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_a_block_that_dies_while_the_script_loads_is_not_waited_for(tmp_path: Path) -> None:
    """Protects a Trainer's job in the minutes before it trains: the ranks have met, the script loads, and a block dies.
    The other notices, though nobody is in a collective, and begins the next term."""
    pytest.importorskip("accelerate")
    loads = tmp_path / "loads"
    job = job_of(tmp_path / "job", "accelerate", "--loads", str(loads))
    try:
        job.start(0)
        job.wait(First)
        loads.touch()
        job.start(1)
        job.order(0, 1)
        see(job, 1, "begins with 2 ranks")
        job.blocks[1].kill()
        killed = time.monotonic()
        see(job, 0, "other blocks were lost")
        assert time.monotonic() - killed < 60.0
        loads.unlink()
        job.wait_for(0, after=0)
        job.hurry()
        assert job.blocks[0].end() == 0, job.errors()
    finally:
        job.kill()
    assert_exactly_once(job.directory, EPOCHS, SAMPLES)


def see(job: Job, block: int, text: str) -> None:
    while text not in job.blocks[block].errors:
        assert not job.blocks[block].ended(), job.errors()
        time.sleep(0.02)

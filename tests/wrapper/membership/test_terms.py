"""Jobs of blocks whose state cannot move from memory to memory: each change begins a term from a checkpoint."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ones_wrapper.group import TorchGroup
from ones_wrapper.membership import connections
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.plan import Plan
from ones_wrapper.protocol import Bye, Checkpoint, First, Hello, Membership
from tests.wrapper.forked import Team
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once
from tests.wrapper.strategies import fused, optimus


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "job", "--sharded", "--step-ms", "60")
    yield job
    job.kill()


def worlds(job: Job) -> list[int]:
    return [one.world for one in job.of(Membership)]


@pytest.mark.slow
def test_a_sharded_model_grows_and_shrinks(job: Job) -> None:
    """Protects every sample and the result of a model sharded by FSDP2: it trains on one rank, on two, and on one
    again, of another block; each change costs one checkpoint, and no start of a block."""
    job.start(0)
    job.wait(First)
    job.start(1)
    job.order(0, 1, batch=32)
    grown = job.wait_for(0, 1)
    job.order(1)
    shrunk = job.wait_for(1)
    job.hurry()
    assert job.end() == [0, 0], job.errors()
    assert worlds(job) == [1, 2, 1]
    assert [bye.reason for bye in job.of(Bye)] == ["moved", "moved", "finished"]
    assert [hello.step for hello in job.of(Hello)] == [0, grown.step, shrunk.step]
    assert {one.step for one in job.of(Checkpoint)} >= {grown.step, shrunk.step}
    assert (grown.order, grown.batch, grown.bytes) == (1, 32, 0)
    assert 0.0 < grown.pause_s < 20.0
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
def test_blocks_that_are_lost_cost_steps_and_no_sample(job: Job) -> None:
    """Protects a sharded model, of which no rank has the whole: a block that dies as it waits for its term disturbs
    nobody; after one that dies as it trains the other goes on from the last checkpoint, and takes up the next."""
    job.start(0)
    job.wait(First)
    job.order(0)
    waiting = job.start(1)
    while "waits for the next term" not in waiting.errors:
        assert not waiting.ended(), waiting.errors
        time.sleep(0.02)
    waiting.kill()
    job.start(2)
    job.order(0, 2)
    two = job.wait_for(0, 2)
    time.sleep(0.3)
    job.blocks[0].kill()
    alone = job.wait_for(2)
    assert alone.why == "lost" and alone.step == two.step
    job.start(3)
    job.order(2, 3)
    job.wait_for(2, 3)
    job.hurry()
    assert [block.end() for block in job.blocks[2:]] == [0, 0], job.errors()
    assert worlds(job) == [1, 2, 1, 2]
    job.assert_as_undisturbed()


@pytest.mark.slow
def test_the_last_checkpoint_counts_where_the_first_block_dies_in_the_change(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects a job in the moment between two terms: the block that is to lead the next is gone, and another does."""
    monkeypatch.setattr("ones_wrapper.membership.coming.LEAST_S", 3.0)  # of forked blocks too
    job.start(0)
    job.wait(First)
    job.start(1)
    job.order(0, 1)
    job.wait(Bye)
    job.blocks[0].kill()
    job.hurry()
    assert job.blocks[1].end() == 0, job.errors()
    assert job.of(Membership)[-1].blocks == (1,)
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_slow_block_is_waited_for_as_a_term_begins(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects growth on a slow machine: forming the term's group may take as long as blocks wait for each other."""
    begin = connections.begin

    def late(group: TorchGroup, board: Board, plan: Plan, rank: int, within_s: float) -> None:
        time.sleep(3.0 * (rank > 0))
        begin(group, board, plan, rank, within_s)

    monkeypatch.setattr(connections, "FORM_S", 1.0)  # of forked blocks too
    monkeypatch.setattr(connections, "begin", late)
    job.start(0)
    job.wait(First)
    job.start(1)
    job.order(0, 1)
    job.wait_for(0, 1)
    job.hurry()
    assert job.end() == [0, 0], job.errors()
    assert worlds(job) == [1, 2] and "did not find each other" not in job.errors()
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("its", "ranks"), [(optimus, 3), (fused, 1)], ids=["mesh", "fused"])
def test_a_strategy_grows_loses_a_block_and_shrinks(
    teams: dict[int, Team], tmp_path: Path, its: ModuleType, ranks: int
) -> None:
    """Protects Optimus-2D and fusion: one rank becomes a mesh of 2 × 2 by a block of three, which cannot train alone,
    or two that train all members; one is lost, and comes back; then there is one again."""
    directory = tmp_path / "job"
    more = {"HURRY": str(directory / "hurry"), "OUT": str(directory / "out.json"), "PACE_MS": "300", "SQUARES": "1"}
    name = str(its.__name__).rpartition(".")[2]
    script = Path(str(its.__file__)).with_name(f"{name}_script.py")
    job = Job(directory, script=script, PYTHONPATH=str(Path(__file__).parents[3]), **more)
    try:
        job.start(0)
        job.wait(First)
        job.start(1, ranks)
        job.order(0, 1)
        grown = job.wait_for(0, 1)
        job.blocks[0].kill()
        if ranks > 1:
            while "waiting for other blocks of the job" not in job.blocks[1].errors:
                assert not job.blocks[1].ended(), job.errors()
                time.sleep(0.02)
        else:
            job.wait_for(1)
        job.start(0, restart=1)
        grown = job.wait_for(0, 1, after=grown.generation)
        job.order(0)
        job.wait_for(0, after=grown.generation)
        job.hurry()
        assert [block.end() for block in job.blocks[1:]] == [0, 0], job.errors()
    finally:
        job.kill()
    assert worlds(job) == ([1, 4, 4, 1] if ranks == 3 else [1, 2, 1, 2, 1])
    of = importlib.import_module(f"{its.__name__}_script")
    assert_exactly_once(directory, of.EPOCHS, of.SAMPLES)
    (wanted,) = teams[1].run(its.expected)
    found = json.loads((directory / "out.json").read_text())
    assert max(abs(one - other) for one, other in zip(found, wanted, strict=True)) < 1e-9

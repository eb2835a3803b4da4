"""Jobs of blocks whose state cannot move from memory to memory: each change begins a term from a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ones_wrapper.group import TorchGroup
from ones_wrapper.membership import connections
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.plan import Plan
from ones_wrapper.protocol import Bye, Checkpoint, First, Hello, Membership
from tests.waiting import until
from tests.wrapper.forked import Team
from tests.wrapper.membership.blocks import Job, scripted
from tests.wrapper.runs import assert_exactly_once
from tests.wrapper.strategies import fused, fused_script, optimus, optimus_script


@pytest.fixture
def job(tmp_path: Path, kept: Callable[[Job], Job]) -> Job:
    return kept(Job(tmp_path / "job", "--sharded", "--step-ms", "60", ONES_MEMORY=""))


def worlds(job: Job) -> list[int]:
    return [one.world for one in job.of(Membership)]


@pytest.mark.slow
def test_a_sharded_model_grows_and_shrinks(job: Job) -> None:
    """By FSDP2: on one rank, on two, and on one of another block; each change costs one checkpoint, and no start of a
    block."""
    job.start(0)
    job.wait(First)
    job.start(1)
    job.order(0, 1, batch=32)
    grown = job.wait_for(0, 1)
    job.order(1)
    shrunk = job.wait_for(1)
    job.finish()
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
    """No rank has the whole model: a block that dies as it waits for its term disturbs nobody; after one that dies as
    it trains the other goes on from the last checkpoint, and takes up the next."""
    job.start(0)
    job.wait(First)
    job.order(0)
    waiting = job.start(1)
    until(lambda: "waits for the next term" in waiting.errors, job.errors)
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
    job.finish(2, 3)
    assert worlds(job) == [1, 2, 1, 2]
    job.assert_as_undisturbed()


@pytest.mark.slow
def test_the_last_checkpoint_counts_where_the_first_block_dies_in_the_change(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block that is to lead the next term is gone, and another does."""
    monkeypatch.setattr("ones_wrapper.membership.coming.LEAST_S", 3.0)  # of forked blocks too
    job.start(0)
    job.wait(First)
    job.start(1)
    job.order(0, 1)
    job.wait(Bye)
    job.blocks[0].kill()
    job.finish(1)
    assert job.of(Membership)[-1].blocks == (1,)
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_slow_block_is_waited_for_as_a_term_begins(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forming the term's group may take as long as blocks wait for each other."""
    begin = connections.begin

    def late(group: TorchGroup, board: Board, plan: Plan, rank: int, within_s: float) -> None:
        time.sleep(3.0 * (rank > 0))
        begin(group, board, plan, rank, within_s)

    monkeypatch.setattr(connections, "FORM_S", 1.0)  # of forked blocks too
    monkeypatch.setattr(connections, "begin", late)
    job.begin(0, 1)
    job.finish()
    assert worlds(job) == [1, 2] and "did not find each other" not in job.errors()
    job.assert_as_undisturbed()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("its", "script", "ranks", "sizes"),
    [(optimus, optimus_script, 3, [1, 4, 4, 1]), (fused, fused_script, 1, [1, 2, 1, 2, 1])],
    ids=["mesh", "fused"],
)
def test_a_strategy_grows_loses_a_block_and_shrinks(
    teams: dict[int, Team], tmp_path: Path, kept: Callable[[Job], Job], its: ModuleType, script: ModuleType, ranks: int,
    sizes: list[int],
) -> None:  # fmt: skip
    """Optimus-2D and fusion: one rank becomes a mesh of 2 × 2 by a block of three, which cannot train alone, or two
    that train all members; one is lost, and comes back; then there is one again."""
    job = kept(scripted(tmp_path / "job", script, 300, SQUARES="1"))
    grown = job.begin(0, 1, ranks=ranks)
    job.blocks[0].kill()
    if ranks > 1:
        until(lambda: "waiting for other blocks of the job" in job.blocks[1].errors, job.errors)
    else:
        job.wait_for(1)
    job.start(0, restart=1)
    grown = job.wait_for(0, 1, after=grown.generation)
    job.order(0)
    job.wait_for(0, after=grown.generation)
    job.finish(1, 2)
    assert worlds(job) == sizes
    assert_exactly_once(job.directory, script.EPOCHS, script.SAMPLES)
    (wanted,) = teams[1].run(its.expected)
    assert json.loads((job.directory / "out.json").read_text()) == pytest.approx(wanted, abs=1e-9)

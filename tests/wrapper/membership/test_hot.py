"""Blocks of one job join, leave, lead and die while it trains, with real processes: no sample is lost or used twice,
and the result is that of a run which nobody disturbed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ones_wrapper.files.job_io import POLL_S
from ones_wrapper.process.exit_codes import STOP_CODE
from ones_wrapper.protocol import Batch, Bye, Checkpoint, First, Hello, Membership, decode_spec
from tests.marks import nightly
from tests.waiting import until
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once
from tests.wrapper.test_same_result import flat


@pytest.mark.slow
def test_grows_and_shrinks(job: Job) -> None:
    """1 → 2 → 4 → 1 ranks without a restart; the batch follows the membership it was ordered for."""
    job.start(0)
    job.wait(First)
    order = job.order(0, 1, batch=32)
    time.sleep(2 * POLL_S)  # the leader has read the order
    job.start(1)
    grown = job.wait_for(0, 1)
    assert (grown.world, grown.batch, grown.order, grown.why, grown.restarts) == (2, 32, order, "order", (0, 0))
    assert grown.bytes > 0 and grown.ready_s > 0
    assert [b.step for b in job.of(Batch)] == [grown.step]
    job.start(2, ranks=2)
    job.order(0, 1, 2, batch=48)
    four = job.wait_for(0, 1, 2)
    assert (four.world, four.nodes, four.gpus_per_node, four.batch) == (4, 3, 0, 48)
    job.order(0, batch=16)
    alone = job.wait_for(0, after=four.generation)
    assert (alone.world, alone.batch, alone.bytes) == (1, 16, 0)
    job.finish()
    assert [bye.reason for bye in job.of(Bye)] == ["finished"]
    assert [m.generation for m in job.of(Membership)] == [0, 1, 2, 3]
    assert decode_spec((job.directory / "spec.json").read_bytes()).hot
    job.assert_as_undisturbed()


@pytest.mark.slow
def test_epochs_of_two_steps(tmp_path: Path, kept: Callable[[Job], Job]) -> None:
    """Who joins at an epoch's end begins with the next: a script may read its loss behind the batches."""
    job = kept(Job(tmp_path / "job", "--step-ms", "40", "--samples", "32", "--reads-loss", epochs=1000))
    last = job.begin(0, 1)
    for restart in (1, 2, 3):
        job.order(0)
        alone = job.wait_for(0, after=last.generation)
        job.order(0, 1)
        job.start(1, restart=restart)
        last = job.wait_for(0, 1, after=alone.generation)
    job.finish()
    assert_exactly_once(job.directory, job.epochs, 32)


@pytest.mark.slow
def test_a_rank_that_leaves_out_a_batch_is_named(tmp_path: Path, kept: Callable[[Job], Job]) -> None:
    """Its thread for the heartbeats finds it; no further one runs while it trains."""
    job = kept(Job(tmp_path / "job", "--step-ms", "40", "--skips", "70"))
    block = job.start(0, 2)
    job.wait(First)
    for pid in block.ranks():
        os.kill(pid, signal.SIGQUIT)
    until(lambda: block.errors.count("membership/link.py") >= 2, block.stacks)
    assert "script/stuck.py" not in block.errors
    until(lambda: "rank 1 made 1 backward pass(es) fewer than rank 0" in block.errors, block.stacks, 30.0)


@pytest.mark.slow
def test_a_block_that_is_told_to_end_leaves(job: Job) -> None:
    """The time limit of one block, the leader's too, ends its part alone; the last one stops as a plain job does, and
    the next start goes on from its checkpoint."""
    job.begin(0, 1, 2)
    job.blocks[1].signal(signal.SIGTERM)
    left = job.wait_for(0, 2)
    assert left.why == "leaving"
    job.blocks[0].signal(signal.SIGUSR2)
    job.wait_for(2)
    assert [job.blocks[index].end() for index in (0, 1)] == [0, 0]
    job.blocks[2].signal(signal.SIGTERM)
    assert job.blocks[2].end() == STOP_CODE
    saved = job.wait(Checkpoint)
    job.hurry()
    again = job.start(2, restart=1)
    assert again.end() == 0, job.errors()
    assert job.of(Hello)[-1].step == saved.step
    assert [bye.reason for bye in job.of(Bye)] == ["moved", "signal", "finished"]
    job.assert_as_undisturbed()


@pytest.mark.slow
def test_all_are_told_to_end(job: Job) -> None:
    """scancel of the whole job leaves a checkpoint, and no block behind."""
    job.begin(0, 1)
    for block in job.blocks:
        block.signal(signal.SIGTERM)
    codes = job.end()
    assert STOP_CODE in codes and {*codes} <= {STOP_CODE, 0}
    assert job.of(Checkpoint)


@pytest.mark.slow
def test_a_newcomer_that_dies_disturbs_nobody(job: Job) -> None:
    """At any time before the change."""
    job.start(0)
    job.wait(First)
    job.order(0, 1)
    # Slurm counts starts: the same one, which died as its plan was carried out, would wait for 30 s.
    for restart, delay in enumerate((0.3, 0.5, 0.7)):
        block = job.start(1, restart=restart)
        time.sleep(delay)
        block.kill()
    job.start(1, restart=3)
    job.wait_for(0, 1)
    time.sleep(1.0)
    job.finish(0, -1)
    job.assert_as_undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize("leader", [False, nightly(True)])
def test_a_rank_that_hangs_is_found(job: Job, leader: bool) -> None:
    """A node that is gone closes no connection; it is missed within seconds."""
    whole = job.begin(0, 1)
    time.sleep(0.5)
    victim, other = job.blocks if leader else reversed(job.blocks)
    stopped = [*victim.ranks(), victim.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    since = time.monotonic()
    alone = job.wait(Membership, lambda m: m.generation > whole.generation)
    assert time.monotonic() - since < (35.0 if leader else 20.0)
    assert alone.blocks == ((1,) if leader else (0,))
    job.hurry()
    assert other.end() == 0, job.errors()
    victim.kill()
    assert job.of(Hello)[-1].step >= whole.step, job.errors()
    job.assert_as_undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), nightly(("--static",)), nightly(("--views",))])
def test_everything_is_carried(tmp_path: Path, kept: Callable[[Job], Job], options: tuple[str, ...]) -> None:
    """Parameters, moments, averages, scaler, scheduler, learning rate, batch and progress are the same on all ranks
    after any change, while checkpoints are written behind the training; hooks of the script's own stay."""
    job = kept(Job(tmp_path / "job", "--step-ms", "80", *options, script=Path(__file__).parent / "rich.py", epochs=30))
    job.start(0)
    job.wait(First)
    job.order(0, 1, batch=24)
    job.start(1, ranks=2)
    job.wait_for(0, 1)
    job.order(1, 2, batch=40)
    job.start(2)
    job.wait_for(1, 2)
    job.wait(Checkpoint, lambda saved: saved.step > 0)
    job.order(0, 1, 2, batch=16)
    job.start(0, restart=1)
    last = job.wait_for(0, 1, 2)
    assert last.world == 4 and last.batch == 16
    job.finish()
    states = [flat(torch.load(job.directory / f"state-{rank}.pt", weights_only=False)) for rank in range(4)]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for name, value in state.items():
            first = states[0][name]
            same = torch.equal(value, first) if isinstance(value, torch.Tensor) else value == first
            assert same, f"{name}: {value} and {first}"
    assert_exactly_once(job.directory, job.epochs, 50)
    assert [p.name for p in (job.directory / "checkpoints").glob("step-*")]

"""GPUs of two types on a real Slurm: who may moves to the faster one. Slurm's types are real, the GPUs are emulated: a
step sleeps a quarter as long on the faster type."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ones_wrapper.protocol import Hello
from slurm_ones.act.transitions import State
from tests.cluster import Cluster
from tests.endtoend.harness import Harness

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

PACE = {"LIGHT_FAST": "t2,t3", "LIGHT_STEP_S": "0.08", "LIGHT_EPOCHS": "2000"}
"""About half an hour on the slower type."""
SPEEDS = '{ "2080ti" = 1.0, "a100" = 3.0 }'
SOON = "tenure = 10.0"
"""The cost of a move is weighed as ever, but a job need not have run for long before one."""
SLOW = "--gres=gpu:2080ti:1"


@pytest.fixture
def harness(kinds: Cluster) -> Iterator[Harness]:
    harness = Harness(kinds)
    yield harness
    harness.clear()


def test_a_job_moves_to_the_faster_kind(harness: Harness) -> None:
    """Its owner allows both, and the site has guessed that one is faster. Jobs whose owners do not stay, one that asked
    for no type too; `why` names the kind, and what was measured is stored with it."""
    moves = harness.light(SLOW, "--comment=ones: gpus=1 batch=16 kinds=2080ti,a100", **PACE)
    stays = harness.light(SLOW, "--comment=ones: gpus=1 batch=16", **PACE)
    untyped = harness.light("--gres=gpu:1", "--nodelist=t1", "--comment=ones: gpus=1 batch=16", **PACE)
    harness.trains(moves, stays, untyped)
    settings = harness.settings(policy='"ones"', options=SOON, gpu_speeds=SPEEDS)
    with harness.running(settings, "--act"):
        harness.report(moves, 1, lambda report: isinstance(report, Hello), "hello on the faster type")
        job = harness.job(moves)
        assert (job.kind, job.restart) == ("a100", 1) and job.node_list[0] in ("t2", "t3")
        harness.trains(moves, restart=1)
        harness.resize_ended(settings, moves)
        harness.ticks(settings, 3)
    told = harness.why(settings, moves)
    assert "faster_kind" in str(told)
    with harness.store(settings) as store:
        first = store.resizes(moves)[0]
        assert (first.state, first.old_kind, first.new_kind) == (State.DONE, "2080ti", "a100")
        assert {point.kind for point in store.histories([moves])[moves].throughput} == {"2080ti", "a100"}
        for job_id, kind in ((stays, "2080ti"), (untyped, "")):
            assert store.resizes(job_id) == []
            now = harness.job(job_id)
            assert (now.node_list, now.kind, now.restart) == (("t1",), kind, 0)


def test_blocks_move_to_the_faster_kind(harness: Harness) -> None:
    """A job of blocks changes without a requeue: new blocks of the faster type take the place of all."""
    comment = "--comment=ones: gpus=2 batch=16 array=blocks kinds=any"
    job_id = harness.blocks("--gres=gpu:2080ti:2", comment, **PACE)
    harness.membership(job_id, lambda membership: membership.blocks == (0,), "first block")
    assert harness.job(job_id).node_list == ("t1",)
    settings = harness.settings(policy='"ones"', options=SOON, gpu_speeds=SPEEDS)
    with harness.running(settings, "--act"):
        harness.resize_ended(settings, job_id)
        harness.ticks(settings, 3)
        nodes = {task.node_list for task in harness.tasks(job_id).values() if task.state == "RUNNING"}
        assert nodes and nodes <= {"t2", "t3"}
    with harness.store(settings) as store:
        first = store.resizes(job_id)[0]
        assert (first.state, first.mechanism, first.new_kind) == (State.DONE, "blocks", "a100")
        assert len(store.resizes(job_id)) == 1
        kinds = {point.kind for point in store.histories([job_id])[job_id].throughput}
        assert "2080ti" in kinds

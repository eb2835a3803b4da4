"""No daemon allowed: a companion that cron starts for one tick at a time, on a real Slurm."""

from __future__ import annotations

import time

import pytest

from slurm_ones.act.transitions import NEEDS_COMPANION, State
from tests.db.make import actions
from tests.endtoend.harness import HELD, Harness

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

RUN = ("slurm-ones", "run", "--own", "--act", "--ticks", "1", "--config")
TICKED = "elastic jobs run"


def cron(harness: Harness, settings: str) -> str:
    """One run, to its end; what it says. It leaves no job that waits for the next one."""
    done = harness.cluster.run([*RUN, settings], user="alice", timeout=60)
    with harness.store(settings) as store:
        open_ = store.open_resizes()
        assert not [one for one in open_ if State(one.state) in NEEDS_COMPANION], done.stdout
    return done.stdout


def test_runs_of_one_tick_carry_a_resize_through(harness: Harness) -> None:
    """Three runs with pauses: each leaves no job drained or in our hold, and together they grow it by a requeue."""
    job_id = harness.light()
    harness.trains(job_id)
    settings = harness.settings()
    shapes = []
    for _ in range(3):
        assert TICKED in cron(harness, settings)
        waiting = harness.cluster.run(["squeue", "-h", "--user=alice", "-o", "%r"], user="alice").stdout.splitlines()
        assert not set(waiting) & set(HELD)
        # Whatever a job does that nobody looks after, and the dwell time.
        job = harness.wait(job_id, lambda job: job.running and not job.held, "running")
        harness.trains(job_id, restart=job.restart)
        time.sleep(1.5)
        shapes.append(job.nodes * (job.gpus_per_node or 0))
    assert shapes[-1] > 1 and job.restart >= 1 and not job.held, shapes
    harness.trains(job_id, restart=job.restart)
    with harness.store(settings) as store:
        resizes = store.resizes(job_id)
    assert resizes[0].state == State.DONE, resizes


def test_blocks_join_and_runs_do_not_overlap(harness: Harness) -> None:
    """Blocks join between two runs; of two runs at a time one leaves at once, and neither harms the other."""
    job_id = harness.blocks()
    harness.membership(job_id, lambda seen: len(seen.blocks) == 1, "first block")
    settings = harness.settings()
    both = [harness.start([*RUN, settings], settings) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0], harness.companion_log(settings)
    said = harness.companion_log(settings)
    assert TICKED in said, said
    with harness.store(settings) as store:
        assert [action.action for action in actions(store)].count("run ends") == 2, said
    seen = harness.membership(job_id, lambda seen: len(seen.blocks) > 1, "second block")
    cron(harness, settings)
    assert harness.membership(job_id, lambda now: len(now.blocks) >= len(seen.blocks), "blocks")
    with harness.store(settings) as store:
        assert State.DONE in {State(one.state) for one in store.resizes(job_id)}

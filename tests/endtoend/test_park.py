"""Taking running jobs to zero GPUs and back, on a real Slurm."""

from __future__ import annotations

import time

import pytest

from ones_wrapper.protocol import Hello
from slurm_ones.act.transitions import State
from slurm_ones.slurm.model import SlurmJob
from tests.endtoend.block_site import Site
from tests.endtoend.harness import Harness
from tests.endtoend.test_kill import JOBS, kill_everywhere

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]


def deferred(job: SlurmJob) -> bool:
    return job.pending and not job.held and not job.completing and job.eligible_time > time.time()


@pytest.mark.parametrize("where", ["harness", "old_harness"])
def test_a_parked_job_waits_and_starts_again_at_another_size(request: pytest.FixtureRequest, where: str) -> None:
    """It waits though GPUs are free, and goes on from its checkpoint; its owner is told so."""
    harness: Harness = request.getfixturevalue(where)
    job_id = harness.light()
    harness.trains(job_id)
    settings = harness.settings()
    harness.stay(settings).touch()
    process = harness.scripted(settings, {job_id: [[0, 0, 1], [2, 2, 64]]})
    parked = harness.wait(job_id, deferred, "parked")
    assert (parked.nodes, parked.gpus_per_node) == (1, 1)
    time.sleep(3)  # some rounds of the scheduler, which has 16 free GPUs
    assert deferred(harness.job(job_id))
    harness.stay(settings).unlink()
    assert process.wait(90) == 0, harness.companion_log(settings)
    job = harness.job(job_id)
    assert job.running and not job.held and (job.nodes, job.gpus_per_node, job.restart) == (2, 2, 1)
    hello = harness.report(job_id, 1, lambda report: isinstance(report, Hello), "hello")
    assert isinstance(hello, Hello) and hello.checkpoint
    harness.trains(job_id, restart=1)
    with harness.store(settings) as store:
        first, second = store.resizes(job_id)
        assert (first.state, first.new_shape.nodes, str(first.outcome)) == (State.DONE, 0, "it is parked")
        assert (second.state, second.restart, second.new_shape.nodes) == (State.DONE, -1, 2)
        assert store.histories([job_id])[job_id].resizes == 1 and store.deferrals() == {}
    told = harness.cluster.run(["slurm-ones", "why", str(job_id), "--config", settings], user="alice").stdout
    assert "1x1 → parked: done, it is parked" in told


def test_a_job_whose_companion_dies_starts_when_its_lease_is_over(harness: Harness) -> None:
    """And one whose companion is stopped starts at once."""
    dead, stopped = harness.light(), harness.light()
    harness.trains(dead, stopped)
    # Long enough that a companion which gets no time for a while renews it all the same.
    settings = harness.settings(tick_s="0.5", resize="park_lease_s = 14")
    harness.stay(settings).touch()
    process = harness.scripted(settings, {dead: [[0, 0, 1]]})
    first = harness.wait(dead, deferred, "parked").eligible_time
    harness.wait(
        dead, lambda job: deferred(job) and job.eligible_time > first, "kept waiting by a lease that was renewed"
    )
    process.kill()
    process.wait()
    lease = harness.job(dead).eligible_time
    job = harness.wait(dead, lambda job: job.running, "running")
    assert job.restart == 1 and job.start_time >= lease
    harness.trains(dead, restart=1)

    settings = harness.settings()
    harness.stay(settings).touch()
    process = harness.scripted(settings, {stopped: [[0, 0, 1]]})
    # Nobody's time but the companion's own end lets it go: the lease is a quarter of an hour.
    harness.wait(stopped, deferred, "parked")
    harness.stay(settings).unlink()
    assert process.wait(60) == 0, harness.companion_log(settings)
    harness.wait(stopped, lambda job: job.running, "running")


def test_a_companion_killed_anywhere_while_it_parks_is_succeeded(harness: Harness) -> None:
    """After every death the next one lets the job run, held by nobody and at its shape."""
    job_ids = [harness.light() for _ in range(JOBS)]
    harness.trains(*job_ids)
    for told in kill_everywhere(
        Site(harness, owner=True), job_ids, "0x0", ("order", "requeuehold", "StartTime", "release")
    ):
        assert (told["state"], told["shape"]) == ("RUNNING", "1x1"), told
        assert told["resize"] in (None, State.DONE, State.ABANDONED, State.ROLLED_BACK), told
        assert told["restarts"] == (told["resize"] in (State.DONE, State.ROLLED_BACK)), told

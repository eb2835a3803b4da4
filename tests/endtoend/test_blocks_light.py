"""A job of blocks that trains nothing, on real Slurms: what the companion does to blocks, whoever it works for."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.endtoend.block_site import Site, sites
from tests.endtoend.harness import LOOK_S, WAIT_S, BlockTask
from tests.endtoend.light_blocks import UNREADY
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
TWO = pytest.mark.parametrize("site", ["gres owner", "old operator"], indirect=True)


@pytest.fixture(params=sites())
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site.of(request, request.param, gpus=4)
    yield site
    site.harness.clear()


def nobody_left_held_or_running(site: Site, job_id: int) -> None:
    """What trains runs; every other task waits in a user's hold, or has completed."""
    trains = site.harness.memberships(job_id)[-1].blocks

    def wrong() -> dict[int, BlockTask]:
        return {
            number: task
            for number, task in site.harness.tasks(job_id).items()
            if (task.state != "RUNNING" if number in trains else not (task.held or task.state == "COMPLETED"))
        }

    until(lambda: not wrong(), lambda: f"trains: {trains}, but {wrong()}", WAIT_S, LOOK_S)


@TWO
def test_cancelling_the_job_leaves_nothing(site: Site) -> None:
    """`scancel JOB` in the middle of a growth: no task runs or waits, and nothing comes back."""
    job_id = site.submit()
    (site.harness.directory(job_id) / UNREADY).touch()
    unit = site.unit
    settings = site.settings()
    companion = site.start(settings, {job_id: [[0, 3 * unit, 32]]})
    harness = site.harness
    until(
        lambda: sum(task.state == "RUNNING" for task in harness.tasks(job_id).values()) > 1,
        lambda: harness.companion_log(settings),
        WAIT_S,
        0.1,
    )
    harness.cluster.run(["scancel", str(job_id)])
    harness.ended(job_id)
    site.harness.resize_ended(settings, job_id)
    time.sleep(2)
    assert all(task.state in ("CANCELLED", "COMPLETED") for task in site.harness.tasks(job_id).values())
    companion.terminate()


@TWO
def test_a_waiting_job_starts_at_fewer_gpus_than_its_other_blocks_ask_for(site: Site) -> None:
    """Protects from a job that waits for itself: a task of its own that still asks for what its user did would stand
    before the one that was given less, and wait for room that nobody needs."""
    harness = site.harness
    # All nodes but one.
    count = int(harness.cluster.run(["sinfo", "-h", "--partition=gpu", "-o", "%D"]).stdout.split()[0])
    rigid = harness.rigid(f"--nodes={count - 1}", "--gres=gpu:4")
    harness.wait(rigid, lambda job: job.running, "running")
    options, env = site.asked(("--nodes=2", "--gres=gpu:4"), {})
    job_id = harness.blocks(*options, **env)
    harness.wait(job_id, lambda job: job.pending and job.reason in ("Resources", "Priority"), "waiting")
    settings = site.settings()
    site.resize(settings, {job_id: [[0, 1, 32]]})
    assert harness.membership(job_id, lambda m: m.why == "first", "first membership").world == 1
    assert harness.job(rigid).running
    site.resize(settings, {job_id: [[0, 2, 32]]})
    assert harness.memberships(job_id)[-1].world == 2
    nobody_left_held_or_running(site, job_id)

"""A job of blocks that trains nothing, on real Slurms: what the companion does to blocks, whoever it works for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from ones_wrapper.protocol import Bye
from slurm_ones.act.transitions import State
from tests.cluster import Cluster
from tests.endtoend.block_site import Site, sites
from tests.endtoend.harness import LOOK_S, WAIT_S, BlockTask, Harness
from tests.endtoend.light_blocks import UNREADY
from tests.marks import nightly
from tests.waiting import until

pytestmark = pytest.mark.cluster
ALL_AT_ONCE = {"LIGHT_PATIENCE_S": "60"}
"""For a job whose newcomers are to join together, however long after the others one of them starts."""


TWO = pytest.mark.parametrize("site", ["gres owner", nightly("old operator")], indirect=True)


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


@pytest.mark.nightly
def test_a_job_grows_and_shrinks_while_it_trains(site: Site) -> None:
    """1 → 2 → 4 → 1, nodes where whole nodes are handed out: no run ends, nothing is left behind, and it is one job
    to Slurm's users, the database and `slurm-ones jobs`."""
    job_id = site.submit(**ALL_AT_ONCE)
    unit = site.unit
    settings = site.settings()
    sizes = [2 * unit, 4 * unit, unit]
    site.resize(settings, {job_id: [[0, gpus, 32] for gpus in sizes]})
    told = site.harness.memberships(job_id)
    assert [m.world for m in told] == [unit, *sizes], told
    assert [m.why for m in told] == ["first", "order", "order", "order"]
    assert all(m.restarts == (0,) * len(m.blocks) for m in told[:-1])
    nobody_left_held_or_running(site, job_id)
    with site.harness.store(settings) as store:
        resizes = store.resizes(job_id)
        assert [(r.state, r.mechanism) for r in resizes] == [(State.DONE, "blocks")] * 3
        assert [bool(r.added) for r in resizes] == [True, True, False]
        # None of its tasks is a job of its own.
        command = ["squeue", "-h", "--states=all", f"--jobs={job_id}", "-o", "%A"]
        records = {*map(int, site.harness.cluster.run(command, user="root").stdout.split())}
        assert len(records) > 1
        assert {*store.jobs()} & records <= {job_id} <= {*store.jobs()}
        assert not store.open_resizes()
    command = ["slurm-ones", "jobs", "--json", "--config", settings]
    jobs = json.loads(site.harness.cluster.run(command, user=site.user).stdout)
    assert job_id in [job["job_id"] for job in jobs]


@pytest.mark.nightly
@TWO
def test_the_end_of_a_job_cancels_what_waits(site: Site) -> None:
    """And it ends well, with two blocks that trained."""
    job_id = site.submit()
    unit = site.unit
    settings = site.settings()
    site.resize(settings, {job_id: [[0, 2 * unit, 32]]})
    site.ends(job_id, settings)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["newcomer", "member", "leader"])
def test_a_block_that_its_owner_cancels_stays_cancelled(gres: Cluster, victim: str) -> None:
    """Training goes on with those that are left, which another of them leads where it was the leader's."""
    site = Site(Harness(gres), owner=True)
    try:
        harness = site.harness
        job_id = site.submit()
        settings = site.settings()
        if victim == "newcomer":
            unready = harness.directory(job_id) / UNREADY
            unready.touch()
            companion = site.start(settings, {job_id: [[0, 2, 32]]})
            taken = until(
                lambda: [n for n, t in harness.tasks(job_id).items() if t.state == "RUNNING" and n],
                lambda: harness.companion_log(settings),
                WAIT_S,
                0.1,
            )
            harness.cluster.run(["scancel", f"{job_id}_{taken[0]}"])
            unready.unlink()
            # It is taken back, or another block comes in its place.
            assert companion.wait(90) == 0, harness.companion_log(settings)
        else:
            site.resize(settings, {job_id: [[0, 2, 32]]})
            blocks = harness.memberships(job_id)[-1].blocks
            taken = [blocks[0] if victim == "leader" else blocks[1]]
            harness.cluster.run(["scancel", f"{job_id}_{taken[0]}"])
            harness.membership(job_id, lambda m: taken[0] not in m.blocks, "membership without it")
            site.resize(settings, {job_id: [[0, 3, 32]]})
        if victim == "leader":
            assert any(isinstance(r, Bye) and r.reason == "moved" for r in harness.reports(job_id, 0))
        until(
            lambda: harness.tasks(job_id)[taken[0]].state != "COMPLETING",
            "the end of what was cancelled",
            WAIT_S,
            LOOK_S,
        )
        assert harness.tasks(job_id)[taken[0]].state == "CANCELLED"
        assert taken[0] not in harness.memberships(job_id)[-1].blocks
        with harness.store(settings) as store:
            assert not store.open_resizes()
    finally:
        site.harness.clear()


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


@pytest.mark.nightly
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

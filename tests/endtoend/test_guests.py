"""Base and guests on real Slurms: Slurm takes back for anybody what a job grew by, and the companion uses it again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_ones.slurm.model import Queue
from tests.cluster.sites import GRES_GUESTS, OLD_GUESTS
from tests.conftest import start
from tests.endtoend.block_site import Site
from tests.endtoend.harness import LOOK_S, WAIT_S, Harness
from tests.marks import nightly

pytestmark = pytest.mark.cluster
BY_QOS, BY_PARTITION = Queue(qos="guest"), Queue("scavenge")


@dataclass
class GuestSite:
    """A cluster with a queue for guests, and an operator's companion."""

    site: Site
    queue: Queue

    def settings(self) -> str:
        one = f'{{qos = "{self.queue.qos}"}}' if self.queue.qos else f'{{partition = "{self.queue.partition}"}}'
        return self.site.settings(guests=f"{{gpu = {one}}}")

    def guests(self, job_id: int) -> set[int]:
        """Tasks of an array that run in the queue of guests."""
        command = ["squeue", "-h", "--array", "--states=RUNNING", f"--jobs={job_id}", "-o", "%K|%P|%q"]
        shown = self.site.harness.cluster.run(command, user="root").stdout.split()
        found = [line.split("|") for line in shown]
        name, column = (self.queue.qos, 2) if self.queue.qos else (self.queue.partition, 1)
        return {int(words[0]) for words in found if words[column] == name}


@pytest.fixture(
    scope="module", params=[(OLD_GUESTS, BY_PARTITION), nightly((GRES_GUESTS, BY_QOS))], ids=["old", "gres"]
)
def guests(request: pytest.FixtureRequest) -> Iterator[GuestSite]:
    """22.05 by partition by day, 26.05 by QOS every night."""
    slurm, queue = request.param
    cluster = start(request, slurm)
    yield GuestSite(Site(Harness(cluster), owner=False), queue)
    cluster.stop()


@pytest.mark.parametrize(
    "wanted",
    [
        ("--nodes=1", "--ntasks=1", "--cpus-per-task=16"),
        ("--nodes=1", "--gres=gpu:1"),
        nightly(("--nodes=2", "--gres=gpu:4")),
    ],
    ids=["CPUs alone", "a GPU", "two nodes"],
)
def test_a_job_of_others_is_served_by_slurm_and_guests_come_back(guests: GuestSite, wanted: tuple[str, ...]) -> None:
    """The base is never taken, no rank starts again, and a preempted block is held and trains again."""
    site, harness = guests.site, guests.site.harness
    try:
        elastic = site.submit()
        settings = guests.settings()
        site.resize(settings, {elastic: [[0, 16, 64]]})
        before = harness.memberships(elastic)[-1]
        base = {*before.blocks} - guests.guests(elastic)
        tasks = harness.tasks(elastic)
        assert before.world == 16 and sum(tasks[n].gpus * tasks[n].nodes for n in base) == 1, (base, tasks)

        submitted = time.monotonic()
        rigid = harness.rigid(*wanted)
        harness.wait(rigid, lambda job: job.running, "running")
        served_s = time.monotonic() - submitted
        left = harness.membership(elastic, lambda m: m.world < 16, "membership of those that stay")
        assert base <= {*left.blocks} and not any(left.restarts), left
        taken = {*before.blocks} - {*left.blocks}
        assert taken <= {*before.blocks} - base

        with harness.running(settings, "--act", user=site.user, cwd=Path("/")):
            seen = time.monotonic()
            while not all(harness.tasks(elastic)[n].held for n in taken):
                assert time.monotonic() < seen + WAIT_S, (
                    taken,
                    harness.tasks(elastic),
                    harness.companion_log(settings),
                )
                time.sleep(LOOK_S)
            reuse_s = time.monotonic() - seen
        harness.cluster.run(["scancel", str(rigid)], user="root")
        site.resize(settings, {elastic: [[0, 16, 64]]})
        grown = harness.memberships(elastic)[-1]
        assert base <= {*grown.blocks} and {*grown.blocks} - base == guests.guests(elastic)
        print(f"served within {served_s:.1f} s; held again {reuse_s:.1f} s after a companion started")
        assert served_s < 30, served_s
    finally:
        harness.clear()

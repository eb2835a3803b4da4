"""A controller that does not answer, for every client, on clusters of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from slurm_ones.slurm.client import Unreachable
from tests.cluster import Cluster
from tests.slurm.remote import Remote
from tests.slurm.sites import OWNER, Site, until

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
DOWN_S = 1.5


@pytest.fixture(scope="module", params=["gres", "old"])
def outage(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster whose controller may be killed, and whose commands give it up after 1 s instead of 10."""
    request.getfixturevalue(request.param)  # built, or skipped with the reason
    with Cluster(request.param) as cluster:
        conf = cluster.root / "etc/slurm/slurm.conf"
        (cluster.scratch / "hasty.conf").write_text(conf.read_text() + "MessageTimeout=1\n")
        yield cluster


@pytest.fixture(params=["pyslurm", "command"])
def site(request: pytest.FixtureRequest, outage: Cluster) -> Iterator[Site]:
    if request.param == "pyslurm" and not outage.pyslurm:
        pytest.skip(outage.pyslurm_why)
    site = Site(outage, request.param)
    site.adopt_client(Remote(outage, request.param, OWNER, {"SLURM_CONF": "/scratch/hasty.conf"}))
    yield site
    site.clear()
    site.close()


@pytest.fixture(scope="module")
def durable(outage: Cluster) -> int:
    """A held job that a crash does not take away: one that Slurm has saved."""
    submit = ["sbatch", "--parsable", "--hold", "--nodes=1", "--gres=gpu:1", "--job-name=durable", "--wrap=true"]
    job_id = int(outage.run(submit).stdout)
    state = outage.root / "var/spool/slurmctld/job_state"
    until(lambda: state.exists() and b"durable" in state.read_bytes(), "a save of Slurm's state")
    return job_id


def back(site: Site) -> None:
    until(lambda: site.tell("scontrol", "ping").count("UP") > 0, "the controller")


def test_a_dead_controller_is_unreachable(site: Site, durable: int) -> None:
    """Changes are not repeated: whoever asked looks first whether they took effect."""
    site.cluster.kill_slurmctld()
    try:
        for change in (site.owner.requeue_hold, site.owner.hold, site.owner.release):
            with pytest.raises(Unreachable):
                change(durable)
    finally:
        site.cluster.start_slurmctld()
        back(site)
    assert site.owner.job(durable).held


def test_a_short_outage_is_survived(site: Site, durable: int) -> None:
    """Questions are asked again until the controller is back, and what they find is whole."""
    before = site.owner.job(durable)
    site.cluster.kill_slurmctld()
    restart = threading.Timer(DOWN_S, site.cluster.start_slurmctld)
    restart.start()
    try:
        assert site.owner.snapshot().jobs[durable] == before
    finally:
        restart.join()
        back(site)


def test_a_long_outage_ends_the_question(site: Site) -> None:
    """A tick is given up rather than waited for, and an outage is never an unknown job or an empty queue."""
    if not site.is_old:
        pytest.skip("each question of 26.05 waits several times as long: tests/slurm/test_command.py stands for it")
    site.cluster.kill_slurmctld()
    try:
        began = time.monotonic()
        with pytest.raises(Unreachable):
            site.owner.job(1)
        assert time.monotonic() - began < 60
    finally:
        site.cluster.start_slurmctld()
        back(site)

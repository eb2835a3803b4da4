"""A controller that does not answer, for every client, on clusters of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import Shape
from tests.cluster import Cluster
from tests.slurm.remote import Remote
from tests.slurm.sites import OWNER, Site, until

pytestmark = pytest.mark.cluster
DOWN_S = 1.5


@pytest.fixture(scope="module", params=["gres", "old"])
def outage(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster whose controller may be killed, and whose commands give it up after 2 s instead of 10."""
    request.getfixturevalue(request.param)  # built, or skipped with the reason
    with Cluster(request.param) as cluster:
        conf = cluster.root / "etc/slurm/slurm.conf"
        (cluster.scratch / "hasty.conf").write_text(conf.read_text() + "MessageTimeout=2\n")
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


def durable(site: Site, name: str) -> int:
    """A held job that a crash does not take away: one that Slurm has saved."""
    job_id = site.held("--nodes=1", "--gres=gpu:1", f"--job-name={name}")
    state = site.cluster.root / "var/spool/slurmctld/job_state"
    until(lambda: state.exists() and name.encode() in state.read_bytes(), "a save of Slurm's state")
    return job_id


def test_a_dead_controller_is_unreachable_and_a_short_outage_is_survived(site: Site) -> None:
    """No call takes silence for an answer (22.05's squeue shows an empty queue); questions are asked again."""
    job_id = durable(site, f"durable-{site.client_name}")
    before = site.owner.job(job_id)
    site.cluster.kill_slurmctld()
    try:
        # Changes are not repeated: whoever asked looks first whether they took effect.
        for change in (
            lambda: site.owner.requeue_hold(job_id),
            lambda: site.owner.hold(job_id),
            lambda: site.owner.release(job_id),
        ):
            with pytest.raises(Unreachable):
                change()
        threading.Timer(DOWN_S, site.cluster.start_slurmctld).start()
        assert site.owner.job(job_id) == before
        assert site.owner.snapshot().jobs[job_id] == before
    finally:
        until(lambda: site.tell("scontrol", "ping").count("UP") > 0, "the controller")
    site.owner.reshape(job_id, Shape(2, 2))
    assert site.owner.job(job_id).nodes == 2


def test_a_long_outage_ends_the_question(site: Site) -> None:
    """A tick is given up rather than waited for, and an outage is never an unknown job or an empty queue."""
    if not site.is_old:
        pytest.skip("each question of 26.05 waits several times as long: tests/slurm/test_retry.py stands for it")
    site.cluster.kill_slurmctld()
    try:
        began = time.monotonic()
        with pytest.raises(Unreachable):
            site.owner.job(1)
        assert time.monotonic() - began < 25
    finally:
        site.cluster.start_slurmctld()
        until(lambda: site.tell("scontrol", "ping").count("UP") > 0, "the controller")

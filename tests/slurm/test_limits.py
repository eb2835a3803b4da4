"""Blocks under an association's limits, on a slurmdbd that enforces them: what an administrator must know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import NotPermitted, Refused
from slurm_ones.slurm.model import Task
from tests.cluster import Cluster
from tests.conftest import quick
from tests.slurm.sites import OPERATOR, OWNER, Site

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
ARRAY = ("--array=0-3%1", "--nodes=1", "--gres=gpu:1", "--cpus-per-gpu=1")
NONE = ("MaxSubmitJobs=-1", "MaxJobs=-1", "MaxTRES=gres/gpu=-1")


@pytest.fixture(scope="module")
def enforced(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of its own, whose limits count and whose priorities rise with age."""
    request.getfixturevalue("gres")  # built, or skipped with the reason
    with Cluster("gres") as cluster:
        if not cluster.accounting:
            pytest.skip(cluster.accounting_why)
        conf = cluster.root / "etc/slurm/slurm.conf"
        lines = ["AccountingStorageEnforce=associations,limits", "PriorityType=priority/multifactor"]
        conf.write_text(conf.read_text() + "\n".join([*lines, "PriorityWeightAge=100000", ""]))
        cluster.kill_slurmctld()
        cluster.start_slurmctld()
        quick(cluster)
        yield cluster


@pytest.fixture
def site(enforced: Cluster) -> Iterator[Site]:
    site = Site(enforced, "command")
    yield site
    limit(site, *NONE)
    site.clear()
    site.close()


def limit(site: Site, *limits: str) -> None:
    """Set limits of the jobs' owner."""
    site.cluster.run(["sacctmgr", "-i", "modify", "user", OWNER, "set", *limits], user="root")
    site.pass_time(1.0)


def test_every_task_counts_as_submitted(site: Site) -> None:
    """Also those that are held; so MaxSubmitJobs must have room for all tasks of all arrays of blocks."""
    limit(site, "MaxSubmitJobs=4")
    with pytest.raises(Refused, match="AssocMaxSubmitJobLimit"):
        site.submit("--array=0-4%1")
    site.held(*ARRAY)
    with pytest.raises(Refused, match="AssocMaxSubmitJobLimit"):
        site.submit("--nodes=1")


def test_a_block_is_used_again_beyond_the_limit(site: Site) -> None:
    """A task that has ended leaves its place to others, and is used again all the same."""
    limit(site, "MaxSubmitJobs=4")
    array_id = site.blocks(*ARRAY)
    site.owner.hold_waiting(array_id)
    site.finish(Task(array_id, 0))
    site.held("--nodes=1")
    site.owner.reuse(Task(array_id, 0))
    assert len([job for job in site.owner.tasks(array_id) if job.pending]) == 4


def test_a_changed_limit_turns_the_holds_of_who_is_over_it_into_an_administrators(site: Site) -> None:
    """Who has more jobs than MaxSubmitJobs, since it was lowered or since a block was used again, loses the holds of
    his own where there is a limit on TRES too: he, and a companion of his own, cannot release any; an operator can."""
    array_id = site.held(*ARRAY)
    limit(site, "MaxSubmitJobs=3")
    site.pass_time(4.0)
    assert not any(job.admin_held for job in site.owner.tasks(array_id))
    limit(site, "MaxTRES=gres/gpu=4")
    site.until(lambda: all(job.admin_held for job in site.owner.tasks(array_id)), "an administrator's hold")
    with pytest.raises(NotPermitted):
        site.owner.release(Task(array_id, 0))
    site.as_(OPERATOR).release(Task(array_id, 0))
    site.wait(Task(array_id, 0), lambda job: job.running, "RUNNING")


def test_running_blocks_count_as_jobs(site: Site) -> None:
    """A block beyond MaxJobs waits, and the reason says so; so does one of a shape beyond what one job may have."""
    limit(site, "MaxJobs=1")
    array_id = site.blocks(*ARRAY)
    site.owner.throttle(array_id, 0)
    site.owner.hold_waiting(array_id)
    site.owner.release(Task(array_id, 1))
    site.wait(Task(array_id, 1), lambda job: job.reason == "AssocMaxJobsLimit", "a reason")
    site.owner.hold(Task(array_id, 1))
    limit(site, "MaxJobs=-1", "MaxTRES=gres/gpu=4")
    site.owner.reshape(Task(array_id, 1), Shape(2, 4))
    site.owner.release(Task(array_id, 1))
    site.wait(Task(array_id, 1), lambda job: job.reason.startswith("AssocMax"), "a reason")


def test_a_block_has_no_age_when_it_is_released(site: Site) -> None:
    """It accrues from its release on: one that is used again begins anew, like a job submitted that moment."""
    array_id = site.held(*ARRAY)
    site.pass_time(3.0)
    site.owner.reshape(Task(array_id, 1), Shape(4, 4))
    site.submit("--nodes=1")
    site.owner.release(Task(array_id, 1))
    job = site.wait(Task(array_id, 1), lambda job: job.eligible_time > 0, "eligible")
    assert job.eligible_time >= job.submit_time + 2

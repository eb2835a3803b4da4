"""What every client changes: submit, requeue into a hold, hold, release, defer, signal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from slurm_ones.slurm.client import NotPermitted, Refused
from slurm_ones.slurm.model import JobState, Shape
from tests.slurm.sites import OPERATOR, OWNER, STRANGER, Site, until

both = pytest.mark.parametrize("user", [OWNER, OPERATOR])


def test_submit_takes_options_and_a_directory(site: Site) -> None:
    """The job runs where it was told, with what sbatch was told."""
    options = ["--hold", "--comment=ones: gpus=1-4", "--time=5"]
    script = site.script("#!/bin/bash\ntrue\n")
    job = site.owner.job(site.adopt(site.owner.submit(script, options, directory=Path("/tmp"))))
    assert (job.work_dir, job.comment, job.time_limit_s, job.user) == ("/tmp", "ones: gpus=1-4", 300.0, OWNER)


def test_submit_says_what_sbatch_had_against_it(site: Site) -> None:
    """A refused submission ends in sbatch's own words."""
    with pytest.raises(Refused, match="nowhere"):
        site.owner.submit(site.script("#!/bin/bash\n"), ["--partition=nowhere"])


@both
def test_a_requeued_job_is_held_for_its_owner(site: Site, user: str) -> None:
    """The id stays, the restart count rises, and the owner can get the job back, whoever requeued it, once or twice."""
    job_id = site.running("--nodes=1", "--gres=gpu:1")
    first = site.owner.job(job_id)
    site.as_(user).requeue_hold(job_id)
    job = site.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
    assert (job.job_id, job.restart, job.held, job.admin_held) == (job_id, first.restart + 1, True, False)
    assert (job.nodes, job.gpus_per_node, job.node_list) == (1, 1, ())
    assert job.requeue_held and site.owner.snapshot().jobs[job_id].requeue_held
    site.as_(user).requeue_hold(job_id)
    assert site.owner.job(job_id).restart == 1
    site.owner.release(job_id)
    again = site.wait(job_id, lambda job: job.running, "RUNNING again")
    assert (again.restart, again.requeue_held) == (1, False)
    assert again.start_time >= first.start_time


def test_a_requeued_job_is_seen_until_its_processes_are_gone(site: Site) -> None:
    """While the last run's processes die it is completing, which 22.05's JSON shows in place of the state."""
    stubborn = "#!/bin/bash\ntrap 'sleep 3; exit' TERM\nwhile :; do sleep 0.1; done\n"
    job_id = site.running("--nodes=1", "--gres=gpu:4", text=stubborn)
    site.owner.requeue_hold(job_id)
    for job in (site.owner.job(job_id), site.owner.snapshot().jobs[job_id]):
        assert (job.completing, job.pending, job.held) == (True, True, True)
        assert (job.running, job.ended, job.restart) == (False, False, 1)


def test_requeueing_a_job_that_has_ended_leaves_it_ended(site: Site) -> None:
    """Between the look and the requeue a user may cancel: such a job must not come back to life."""
    job_id = site.running("--nodes=1")
    site.tell("scancel", str(job_id))
    site.wait(job_id, lambda job: job.ended, "ended")
    site.owner.requeue_hold(job_id)
    assert site.owner.job(job_id).state is JobState.CANCELLED


@both
def test_a_held_job_can_be_released_by_its_owner(site: Site, user: str) -> None:
    """Also when an operator held it: the companion's hold is always a user hold."""
    job_id = site.submit("--nodes=1", "--begin=now+1hour")
    site.as_(user).hold(job_id)
    job = site.owner.job(job_id)
    assert (job.held, job.admin_held, job.requeue_held) == (True, False, False)
    assert not site.owner.snapshot().jobs[job_id].requeue_held
    site.owner.release(job_id, start_now=False)
    assert not site.owner.job(job_id).held


def test_an_admins_hold_is_told_and_not_the_owners_to_release(site: Site) -> None:
    """The companion must leave such a job alone."""
    job_id = site.submit("--nodes=1", "--begin=now+1hour")
    site.cluster.run(["scontrol", "hold", str(job_id)], user="root")
    job = site.owner.job(job_id)
    assert (job.held, job.admin_held) == (True, True)
    with pytest.raises(NotPermitted):
        site.owner.release(job_id)
    assert site.owner.job(job_id).admin_held
    site.as_(OPERATOR).release(job_id, start_now=False)
    assert not site.owner.job(job_id).held


def test_an_admins_hold_on_a_requeued_job_is_told(site: Site) -> None:
    """In the middle of a resize: Slurm has other words for such a job, and it must not pass for the companion's own."""
    job_id = site.running("--nodes=1")
    site.owner.requeue_hold(job_id)
    site.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
    assert not site.owner.job(job_id).admin_held
    site.cluster.run(["scontrol", "hold", str(job_id)], user="root")
    assert site.owner.job(job_id).admin_held


@both
def test_start_now_skips_the_delay(site: Site, user: str) -> None:
    """A requeued job waits for its delay unless it is told to start now."""
    job_id = site.held("--nodes=1", "--begin=now+1hour")
    site.as_(user).release(job_id, start_now=False)
    job = site.owner.job(job_id)
    assert (job.pending, job.held) == (True, False)
    site.owner.hold(job_id)
    site.as_(user).release(job_id, start_now=True)
    site.wait(job_id, lambda job: job.running, "RUNNING")


def test_a_signal_reaches_the_steps_and_the_script_on_demand(site: Site) -> None:
    """Ranks are steps; their batch script hears only what is meant for it. Owner and operator may send it."""
    heard = site.cluster.scratch / f"heard-{site.client_name}"
    name = f"/scratch/{heard.name}"
    step = f"trap 'echo step >> {name}' USR1; echo ready >> {name}; while :; do sleep 0.1; done"
    text = f'#!/bin/bash\ntrap "echo script >> {name}" USR1\nsrun -n1 bash -c "{step}" &\nwhile :; do wait; done\n'
    job_id = site.running("--nodes=1", text=text)
    until(lambda: heard.exists() and "ready" in heard.read_text(), "the step")
    site.owner.signal(job_id, "USR1")
    until(lambda: heard.read_text().count("step") == 1, "the owner's signal in the step")
    site.as_(OPERATOR).signal(job_id, "USR1")
    until(lambda: heard.read_text().count("step") == 2, "the operator's signal in the step")
    assert "script" not in heard.read_text()
    site.owner.signal(job_id, "USR1", batch=True)
    until(lambda: "script" in heard.read_text(), "the signal in the script")


def test_a_snapshot_is_of_this_moment(site: Site) -> None:
    """Nothing is cached: what was done a moment ago is seen."""
    job_id = site.held("--nodes=1")
    before = site.now()
    site.owner.release(job_id)
    seen = site.owner.snapshot()
    assert not seen.jobs[job_id].held
    assert before - 1 <= seen.time <= site.now() + 1


@both
def test_a_deferred_job_waits_for_its_time_though_there_is_room(site: Site, user: str) -> None:
    """It is held by nobody, shows its time to the second, and starts by itself; a past time lets it start at once."""
    job_id = site.held("--nodes=1", "--gres=gpu:1")
    assert site.owner.job(job_id).eligible_time == 0
    later = site.now() + 1000.5
    site.as_(user).defer(job_id, later)
    site.as_(user).release(job_id, start_now=False)
    soon = site.now() + 4.0
    for job in (site.owner.job(job_id), site.owner.snapshot().jobs[job_id]):
        assert (job.pending, job.held, job.eligible_time) == (True, False, math.ceil(later))
    site.as_(user).defer(job_id, soon)
    job = site.wait(job_id, lambda job: job.running, "RUNNING")
    assert soon - 1 <= job.start_time

    waiting = site.submit("--nodes=1", "--gres=gpu:1", "--begin=now+1hour")
    site.pass_time(2.5)  # two rounds of the scheduler
    assert site.owner.job(waiting).pending
    site.as_(user).defer(waiting, site.now() - 100.0)
    site.wait(waiting, lambda job: job.running, "RUNNING")


def test_a_deferral_outlives_a_hold_and_a_reshape(site: Site) -> None:
    """So that a job is deferred before it is let go, and known by its time when it is to be reshaped."""
    job_id = site.requeued("--nodes=1", "--gres=gpu:1")
    later = math.ceil(site.now() + 1000)
    site.owner.defer(job_id, later)
    site.owner.release(job_id, start_now=False)
    site.owner.hold(job_id)
    site.owner.reshape(job_id, Shape(2, 2))
    assert site.owner.job(job_id).eligible_time == later
    site.owner.release(job_id, start_now=False)
    job = site.owner.job(job_id)
    assert (job.eligible_time, job.held, job.pending) == (later, False, True)
    site.owner.defer(job_id, 0.0)
    site.wait(job_id, lambda job: job.running, "RUNNING")


def test_only_the_pending_jobs_of_ones_own_can_be_deferred(site: Site) -> None:
    """A running job, one that has ended, and somebody else's."""
    job_id = site.running("--nodes=1")
    with pytest.raises(Refused, match="no longer pending"):
        site.owner.defer(job_id, site.now() + 100)
    site.tell("scancel", str(job_id))
    site.wait(job_id, lambda job: job.ended, "ended")
    with pytest.raises(Refused):
        site.owner.defer(job_id, site.now() + 100)
    with pytest.raises(NotPermitted):
        site.as_(STRANGER).defer(site.held("--nodes=1"), site.now() + 100)

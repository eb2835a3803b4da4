"""Limits that protect people, on a real Slurm: rigid jobs get room, reserved and drained nodes are nobody's."""

from __future__ import annotations

import time

import pytest

from slurm_ones.act.transitions import State
from slurm_ones.slurm.model import Job
from tests.endtoend.block_site import Site
from tests.endtoend.harness import Harness

pytestmark = pytest.mark.cluster

EVERYTHING = ("--nodes=4", "--gres=gpu:4", "--comment=ones: gpus=1-16 batch=16-64")


def root(harness: Harness, *command: str) -> None:
    harness.cluster.run(list(command), user="root")


def first_in_line(harness: Harness, *options: str) -> int:
    """A job that knows nothing of us, with the highest priority of all."""
    job_id = harness.rigid(*options)
    root(harness, "scontrol", "update", f"JobId={job_id}", "Priority=1000000")
    return job_id


def gpus(job: Job) -> int:
    return job.nodes * job.gpus_per_node


def said(harness: Harness, settings: str, job_id: int) -> str:
    """What `slurm-ones why` says of a job's decisions."""
    return "; ".join(f"{d['reason']} ({d['outcome']})" for d in harness.why(settings, job_id)["decisions"])


def test_an_elastic_job_shrinks_for_a_rigid_one_of_higher_priority(harness: Harness) -> None:
    """It held all GPUs, as it asked for; the rigid one starts, the elastic one goes on beside it and is told why."""
    elastic = harness.light(*EVERYTHING)
    harness.trains(elastic)
    rigid = first_in_line(harness, "--nodes=1", "--gres=gpu:4")
    settings = harness.settings(policy='"ones"')
    with harness.running(settings, "--act", "--own"):
        harness.wait(rigid, lambda job: job.running, "running")
        job = harness.wait(elastic, lambda job: job.running and job.restart > 0, "running beside it")
        harness.trains(elastic, restart=job.restart)
        harness.resize_ended(settings, elastic)
    assert gpus(job) == 12 and not set(job.node_list) & set(harness.job(rigid).node_list)
    with harness.store(settings) as store:
        (resize,) = store.resizes(elastic)
        assert resize.state == State.DONE
    words = f"shrinks from 16 to 12 GPUs: job {rigid}, which cannot be resized and has the higher priority, waits for"
    assert words in said(harness, settings, elastic)


def test_blocks_leave_for_a_rigid_job(harness: Harness) -> None:
    """They held all GPUs. Nothing is requeued or starts anew: the others train on, and the rigid job waits seconds."""
    site = Site(harness, owner=True)
    elastic = site.submit("--gres=gpu:4")
    # This policy leaves a job what it has, though it learns that it trains no faster.
    settings = site.settings()
    site.resize(settings, {elastic: [[0, 16, 64]]})
    with harness.running(settings, "--act", "--own"):
        harness.ticks(settings, 2)
        before = harness.memberships(elastic)[-1]
        assert before.world == 16
        submitted = time.monotonic()
        rigid = first_in_line(harness, "--nodes=1", "--gres=gpu:4")
        harness.wait(rigid, lambda job: job.running, "running")
        waited = time.monotonic() - submitted
        left = harness.membership(elastic, lambda m: m.world <= 12, "membership of those that stay")
        harness.resize_ended(settings, elastic)
    print(f"a rigid job waited {waited:.1f} s for GPUs of blocks")
    assert waited < 30, waited
    assert (left.world, left.why, left.generation) == (12, "order", before.generation + 1) and not any(left.restarts)
    tasks = harness.tasks(elastic)
    assert {n for n, task in tasks.items() if task.state == "RUNNING"} == {*left.blocks}
    assert {tasks[n].node_list for n in left.blocks}.isdisjoint(harness.job(rigid).node_list)
    words = f"shrinks from 16 to 12 GPUs: job {rigid}, which cannot be resized and has the higher priority, waits for"
    assert words in said(harness, settings, elastic)


def test_switched_off_rigid_jobs_wait(harness: Harness) -> None:
    """Then nothing shrinks for them; and for one that Slurm would not start anyway nothing shrinks at all."""
    elastic = harness.light(*EVERYTHING)
    harness.trains(elastic)
    rigid = first_in_line(harness, "--nodes=1", "--gres=gpu:4")
    off = harness.settings(policy='"ones"', limits="yield_to_rigid = false")
    with harness.running(off, "--act", "--own"):
        harness.ticks(off, 6)
    assert harness.job(rigid).pending and harness.job(elastic).restart == 0
    root(harness, "scontrol", "update", f"JobId={rigid}", "StartTime=now+1hour")
    on = harness.settings(policy='"ones"')
    with harness.running(on, "--act", "--own"):
        harness.ticks(on, 6)
    assert harness.job(rigid).pending and harness.job(elastic).restart == 0


def test_reserved_and_drained_nodes_are_left_alone(harness: Harness) -> None:
    """Growing takes neither; the node that is drained, reserved or both is not part of any schedule."""
    names = sorted(name for name in _nodes(harness))
    root(harness, "scontrol", "update", f"NodeName={names[0]}", "State=DRAIN", "Reason=test")
    root(
        harness,
        *("scontrol", "create", "reservation", "ReservationName=class", "StartTime=now", "Duration=60"),
        *("Users=bob", f"Nodes={names[1]}"),
    )
    try:
        elastic = harness.light("--nodes=1", "--gres=gpu:4", "--comment=ones: gpus=1-16 batch=16-64")
        harness.trains(elastic)
        settings = harness.settings()
        with harness.running(settings, "--act", "--own"):
            job = harness.wait(elastic, lambda job: job.running and gpus(job) > 4, "grown")
            harness.trains(elastic, restart=job.restart)
            harness.ticks(settings, 6)
        job = harness.job(elastic)
        assert gpus(job) == 8 and set(job.node_list) == set(names[2:4])
    finally:
        root(harness, "scontrol", "delete", "ReservationName=class")
        root(harness, "scontrol", "update", f"NodeName={names[0]}", "State=RESUME")


def test_a_cap_is_kept_and_explained(harness: Harness) -> None:
    """Of 16 GPUs a user's elastic jobs grow into 5, and `why` names the cap."""
    elastic = harness.light("--nodes=1", "--gres=gpu:2", "--comment=ones: gpus=1-16 batch=16-64")
    other = harness.light("--nodes=1", "--gres=gpu:1", "--comment=ones: gpus=1-16 batch=16-64")
    harness.trains(elastic, other)
    settings = harness.settings(limits="gpus_per_user = 5")
    with harness.running(settings, "--act", "--own"):
        harness.ticks(settings, 2)
        deadline = time.monotonic() + 60
        while "(limits.gpus_per_user)" not in said(harness, settings, elastic) + said(harness, settings, other):
            assert time.monotonic() < deadline, said(harness, settings, elastic)
            harness.ticks(settings, 1)
            jobs = [harness.job(elastic), harness.job(other)]
            assert sum(gpus(job) for job in jobs) <= 5
        harness.ticks(settings, 4)
    assert sum(gpus(harness.job(job_id)) for job_id in (elastic, other)) <= 5


def test_a_job_is_resized_no_more_than_it_may(harness: Harness) -> None:
    """Once, here; the second rigid job waits, and the elastic one's owner reads why."""
    elastic = harness.light(*EVERYTHING)
    harness.trains(elastic)
    settings = harness.settings(policy='"ones"', limits="resizes_per_hour = 1")
    with harness.running(settings, "--act", "--own"):
        first = first_in_line(harness, "--nodes=1", "--gres=gpu:4")
        harness.wait(first, lambda job: job.running, "running")
        harness.resize_ended(settings, elastic)
        second = first_in_line(harness, "--nodes=1", "--gres=gpu:4")
        harness.ticks(settings, 8)
    assert harness.job(second).pending and gpus(harness.job(elastic)) == 12
    assert "it was resized 1 time within an hour (limits.resizes_per_hour)" in said(harness, settings, elastic)


def _nodes(harness: Harness) -> list[str]:
    return harness.cluster.run(["sinfo", "-h", "-N", "-p", "gpu", "-o", "%N"], user="root").stdout.split()

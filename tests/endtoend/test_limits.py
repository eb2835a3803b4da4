"""Limits that protect people, on a real Slurm: rigid jobs get room, reserved and drained nodes are nobody's."""

from __future__ import annotations

import time

import pytest

from slurm_ones.act.transitions import State
from slurm_ones.slurm.model import Job
from tests.endtoend.desk import Desk

pytestmark = pytest.mark.cluster

EVERYTHING = ("--nodes=4", "--gres=gpu:4", "--comment=ones: gpus=1-16 batch=16-64")


def root(desk: Desk, *command: str) -> None:
    desk.cluster.run(list(command), user="root")


def first_in_line(desk: Desk, *options: str) -> int:
    """A job that knows nothing of us, with the highest priority of all."""
    job_id = desk.rigid(*options)
    root(desk, "scontrol", "update", f"JobId={job_id}", "Priority=1000000")
    return job_id


def gpus(job: Job) -> int:
    return job.nodes * job.gpus_per_node


def said(desk: Desk, settings: str, job_id: int) -> str:
    """What `slurm-ones why` says of a job's decisions."""
    return "; ".join(f"{d['reason']} ({d['outcome']})" for d in desk.why(settings, job_id)["decisions"])


def test_an_elastic_job_shrinks_for_a_rigid_one_of_higher_priority(desk: Desk) -> None:
    """It held all GPUs, as it asked for; the rigid one starts, the elastic one goes on beside it and is told why."""
    elastic = desk.light(*EVERYTHING)
    desk.trains(elastic)
    rigid = first_in_line(desk, "--nodes=1", "--gres=gpu:4")
    settings = desk.settings(policy='"ones"')
    with desk.running(settings, "--act", "--own"):
        desk.wait(rigid, lambda job: job.running, "running")
        job = desk.wait(elastic, lambda job: job.running and job.restart > 0, "running beside it")
        desk.trains(elastic, restart=job.restart)
        desk.resize_ended(settings, elastic)
    assert gpus(job) == 12 and not set(job.node_list) & set(desk.job(rigid).node_list)
    with desk.store(settings) as store:
        (resize,) = store.resizes(elastic)
        assert resize.state == State.DONE
    words = f"shrinks from 16 to 12 GPUs: job {rigid}, which cannot be resized, waits for 1x4 GPUs and has the higher"
    assert words in said(desk, settings, elastic)


def test_switched_off_rigid_jobs_wait(desk: Desk) -> None:
    """Then nothing shrinks for them; and for one that Slurm would not start anyway nothing shrinks at all."""
    elastic = desk.light(*EVERYTHING)
    desk.trains(elastic)
    rigid = first_in_line(desk, "--nodes=1", "--gres=gpu:4")
    off = desk.settings(policy='"ones"', limits="yield_to_rigid = false")
    with desk.running(off, "--act", "--own"):
        desk.ticks(off, 6)
    assert desk.job(rigid).pending and desk.job(elastic).restart == 0
    root(desk, "scontrol", "update", f"JobId={rigid}", "StartTime=now+1hour")
    on = desk.settings(policy='"ones"')
    with desk.running(on, "--act", "--own"):
        desk.ticks(on, 6)
    assert desk.job(rigid).pending and desk.job(elastic).restart == 0


def test_reserved_and_drained_nodes_are_left_alone(desk: Desk) -> None:
    """Growing takes neither; the node that is drained, reserved or both is not part of any schedule."""
    names = sorted(name for name in _nodes(desk))
    root(desk, "scontrol", "update", f"NodeName={names[0]}", "State=DRAIN", "Reason=test")
    root(
        desk,
        *("scontrol", "create", "reservation", "ReservationName=class", "StartTime=now", "Duration=60"),
        *("Users=bob", f"Nodes={names[1]}"),
    )
    try:
        elastic = desk.light("--nodes=1", "--gres=gpu:4", "--comment=ones: gpus=1-16 batch=16-64")
        desk.trains(elastic)
        settings = desk.settings()
        with desk.running(settings, "--act", "--own"):
            job = desk.wait(elastic, lambda job: job.running and gpus(job) > 4, "grown")
            desk.trains(elastic, restart=job.restart)
            desk.ticks(settings, 6)
        job = desk.job(elastic)
        assert gpus(job) == 8 and set(job.node_list) == set(names[2:4])
    finally:
        root(desk, "scontrol", "delete", "ReservationName=class")
        root(desk, "scontrol", "update", f"NodeName={names[0]}", "State=RESUME")


def test_a_cap_is_kept_and_explained(desk: Desk) -> None:
    """Of 16 GPUs a user's elastic jobs grow into 5, and `why` names the cap."""
    elastic = desk.light("--nodes=1", "--gres=gpu:2", "--comment=ones: gpus=1-16 batch=16-64")
    other = desk.light("--nodes=1", "--gres=gpu:1", "--comment=ones: gpus=1-16 batch=16-64")
    desk.trains(elastic, other)
    settings = desk.settings(limits="gpus_per_user = 5")
    with desk.running(settings, "--act", "--own"):
        desk.ticks(settings, 2)
        deadline = time.monotonic() + 60
        while "(limits.gpus_per_user)" not in said(desk, settings, elastic) + said(desk, settings, other):
            assert time.monotonic() < deadline, said(desk, settings, elastic)
            desk.ticks(settings, 1)
            jobs = [desk.job(elastic), desk.job(other)]
            assert sum(gpus(job) for job in jobs) <= 5
        desk.ticks(settings, 4)
    assert sum(gpus(desk.job(job_id)) for job_id in (elastic, other)) <= 5


def test_a_job_is_resized_no_more_than_it_may(desk: Desk) -> None:
    """Once, here; the second rigid job waits, and the elastic one's owner reads why."""
    elastic = desk.light(*EVERYTHING)
    desk.trains(elastic)
    settings = desk.settings(policy='"ones"', limits="resizes_per_hour = 1")
    with desk.running(settings, "--act", "--own"):
        first = first_in_line(desk, "--nodes=1", "--gres=gpu:4")
        desk.wait(first, lambda job: job.running, "running")
        desk.resize_ended(settings, elastic)
        second = first_in_line(desk, "--nodes=1", "--gres=gpu:4")
        desk.ticks(settings, 8)
    assert desk.job(second).pending and gpus(desk.job(elastic)) == 12
    assert "it was resized 1 time within an hour (limits.resizes_per_hour)" in said(desk, settings, elastic)


def _nodes(desk: Desk) -> list[str]:
    return desk.cluster.run(["sinfo", "-h", "-N", "-p", "gpu", "-o", "%N"], user="root").stdout.split()

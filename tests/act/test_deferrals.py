"""Waiting jobs that must not start: deferred for a while at a time, and never longer than somebody looks after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ones_db import JobRecord, ResizeRecord, Store
from ones_db.reasons import reason
from ones_db.shape import PARKED, Shape
from slurm_ones.act.transitions import State
from slurm_ones.policy.contract import Allocation
from slurm_ones.slurm.client import NotResizable, Refused, Unreachable
from slurm_ones.slurm.model import JobState, SlurmJob
from tests.act.bench import LEASE_S, Bench
from tests.act.make import NOW

AT = {"eligible_time": NOW - 100}
"""What Slurm shows of a job that may start at any moment."""


@pytest.fixture
def bench(own_store: Store, tmp_path: Path) -> Bench:
    return Bench(own_store, tmp_path)


def outcome(bench: Bench, job_id: int) -> str:
    return str(bench.store.decisions(job_id)[0].jobs[0].outcome)


def test_a_lease_is_renewed_in_its_second_half(bench: Bench) -> None:
    """One call to Slurm each half lease, not each tick; the job is deferred without a gap."""
    bench.add(1, Shape(1, 1), **AT)
    for _ in range(20):
        bench.act({}, 1)
        assert bench.jobs[1].job.eligible_time > bench.now + 60
        bench.now += 60
    assert bench.slurm.deferred == [(1, 901), (1, 1381), (1, 1861)]
    assert outcome(bench, 1) == "it is kept from starting" and bench.store.resizes(1) == []


@pytest.mark.parametrize("wanted", [{}, {1: Allocation(Shape(1, 1), 32)}], ids=["left out", "allocated"])
def test_a_job_may_start_at_once_when_it_is_no_longer_parked(bench: Bench, wanted: dict[int, Allocation]) -> None:
    """Whether the schedule gives it what it asks for or says nothing of it."""
    bench.add(1, Shape(1, 1), **AT)
    bench.act({}, 1)
    bench.now += 60
    bench.act(wanted)
    assert bench.slurm.deferred[1:] == [(1, 60)] and bench.store.deferrals() == {}
    bench.act(wanted)
    assert len(bench.slurm.deferred) == 2


def test_an_owners_own_begin_is_neither_shortened_nor_moved(bench: Bench) -> None:
    """Until it comes the job waits anyway; then it is kept like any other."""
    bench.add(1, Shape(1, 1), eligible_time=NOW + 50)
    bench.act({}, 1)
    bench.act({})
    assert bench.slurm.deferred == [] and bench.store.deferrals() == {}
    bench.now += 100
    bench.act({}, 1)
    bench.change(1, eligible_time=NOW + 5000)  # scontrol update StartTime=…, by its owner
    bench.now += 1
    bench.act({})
    assert bench.slurm.deferred == [(1, 1001)] and bench.jobs[1].job.eligible_time == NOW + 5000
    assert bench.store.deferrals() == {}


def test_a_new_companion_knows_what_the_last_one_deferred(bench: Bench) -> None:
    """It renews the lease, and ends it, as if it were its own."""
    bench.add(1, Shape(1, 1), **AT)
    bench.add(2, Shape(1, 1), **AT)
    bench.act({}, 1, 2)
    (bench.folder / "second").mkdir()
    second = Bench(bench.store, bench.folder / "second")
    second.jobs, second.now = bench.jobs, NOW + 500
    second.act({}, 1)
    assert second.slurm.deferred == [(1, 1401), (2, 500)]


def test_a_deferral_that_was_only_written_down_is_made_good(bench: Bench) -> None:
    """The companion died between the two: the job is not deferred, whatever the database says."""
    bench.add(1, Shape(1, 1), **AT)
    bench.store.set_deferral(1, NOW + 900)
    bench.act({}, 1)
    assert bench.slurm.deferred == [(1, 901)]
    bench.change(1, **AT)
    bench.act({})
    assert len(bench.slurm.deferred) == 1 and bench.store.deferrals() == {}


@pytest.mark.parametrize("way", ["stop file", "opted out", "resize off", "held", "advise"])
def test_what_ends_a_deferral(bench: Bench, way: str) -> None:
    """Whoever calls the companion off gets the job's start back at once."""
    bench.add(1, Shape(1, 1), **AT)
    bench.act({}, 1)
    bench.now += 10
    if way == "stop file":
        (bench.folder / "stop").touch()
    elif way == "resize off":
        object.__setattr__(bench.jobs[1], "refusal", reason("resize_off"))
    elif way == "held":
        bench.change(1, held=True)
    if way == "advise":
        (bench.folder / "second").mkdir()
        adviser = Bench(bench.store, bench.folder / "second", mode="advise")
        adviser.jobs, adviser.now = bench.jobs, bench.now
        adviser.act({}, 1)
        assert adviser.slurm.deferred == [(1, 10)]
        assert f"scontrol update JobId=1 StartTime=now+{LEASE_S:.0f}" in adviser.said
    elif way == "opted out":
        job = bench.jobs[1]
        bench.act_on({}, {1: job.job.first}, {}, 1)
        assert bench.slurm.deferred[1:] == [(1, 10)]
    else:
        bench.act({}, 1)
        assert bench.slurm.deferred[1:] == [(1, 10)]
    assert bench.store.deferrals() == {}


def test_a_job_that_started_or_is_gone_is_forgotten(bench: Bench) -> None:
    """Nothing is asked of Slurm for it."""
    bench.add(1, Shape(1, 1), **AT)
    bench.add(2, Shape(1, 1), **AT)
    bench.act({}, 1, 2)
    bench.change(1, state=JobState.RUNNING, node_list=("n1",))
    del bench.jobs[2]
    bench.act({})
    assert len(bench.slurm.deferred) == 2 and bench.store.deferrals() == {}


def test_one_refusal_does_not_stop_the_others(bench: Bench) -> None:
    """A job that started since it was looked at is that job's matter; only silence ends the round."""
    for job_id in (1, 2):
        bench.add(job_id, Shape(1, 1), **AT)
    bench.slurm.refuses = {1: NotResizable("Job is no longer pending execution")}
    bench.act({}, 1, 2)
    assert bench.slurm.deferred == [(2, 901)]
    bench.slurm.refuses = {2: Unreachable("down")}
    with pytest.raises(Unreachable):
        bench.act({})


def test_a_job_in_a_resize_is_the_machines(bench: Bench) -> None:
    """Its deferral is neither renewed nor ended beside the machine."""
    bench.add(1, Shape(1, 1), **AT)
    bench.act({}, 1)
    bench.store.begin_resize(ResizeRecord(1, -1, Shape(1, 1), 32, Shape(1, 2), 64, State.HOLDING.value, NOW))
    bench.now += 800
    bench.act({}, 1)
    bench.act({})
    assert len(bench.slurm.deferred) == 1 and bench.store.deferrals() == {1: NOW + 901}


def test_a_deferred_job_whose_resize_waits_its_turn_does_not_start_at_its_old_shape(bench: Bench) -> None:
    """Only those that are deferred: a job that could start before the schedule was made may do so still."""
    bench.add(1, Shape(1, 1), **AT)
    bench.add(2, Shape(1, 1), **AT)
    bench.act({}, 1)
    most = bench.settings.resize.max_open
    for job_id in range(10, 10 + most):
        bench.store.record_jobs([JobRecord(job_id, "job", "alice", 1.0, Shape(1, 1))])
        bench.store.begin_resize(ResizeRecord(job_id, 0, Shape(1, 1), 32, Shape(1, 2), 64, State.STARTING.value, NOW))
    bench.now += 500
    assert bench.act({1: Allocation(Shape(1, 2), 32), 2: Allocation(Shape(1, 2), 32)}) == []
    assert outcome(bench, 1) == f"waits its turn: {most} resizes are under way"
    assert bench.slurm.deferred == [(1, 901), (1, 1401)]


def test_a_companion_that_stops_lets_all_go(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one cannot be read, whose lease ends by itself, and another is gone meanwhile."""
    for job_id in (1, 2, 3):
        bench.add(job_id, Shape(1, 1), **AT)
    bench.act({}, 1, 2, 3)
    read = bench.slurm.job

    def job(job_id: int) -> SlurmJob:
        if job_id == 1:
            raise Refused("squeue --json: the answer is not understood")
        return read(job_id)

    monkeypatch.setattr(bench.slurm, "job", job)
    del bench.jobs[2]
    bench.now += 5
    bench.actor.leave()
    assert bench.slurm.deferred[3:] == [(3, 5)] and bench.store.deferrals().keys() == {1}


def test_a_running_job_begins_to_be_parked(bench: Bench) -> None:
    """Drained like any other, to nothing, and without an order for its batch."""
    bench.add(1, Shape(1, 2), "n1", restart=3)
    assert bench.act({}, 1) == [1]
    (resize,) = bench.store.resizes(1)
    assert (resize.state, resize.restart, resize.new_shape) == ("draining", 3, PARKED)
    assert (resize.old_batch, resize.new_batch) == (32, None)
    assert bench.slurm.deferred == [] and outcome(bench, 1) == "begins"


def test_advice_to_park(own_store: Store, tmp_path: Path) -> None:
    """The commands in order, once: drain, requeue, defer, release."""
    bench = Bench(own_store, tmp_path, mode="advise")
    bench.add(1, Shape(1, 2), "n1")
    bench.add(2, Shape(1, 2), **AT)
    for _ in range(2):
        bench.act({}, 1, 2)
    assert [line.split("JobId")[0] for line in bench.said if not line.startswith(("printf", "# wait", "# it"))] == [
        "# job 1 (alice): 1x2 → parked",
        "scontrol requeuehold Incomplete 1",
        "scontrol update ",
        "scontrol release 1",
        "# job 2 (alice): must wait",
        "scontrol update ",
    ]
    assert bench.slurm.deferred == [] and own_store.resizes(1) == [] and own_store.deferrals() == {}

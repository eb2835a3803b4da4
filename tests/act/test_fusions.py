"""A job asks for others of its sweep: who waits meanwhile, and what it is told."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ones_db.reasons import reason
from ones_wrapper.protocol import FUSION, ORDERS, FusedMember, Fusion, decode_order, directory_name, encode
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.fusions import ANSWERED_S, ANSWERS, MOST, Fusions, without_fused
from slurm_ones.act.orders import OrderError, OrderWriter
from slurm_ones.jobs.elastic import Elastic, Observation
from slurm_ones.slurm.client import Refused, UnknownJob
from slurm_ones.slurm.model import SlurmJob, Snapshot
from tests.act.test_sweeps import swept

NOW = 1000.0


@dataclass
class Slurm:
    jobs: dict[int, SlurmJob] = field(default_factory=dict)
    deferred: dict[int, float] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    asked: tuple[int, ...] = ()

    def details(self, job_ids: Collection[int]) -> dict[int, SlurmJob]:
        self.asked += (len(job_ids),)
        return {id_: self.jobs[id_] for id_ in job_ids if id_ in self.jobs}

    def job(self, job_id: int) -> SlurmJob:
        if job_id not in self.jobs:
            raise UnknownJob(f"job {job_id}")
        return replace(self.jobs[job_id], eligible_time=self.deferred.get(job_id, 0.0))

    def defer(self, job_id: int, until: float) -> None:
        if job_id in self.started:
            raise Refused(f"job {job_id} runs")
        self.deferred[job_id] = until


@dataclass
class Memory:
    """What deferrals need of a database."""

    known: dict[int, float] = field(default_factory=dict)
    reads: int = 0

    def set_deferral(self, job_id: int, until: float | None) -> None:
        if until is None:
            self.known.pop(job_id, None)
        else:
            self.known[job_id] = until

    def deferrals(self) -> dict[int, float]:
        self.reads += 1
        return dict(self.known)


class World:
    """One carrier (1) that runs, and others that wait."""

    def __init__(self, home: Path, *others: int) -> None:
        self.now, self.home, self.slurm, self.store = NOW, home, Slurm(), Memory()
        self.elastic: dict[int, Elastic] = {}
        self.add(1, "n1")
        for job_id in others:
            self.add(job_id)
        self.directory = home / directory_name(1)
        self.directory.mkdir()
        self.fusions = self.companion()

    def companion(self) -> Fusions:
        client: Any = self.slurm
        deferrals = Deferrals(client, self.store, 900.0, lambda: self.now)
        return Fusions(client, deferrals, OrderWriter(client, None, lambda: self.now), lambda: self.now)

    def add(self, job_id: int, *nodes: str, **changes: Any) -> None:
        text = f"sbatch job.sbatch --lr {job_id}"
        known = {"uid": os.geteuid(), "work_dir": str(self.home), "command": "/x/job.sbatch", "submit_line": text}
        self.elastic[job_id] = one = swept(job_id, *nodes, **(known | changes))
        self.slurm.jobs[job_id] = one.job.first

    def says(self, **told: Any) -> None:
        (self.directory / FUSION).write_bytes(encode(Fusion(**({"restart": 0, "asks": False} | told))))

    def follow(self, busy: Collection[int] = ()) -> dict[int, int]:
        snapshot = Snapshot(self.now, {}, {}, {}, ())
        self.seen = Observation(snapshot, self.elastic)
        return self.fusions.follow(self.seen, busy)

    @property
    def members(self) -> tuple[FusedMember, ...] | None:
        path = self.directory / ORDERS
        return decode_order(path.read_bytes()).members if path.exists() else None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, 2, 3, 4)


def test_a_job_that_asks_gets_the_others(world: World) -> None:
    """They are deferred before it hears of them; what it says then keeps them waiting; the reason names it."""
    assert world.follow() == {} and world.members is None
    world.says(asks=True)
    assert world.follow() == {2: 1, 3: 1, 4: 1}
    assert world.members is not None
    assert [(one.job_id, one.arguments) for one in world.members] == [(n, ("--lr", str(n))) for n in (1, 2, 3, 4)]
    assert world.slurm.deferred == dict.fromkeys((2, 3, 4), NOW + 900)
    left = without_fused(world.seen, {2: 1})
    assert "job 1 (fuse=a)" in str(left.elastic[2].refusal) and left.elastic[3].refusal is None
    world.says(members=(2, 3))
    assert world.follow() == {2: 1, 3: 1}
    world.elastic.pop(1)
    assert world.follow() == {}, "nobody waits for a job that is gone"


def test_who_starts_meanwhile_is_not_named(world: World) -> None:
    world.slurm.started = {3}
    world.says(asks=True)
    assert world.follow() == {2: 1, 4: 1}
    assert world.members is not None and [one.job_id for one in world.members] == [1, 2, 4]


def test_a_job_without_others_hears_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.says(asks=True)
    assert world.follow() == {} and world.members == ()


def test_nobody_waits_long_for_a_job_that_asks_and_says_no_more(world: World) -> None:
    world.says(asks=True)
    assert len(world.follow()) == 3
    world.now += ANSWERED_S - 1
    assert len(world.follow()) == 3
    world.now += 2
    assert world.follow() == {}


def test_nobody_waits_for_a_job_that_cannot_be_answered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were just deferred may start at once: nobody else knows that their wait is of ours."""

    def full(*_: object) -> None:
        raise OrderError("no space left")

    monkeypatch.setattr(OrderWriter, "write", full)
    world.says(asks=True)
    assert world.follow() == {}
    assert world.slurm.deferred == dict.fromkeys((2, 3, 4), NOW) and not world.store.known


def test_another_companion_goes_on_from_the_files(world: World) -> None:
    world.says(members=(2, 3))
    world.fusions = world.companion()
    assert world.follow() == {2: 1, 3: 1} and world.members is None


def test_who_is_cancelled_held_or_opts_out_is_dropped(world: World) -> None:
    """Once, while nothing else is under way with the job, and again where the order did not reach it."""
    world.says(members=(2, 3, 4))
    assert len(world.follow()) == 3
    del world.elastic[2]
    world.add(3, held=True)
    assert world.follow(busy={1}) == {4: 1} and world.members is None, "an order would end the drain of a resize"
    assert world.follow() == {4: 1}
    assert world.members is not None and [one.job_id for one in world.members] == [1, 4]
    (world.directory / ORDERS).unlink()
    assert world.follow() == {4: 1} and world.members is None
    world.now += ANSWERED_S + 1
    assert world.follow() == {4: 1} and world.members is not None


def test_members_wait_while_their_carrier_waits_for_a_restart(world: World) -> None:
    """Else they would start from their beginning. One that is gone is said once the carrier runs again."""
    world.says(members=(2, 3, 4))
    assert len(world.follow()) == 3
    world.add(1, restart=1)
    del world.elastic[2]
    assert world.follow() == {3: 1, 4: 1} and world.members is None
    world.add(1, "n1", restart=1)
    assert world.follow() == {3: 1, 4: 1}
    assert world.members is not None and [one.job_id for one in world.members] == [1, 3, 4]
    world.add(1, restart=2, held=True)
    assert world.follow() == {}, "an owner's hold may last for ever"


def test_nobody_is_given_to_two_carriers(world: World) -> None:
    """One that asks does not get those that another trains, whichever comes first in the queue; of two that say that
    they train one, the first does."""
    world.says(members=(2, 3))
    world.add(0, "n2")
    other = world.home / directory_name(0)
    other.mkdir()
    (other / FUSION).write_bytes(encode(Fusion(0, asks=True)))
    world.elastic = {0: world.elastic.pop(0), **world.elastic}
    assert world.follow() == {2: 1, 3: 1, 4: 0}
    assert [one.job_id for one in decode_order((other / ORDERS).read_bytes()).members or ()] == [0, 4]
    (other / FUSION).write_bytes(encode(Fusion(0, asks=False, members=(3, 4))))
    assert world.follow() == {3: 0, 4: 0, 2: 1}
    assert [one.job_id for one in world.members or ()] == [1, 2]


def test_a_tick_asks_little(tmp_path: Path) -> None:
    """However many wait or ask: the database once, Slurm about a bounded number of jobs."""
    world = World(tmp_path, *range(100, 400))
    for job_id in range(1, 21):
        world.add(job_id, f"n{job_id}")
        directory = tmp_path / directory_name(job_id)
        directory.mkdir(exist_ok=True)
        (directory / FUSION).write_bytes(encode(Fusion(0, asks=True)))
    assert len(world.follow()) == 300 and world.store.reads == 1
    assert max(world.slurm.asked) == 4 * MOST + 1 and len(world.slurm.asked) == 5
    answered = {path.parent.name for path in tmp_path.glob(f"*/{ORDERS}")}
    assert len(answered) == ANSWERS
    world.follow()
    assert len({path.parent.name for path in tmp_path.glob(f"*/{ORDERS}")}) == 2 * ANSWERS


def test_what_a_job_says_keeps_no_other_waiting(world: World) -> None:
    """It names whom it likes: of another user, of another sweep, without opting in, running, unknown."""
    world.elastic[2] = swept(2, uid=12345, work_dir=str(world.home))
    world.elastic[3] = swept(3, comment="ones: gpus=1 fuse=b", uid=os.geteuid(), work_dir=str(world.home))
    world.add(4, "n2")
    world.says(members=(1, 2, 3, 4, 5))
    assert world.follow() == {}
    (world.directory / FUSION).write_bytes(b'{"restart": 0, "asks": true, "members": "x"}')
    assert world.follow() == {}
    (world.directory / FUSION).unlink()
    (world.directory / FUSION).symlink_to("/etc/passwd")
    assert world.follow() == {}


def test_a_job_that_another_companion_acts_on_is_left_alone(world: World) -> None:
    world.says(asks=True)
    world.elastic[1] = replace(world.elastic[1], refusal=reason("site_acts", user="root"))
    assert world.follow() == {} and world.members is None and not world.slurm.deferred

"""A companion killed anywhere in a resize is succeeded by one that closes it, whatever happened meanwhile."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ones_db import Store
from ones_db.shape import Shape
from slurm_ones.act.transitions import State
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import JobState
from tests.act.fake import FakeJob
from tests.act.world import LEASE_S, NEW, Crash, World


def _nothing(world: World) -> None:
    pass


def _refused(world: World) -> None:
    world.slurm.refuses = lambda shape: "Job violates accounting/QOS policy" if shape == NEW else ""


def _in_part(world: World) -> None:
    world.slurm.takes_part = lambda shape: shape == NEW


def _crowded(world: World) -> None:
    rigid = FakeJob(world.job_id + 1_000_000, world.job.directory.parent / f"rigid{world.job_id}", Shape(1, 10))
    world.slurm.add(rigid)


def _full(world: World) -> None:
    world.slurm.gpus = 0


def _not_deferred(world: World) -> None:
    world.slurm.defer_refused = "Access/permission denied"


def _slow(world: World) -> None:
    world.job.drain_s = 1000.0


@dataclass(frozen=True)
class Road:
    """One way that a resize goes, and how it ends when nothing interrupts it."""

    name: str
    end: State
    running: bool = True
    parks: bool = False
    prepare: Callable[[World], None] = _nothing
    kinds: tuple[str, str] = ("", "")
    """Types of GPU before and after."""
    late: bool = False
    """The job waits for its own --begin, as a pending job that could start would."""


ROADS = [
    Road("there", State.DONE),
    Road("other-type", State.DONE, kinds=("v100", "a100")),
    Road("refused", State.ROLLED_BACK, prepare=_refused),
    Road("in-part", State.ROLLED_BACK, prepare=_in_part),
    Road("waits-too-long", State.ROLLED_BACK, prepare=_crowded, kinds=("", "a100")),
    Road("no-checkpoint", State.ABANDONED, prepare=_slow),
    Road("parked", State.DONE, parks=True),
    Road("park-refused", State.ROLLED_BACK, parks=True, prepare=_not_deferred),
    Road("park-no-checkpoint", State.ABANDONED, parks=True, prepare=_slow),
    Road("waiting", State.DONE, running=False, prepare=_full),
    Road("waiting-refused", State.ROLLED_BACK, running=False, prepare=_refused, late=True),
    Road("waiting-begin", State.ROLLED_BACK, running=False, late=True),
]


def world_of(road: Road, store: Store, folder: Path, *, counts_early: bool) -> World:
    world = World(store, folder, running=road.running, parks=road.parks, kinds=road.kinds, counts_early=counts_early)
    if road.late:
        world.job.begin_time = world.clock() + 500
    road.prepare(world)
    return world


def steps_of(road: Road, store: Store, folder: Path) -> int:
    """How many events an uninterrupted resize has."""
    with world_of(road, store, folder, counts_early=False) as world:
        world.begin()
        assert world.finish().state == road.end
        world.check()
        return len(world.events)


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.name)
@pytest.mark.parametrize("kind", [Crash, Unreachable])
def test_an_interruption_between_any_two_steps(
    store: Store, tmp_path: Path, road: Road, kind: type[BaseException]
) -> None:
    """Killed, or cut off from Slurm, before or after each journal write, order and call: the resize still closes."""
    number_of_steps = steps_of(road, store, tmp_path)
    assert number_of_steps >= 6
    interrupted = 0
    for stop in range(number_of_steps):
        with world_of(road, store, tmp_path, counts_early=stop % 2 == 0) as world:

            def interrupt(number: int, event: str, stop: int = stop) -> None:
                nonlocal interrupted
                if number == stop and (kind is Crash or event.split()[1] not in ("journal", "order")):
                    interrupted += 1
                    raise kind(event)

            world.interrupt = interrupt
            world.begin()
            resize = world.finish()
            world.check()
            assert resize.state == road.end, f"after an interruption at {world.events[stop]}: {world.states}"
    assert interrupted == number_of_steps or kind is Unreachable


@pytest.mark.parametrize("away_s", [5, 45, 55, 70, 1000])
@pytest.mark.parametrize(
    "road", [road for road in ROADS if road.name in ("there", "parked")], ids=lambda road: road.name
)
def test_a_companion_that_stays_away(store: Store, tmp_path: Path, road: Road, away_s: int) -> None:
    """Killed anywhere and started again only after a while: the job is held no longer than that."""
    # A parked job whose lease ended meanwhile runs again.
    ends = {State.DONE, State.ABANDONED} | ({State.ROLLED_BACK} if road.parks and away_s > LEASE_S else set())
    for stop in range(steps_of(road, store, tmp_path)):
        with world_of(road, store, tmp_path, counts_early=False) as world:

            def interrupt(number: int, event: str, world: World = world, stop: int = stop) -> None:
                if number == stop:
                    raise Crash(event)

            world.interrupt = interrupt
            world.begin()
            for _ in range(100):
                world.slurm.pass_time(1.0)
                machine = world.machine
                world.advance()
                if world.machine is not machine:
                    break
            for _ in range(away_s // 5):
                world.slurm.pass_time(5.0)
            assert world.finish().state in ends
            world.check()


ACTIONS: dict[str, Callable[[World], None]] = {
    "cancel": lambda world: world.slurm.end(world.job_id, JobState.CANCELLED),
    "finish": lambda world: world.slurm.end(world.job_id, JobState.COMPLETED),
    "owner releases": lambda world: world.slurm.owner_releases(world.job_id),
    "preempt": lambda world: world.slurm.preempt(world.job_id),
    "opt out": lambda world: setattr(world.job, "comment", "ones: gpus=1 resize=off"),
    "opt in": lambda world: setattr(world.job, "comment", "ones: gpus=1-16"),
    "stop": lambda world: setattr(world, "stopped", True),
    "go": lambda world: setattr(world, "stopped", False),
    "fill": lambda world: setattr(world.slurm, "gpus", 4),
    "empty": lambda world: setattr(world.slurm, "gpus", 16),
    "refuse": _refused,
    "refuse to defer": _not_deferred,
    "take in part": _in_part,
    "take": lambda world: world.slurm.__dict__.update(refuses=lambda shape: "", takes_part=lambda shape: False),
}

FAULTS = st.dictionaries(st.integers(0, 40), st.sampled_from(["crash", "unreachable"]), max_size=8)
HAPPENINGS = st.dictionaries(st.integers(0, 60), st.sampled_from(sorted(ACTIONS)), max_size=6)
JOBS = st.fixed_dictionaries(
    {
        "running": st.booleans(),
        "parks": st.booleans(),
        "counts_early": st.booleans(),
        "drain_s": st.sampled_from([0.0, 2.0, 30.0, 60.0]),
        "completing_s": st.sampled_from([0.0, 2.0, 20.0]),
        "hello_s": st.sampled_from([0.0, 3.0, 400.0]),
    }
)


@pytest.mark.slow
@given(job=JOBS, faults=FAULTS, happenings=HAPPENINGS, away=st.sampled_from([0, 0, 3, 65]))
@example(
    job={"running": True, "parks": False, "counts_early": False, "drain_s": 2.0, "completing_s": 2.0, "hello_s": 3.0},
    faults={0: "crash", 7: "crash", 8: "unreachable"},
    happenings={4: "opt out", 5: "preempt"},
    away=65,
)
def test_whatever_happens(
    store: Store, job: dict[str, object], faults: dict[int, str], happenings: dict[int, str], away: int
) -> None:
    """Any mixture of crashes, silence and other people's doings leaves the job as it may be left."""
    job = job | {"parks": job["parks"] and job["running"]}  # a waiting job is parked without a resize
    with tempfile.TemporaryDirectory() as folder, World(store, Path(folder), **job) as world:  # type: ignore[arg-type]

        def interrupt(number: int, event: str) -> None:
            fault = faults.get(number)
            if fault == "crash":
                raise Crash(event)
            if fault == "unreachable" and event.split()[1] not in ("journal", "order"):
                raise Unreachable(event)

        world.interrupt = interrupt
        world.begin()
        second = 0
        while second < 3000 and (second < 61 or world.resize.ended is None):
            if second in happenings:
                ACTIONS[happenings[second]](world)
            asked = len(world.slurm.calls)
            machine = world.machine
            world.tick()
            if not world._wanted(world.slurm._seen(world.job)):
                done = world.slurm.calls[asked:]
                assert ("reshape", NEW) not in done and ("requeue_hold", world.job_id) not in done
                assert all(call != "defer" or until <= world.clock() for call, until in done)  # type: ignore[operator]
            if world.machine is not machine:
                for _ in range(away):
                    world.slurm.pass_time(1.0)
            second += 1
        world.finish()
        world.check()


@pytest.mark.slow
def test_many_random_resizes_without_faults_end_well(store: Store, tmp_path: Path) -> None:
    """Without faults or interference a resize always takes effect, however slow the job is within the limits."""
    rng = random.Random(1)
    for _ in range(20):
        slow = {"drain_s": rng.uniform(0, 35), "completing_s": rng.uniform(0, 30), "hello_s": rng.uniform(0, 250)}
        with World(store, tmp_path, counts_early=rng.random() < 0.5, **slow) as world:
            world.begin()
            assert world.finish().state == State.DONE
            world.check()

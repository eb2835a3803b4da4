"""A companion killed anywhere in a change of blocks is succeeded by one that closes it, and the job trains on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.act.transitions import State
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import Task
from tests.act.block_world import BlockWorld
from tests.act.test_blocks import FOUR, ONE, TWO
from tests.act.world import Crash
from tests.marks import examples, nightly


def _nothing(world: BlockWorld) -> None:
    pass


def _full(world: BlockWorld) -> None:
    world.drain_all()


def _never(world: BlockWorld) -> None:
    world.cluster.forbid_shape(world.job_id, FOUR)


@dataclass(frozen=True)
class Road:
    """One way that a change goes, and how it ends when nothing interrupts it."""

    name: str
    end: State
    added: Mapping[int, Shape] = field(default_factory=dict)
    dropped: tuple[int, ...] = ()
    before: Mapping[int, Shape] = field(default_factory=dict)
    prepare: Callable[[BlockWorld], None] = _nothing

    def __str__(self) -> str:
        return self.name


ROADS = [
    Road("grow", State.DONE, {1: TWO, 2: ONE}),
    Road("shrink", State.DONE, dropped=(1,), before={1: TWO}),
    Road("replace", State.DONE, {2: FOUR}, (0, 1), {1: ONE}),
    Road("refused", State.ROLLED_BACK, {1: Shape(9, 4)}),
    Road("waits-too-long", State.ROLLED_BACK, {2: ONE}, (1,), {1: ONE}, _full),
    Road("never-starts", State.ROLLED_BACK, {1: FOUR}, prepare=_never),
]


def world_of(road: Road, empty: Path, folder: Path) -> BlockWorld:
    world = BlockWorld(empty, folder, road.before, quick=True)
    road.prepare(world)
    return world


def interrupted(
    road: Road, empty: Path, folder: Path, stop: int | None, kind: type[BaseException] = Crash
) -> list[str]:
    """Take the road, interrupted once before or after the event of that number; the events that there were."""
    with world_of(road, empty, folder) as world:
        world.fail({stop: kind} if stop is not None else {})
        resize = world.change(road.added, road.dropped)
        where = world.events[stop] if stop is not None else "nothing"
        assert resize.state == road.end, f"after an interruption at {where}: {world.states}, {resize.outcome!s}"
        world.check()
        return world.events


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "road"),
    [(nightly if road.name == "never-starts" else pytest.param)(Crash, road) for road in ROADS]
    + [pytest.param(Unreachable, ROADS[0]), nightly(Unreachable, ROADS[2])],
    ids=lambda given: given.__name__ if isinstance(given, type) else str(given),
)
def test_an_interruption_between_any_two_steps(empty: Path, road: Road, kind: type[BaseException]) -> None:
    """Killed, or cut off from Slurm, before or after each journal write, order and call: the change still closes, no
    block is left held by nobody's record or running apart, and the job trains on with the blocks that it should."""
    with tempfile.TemporaryDirectory(dir=empty.parent) as name:
        folder = Path(name)
        events = interrupted(road, empty, folder, None)
        assert len(events) >= 6
        for stop, event in enumerate(events):
            if kind is Crash or event.split()[1] not in ("journal", "order"):
                interrupted(road, empty, folder, stop, kind)


ACTIONS: dict[str, Callable[[BlockWorld], None]] = {
    "cancel all": lambda world: world.cluster.cancel(world.job_id),
    "cancel a newcomer": lambda world: world.cluster.cancel(Task(world.job_id, 2)),
    "cancel the leader": lambda world: world.cluster.cancel(Task(world.job_id, 0)),
    "hold a newcomer": lambda world: world.cluster.hold(Task(world.job_id, 2)),
    "release a newcomer": lambda world: world.cluster.release(Task(world.job_id, 2)),
    "release another": lambda world: world.cluster.release(Task(world.job_id, 5)),
    "preempt": lambda world: world.cluster.preempt(Task(world.job_id, 1)),
    "preempt by cancelling": lambda world: world.cluster.preempt(Task(world.job_id, 1), "cancel"),
    "preempt a newcomer": lambda world: world.cluster.preempt(Task(world.job_id, 2), "cancel"),
    "opt out": lambda world: world.cluster.set_comment(world.job_id, "ones: gpus=1 resize=off array=blocks"),
    "stop": lambda world: world.stop_file.touch(),
    "go": lambda world: world.stop_file.unlink(missing_ok=True),
    "fill": _full,
    "lose the store": lambda world: world.training.lose_store(),
    "forget the newcomer": lambda world: world.cluster.kill(Task(world.job_id, 2), 1),
}

FAULTS = st.dictionaries(st.integers(0, 40), st.sampled_from([Crash, Unreachable]), max_size=6)
HAPPENINGS = st.dictionaries(st.integers(0, 60), st.sampled_from(sorted(ACTIONS)), max_size=4)
CHANGES = st.sampled_from([({2: TWO}, ()), ({}, (1,)), ({2: ONE}, (1,)), ({2: FOUR}, (0, 1)), ({2: ONE, 3: ONE}, ())])


@pytest.mark.slow
@settings(examples(8), phases=[Phase.generate])
@given(change=CHANGES, faults=FAULTS, happenings=HAPPENINGS, away=st.sampled_from([0, 0, 3, 65]))
def test_whatever_happens(
    empty: Path,
    change: tuple[dict[int, Shape], tuple[int, ...]],
    faults: dict[int, type[BaseException]],
    happenings: dict[int, str],
    away: int,
) -> None:
    """Any mixture of crashes, silence and other people's doings: the change is closed, and once the job is over no task
    of it waits in a hold."""
    with tempfile.TemporaryDirectory(dir=empty.parent) as name, BlockWorld(empty, Path(name), {1: ONE}) as world:
        world.fail(faults)
        world.begin(*change)
        for second in range(400):
            if second in happenings:
                ACTIONS[happenings[second]](world)
            machine = world.machine
            world.tick()
            if world.machine is not machine:
                for _ in range(away):
                    world.simulated.pass_time(1.0)
            if second > 61 and world.resize.ended is not None:
                break
        assert world.resize.ended is not None, f"stuck: {world.states}"
        world.interrupt = lambda number, event: None
        if {"opt out", "release another", "release a newcomer"}.isdisjoint(happenings.values()):
            world.simulated.pass_time(30)
            for task, job in world.tasks.items():
                assert not job.running or task in world.training.members, f"{task} runs apart after {world.states}"
        for task, job in world.tasks.items():
            if job.running or (job.pending and not job.held):
                world.cluster.cancel(Task(world.job_id, task))
        world.simulated.pass_time(60)
        world.machine = world.companion()
        world.cluster.set_comment(world.job_id, "ones: gpus=1-16 array=blocks")
        world.tidy()
        held = {task for task, job in world.tasks.items() if job.pending and job.held}
        owners = {2} if "hold a newcomer" in happenings.values() else set()
        # With a task that its owner keeps, the job is not over.
        assert not held or 2 in held & owners, f"left held after {world.states}"

"""A companion killed anywhere in a resize is succeeded by one that closes it, whatever happened meanwhile."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.act.transitions import State
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.simulate.slurm.nodes import SlurmConf
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import JobState
from tests.act.plain_job import PlainJob
from tests.act.world import LEASE_S, NEW, Crash, World
from tests.marks import NIGHTLY, nightly


def _refused(world: World) -> None:
    world.slurm.refuses = lambda shape: "Job violates accounting/QOS policy" if shape == NEW else ""


def _all_refused(world: World) -> None:
    world.slurm.refuses = lambda shape: "no"


def _in_part(world: World) -> None:
    world.slurm.takes_part = lambda shape: shape == NEW


def _not_released(world: World) -> None:
    world.slurm.release_refused = lambda shape: "Requested partition configuration not available" * (shape == NEW)


def _never_started(world: World) -> None:
    world.slurm.cluster.forbid_shape(world.job_id, NEW)


def _crowded(world: World) -> None:
    world.slurm.add(PlainJob(world.job.directory.parent / "rigid", Shape(3, 4)))


def _crowded_and_not_held(world: World) -> None:
    _crowded(world)
    world.slurm.hold_refused = "no"


def _full(world: World) -> None:
    world.slurm.leave(0)


def _without_directory(world: World) -> None:
    shutil.rmtree(world.job.directory)


def _not_deferred(world: World) -> None:
    world.slurm.defer_refused = "Access/permission denied"


def _not_at_once(world: World) -> None:
    world.slurm.start_now_refused = "no"


def _limited(world: World) -> None:
    if not world.job.runs:
        _full(world)
    world.slurm.cluster.conf = SlurmConf(account_gpus={"": NEW.gpus - 1})


def _not_requeued_or_held(world: World) -> None:
    world.slurm.requeue_refused = world.slurm.hold_refused = "Requested operation is presently disabled"


@dataclass(frozen=True)
class Road:
    """One way that a resize goes, and how it ends when nothing interrupts it."""

    name: str
    states: str
    code: str
    """Why it ended so, or turned back."""
    prepare: Callable[[World], object] = lambda world: None
    options: Mapping[str, Any] = field(default_factory=dict)
    begin_s: float = 0.0
    """The job waits for its own --begin for so long, as a pending job that could start would."""

    @property
    def end(self) -> State:
        return State(self.states.split()[-1])

    @property
    def parks(self) -> bool:
        return bool(self.options.get("parks"))


DRAINED, HELD, WAITS = "draining requeuing reshaping", "holding reshaping", {"running": False}
THERE, PARKING = f"{DRAINED} releasing waiting starting done", "draining requeuing parking"
RELEASED = "releasing_back waiting_back starting_back rolled_back"
BACK, WAITS_BACK = f"reshaping_back {RELEASED}", "releasing_back waiting_back rolled_back"
BACK_WAITING = f"reshaping_back {WAITS_BACK}"
LATE, TYPES, PARKS = f"{DRAINED} releasing waiting holding_back {BACK}", {"kinds": ("v100", "a100")}, {"parks": True}
ROADS = [
    Road("there", THERE, "stands"),
    Road("other-type", THERE, "stands", options=TYPES),
    Road("refused", f"{DRAINED} {BACK}", "shape_refused", _refused),
    Road("in-part", f"{DRAINED} {BACK}", "shape_refused", _in_part),
    Road("waits-too-long", LATE, "queued_too_long", _crowded, {"kinds": ("", "a100"), "settings": {"max_wait_s": 9}}),
    Road("no-checkpoint", "draining abandoned", "no_checkpoint", options={"drain_s": 1000.0}),
    Road("parked", f"{PARKING} done", "parked", options=PARKS),
    Road("park-refused", f"{PARKING} {RELEASED}", "defer_refused", _not_deferred, PARKS),
    Road("park-no-checkpoint", "draining abandoned", "no_checkpoint", options=PARKS | {"drain_s": 1000.0}),
    Road("waiting", f"{HELD} releasing waiting done", "stands", _full, WAITS),
    Road("waiting-refused", f"{HELD} reshaping_back {WAITS_BACK}", "shape_refused", _refused, WAITS, 500.0),
    Road(
        "waiting-begin",
        f"{HELD} releasing waiting waiting_back rolled_back",
        "waits_for_other",
        begin_s=500.0,
        options=WAITS,
    ),
]
BYWAYS = [
    Road("old-shape-refused-too", f"{DRAINED} {BACK}", "old_shape_refused", _all_refused),
    Road("not-released", f"{DRAINED} releasing {BACK}", "release_refused", _not_released),
    Road(
        "not-held-back",
        f"{DRAINED} releasing waiting holding_back {RELEASED}",
        "hold_refused",
        _crowded_and_not_held,
        {"settings": {"max_wait_s": 9}},
    ),
    Road("never-started", LATE, "never_starts", _never_started),
    Road("limited", LATE, "limit_reached", _limited, {"settings": {"max_wait_s": 300}}),
    Road("limited-waiting", f"{HELD} releasing waiting holding_back {BACK_WAITING}", "limit_reached", _limited, WAITS),
    Road("not-requeued", "draining requeuing abandoned", "requeue_refused", _not_requeued_or_held),
    Road("not-held", f"holding {WAITS_BACK}", "hold_refused", _not_requeued_or_held, WAITS, 500.0),
    Road("not-at-once", THERE, "stands", _not_at_once, {"settings": {"max_wait_s": 300}}),
    Road("no-directory", "draining abandoned", "order_not_written", _without_directory),
    Road("silent", THERE, "stands_no_start_report", options={"hello_s": 1e9}),
]
"""Those that are not interrupted."""
ALIKE = {"other-type", "in-part"}
"""Roads whose states are those of another."""
CUT_OFF = {"there", "waits-too-long", "no-checkpoint", "parked", "waiting"}
"""By day, of each kind one."""
INTERRUPTED = [
    pytest.param(
        kind,
        road,
        marks=() if road.name in CUT_OFF or (kind is Crash and road.name not in ALIKE) else pytest.mark.nightly,
        id=f"{kind.__name__}-{road.name}",
    )
    for kind in (Crash, Unreachable)
    for road in ROADS
]


def world_of(road: Road, empty: Path, folder: Path, *, counts_early: bool) -> World:
    world = World(empty, folder, **{"counts_early": counts_early, **road.options})
    if road.begin_s:
        world.slurm.cluster.set_begin(world.job_id, world.clock() + road.begin_s)
    road.prepare(world)
    return world


def steps_of(road: Road, empty: Path, folder: Path) -> list[str]:
    """The events of an uninterrupted resize."""
    with world_of(road, empty, folder, counts_early=False) as world:
        assert world.change().state == road.end
        world.check()
        return world.events


@pytest.mark.parametrize("counts_early", [False, True])
@pytest.mark.parametrize("road", ROADS + BYWAYS, ids=lambda road: road.name)
def test_a_road_that_nothing_interrupts(empty: Path, tmp_path: Path, road: Road, counts_early: bool) -> None:
    """Its states and why it ends so, with the shape and batch that its end has (`World.check`), held by nobody."""
    with world_of(road, empty, tmp_path, counts_early=counts_early) as world:
        begin_time = world.job.begin
        resize = world.change()
        world.check()
        assert " ".join(world.states) == road.states
        assert road.code in {step.detail.code for step in world.store.resize_steps(resize.id)}
        assert not road.begin_s or world.job.begin == begin_time, "its owner's"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "road"), INTERRUPTED)
def test_an_interruption_between_any_two_steps(
    empty: Path, tmp_path: Path, kind: type[BaseException], road: Road
) -> None:
    """Killed, or cut off from Slurm, before or after each journal write, order and call: the resize still closes."""
    steps = steps_of(road, empty, tmp_path)
    assert len(steps) >= 6
    for stop, step in enumerate(steps):
        if kind is Unreachable and step.split()[1] in ("journal", "order"):
            continue
        with world_of(road, empty, tmp_path, counts_early=stop % 2 == 0) as world:
            world.fail({stop: kind})
            resize = world.change()
            world.check()
            assert resize.state == road.end, f"after an interruption at {world.events[stop]}: {world.states}"
            assert len(world.events) > stop


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [nightly(5), nightly(45), nightly(55), 70, nightly(1000)])
@pytest.mark.parametrize(
    "road", [road for road in ROADS if road.name in ("there", "parked")], ids=lambda road: road.name
)
def test_a_companion_that_stays_away(empty: Path, tmp_path: Path, road: Road, away_s: int) -> None:
    """Killed anywhere and started again only after a while: the job is held no longer than that."""
    # A parked job whose lease ended meanwhile runs again.
    ends = {State.DONE, State.ABANDONED} | ({State.ROLLED_BACK} if road.parks and away_s > LEASE_S else set())
    for stop in range(len(steps_of(road, empty, tmp_path))):
        with world_of(road, empty, tmp_path, counts_early=False) as world:
            world.fail({stop: Crash})
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
    "preempt": lambda world: world.slurm.cluster.preempt(world.job_id),
    "opt out": lambda world: world.slurm.cluster.set_comment(world.job_id, "ones: gpus=1 resize=off"),
    "opt in": lambda world: world.slurm.cluster.set_comment(world.job_id, "ones: gpus=1-16"),
    "stop": lambda world: setattr(world, "stopped", True),
    "go": lambda world: setattr(world, "stopped", False),
    "fill": lambda world: world.slurm.leave(4),
    "empty": lambda world: world.slurm.leave(16),
    "refuse": _refused,
    "refuse to defer": _not_deferred,
    "take in part": _in_part,
    "take": lambda world: world.slurm.__dict__.update(refuses=lambda shape: "", takes_part=lambda shape: False),
}

FAULTS = st.dictionaries(st.integers(0, 40), st.sampled_from([Crash, Unreachable]), max_size=8)
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
    faults={0: Crash, 7: Crash, 8: Unreachable},
    happenings={4: "opt out", 5: "preempt"},
    away=65,
)
def test_whatever_happens(
    empty: Path,
    job: dict[str, object],
    faults: dict[int, type[BaseException]],
    happenings: dict[int, str],
    away: int,
) -> None:
    """Any mixture of crashes, silence and other people's doings leaves the job as it may be left."""
    job = job | {"parks": job["parks"] and job["running"]}  # a waiting job is parked without a resize
    with tempfile.TemporaryDirectory() as folder, World(empty, Path(folder), **job) as world:  # type: ignore[arg-type]
        world.fail(faults)
        world.begin()
        second = 0
        while second < 3000 and (second < 61 or world.resize.ended is None):
            if second in happenings:
                ACTIONS[happenings[second]](world)
            asked = len(world.slurm.calls)
            machine = world.machine
            world.tick()
            if not world._wanted(WholeJob.of(world.job.record.to_model())):
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
def test_many_random_resizes_without_faults_end_well(empty: Path, tmp_path: Path) -> None:
    """Without faults or interference a resize always takes effect, however slow the job is within the limits."""
    rng = random.Random(1)
    for _ in range(20 if NIGHTLY else 5):
        slow = {"drain_s": rng.uniform(0, 35), "completing_s": rng.uniform(0, 30), "hello_s": rng.uniform(0, 250)}
        with World(empty, tmp_path, counts_early=rng.random() < 0.5, **slow) as world:
            assert world.change().state == State.DONE
            world.check()

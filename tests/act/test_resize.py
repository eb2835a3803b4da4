"""Each way that a resize can go, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ones_db import RESIZE_OVERTAKEN
from ones_db.shape import Shape
from ones_wrapper.protocol import DRAIN_WAIT_S, ORDERS, Spec, decode_order, directory_name
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from slurm_ones.act.blocks import BLOCK_HANDLERS
from slurm_ones.act.holds import StaleHolds
from slurm_ones.act.transitions import TRANSITIONS, Stage, State
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.slurm.client import Refused, Unreachable
from slurm_ones.slurm.model import JobKey, JobState, SlurmJob
from slurm_ones.untrusted_files import NoAnswer, run_by
from tests.act.plain_job import EPOCH, PlainJob, PlainReports, Slurm
from tests.act.world import NEW, NEW_BATCH, OLD, OLD_BATCH, Crash, World

Make = Callable[..., World]

THERE = ["draining", "requeuing", "reshaping", "releasing", "waiting", "starting", "done"]


def fill(world: World, nodes: int) -> PlainJob:
    """Somebody else's job takes all GPUs of these nodes."""
    return world.slurm.add(PlainJob(world.job.directory.parent / "rigid", Shape(nodes, 4)))


def down_at(unreachable: str) -> Callable[[int, str], None]:
    """An interruption: Slurm does not answer to this one kind of call."""

    def interrupt(number: int, event: str) -> None:
        if event == unreachable:
            raise Unreachable("slurmctld does not answer")

    return interrupt


def switch_off(world: World) -> None:
    world.slurm.cluster.set_comment(world.job_id, "ones: gpus=1-16 resize=off")


def remove_comment(world: World) -> None:
    world.slurm.cluster.set_comment(world.job_id, "")


def stop_file(world: World) -> None:
    world.stopped = True


OPT_OUTS = [switch_off, remove_comment, stop_file]


@pytest.mark.parametrize("start_now", [True, False])
def test_a_running_job_gets_its_new_shape(make_world: Make, start_now: bool) -> None:
    """Restarted once, with its new batch, and its pause is known; Slurm's two minutes are waited for unless the
    settings say otherwise."""
    world = make_world(settings={"start_now": start_now, "max_wait_s": 300})
    resize = world.change()
    world.check()
    assert world.calls == ["requeue_hold", "reshape", "release"] and ("release", start_now) in world.slurm.calls
    assert resize.pause_s is not None and world.job.restart == 1
    assert world.job.run is not None and world.job.run.batch == NEW_BATCH
    assert (world.job.start_time - EPOCH > 121) != start_now


def test_the_job_is_told_what_is_expected(make_world: Make) -> None:
    """Protects the line in the job's log; a companion that died knows it no more, and orders all the same."""
    for gain in (1.75, None):
        world = make_world()
        resize = world.begin()
        world.machine.gains = {resize.id: gain} if gain else {}
        world.tick()
        directory = world.job.directory / directory_name(world.job_id)
        order = decode_order((directory / ORDERS).read_bytes())
        assert (order.drain, order.gain) == (True, gain)
        world.finish()
        assert world.machine.gains == {}


@pytest.mark.parametrize("error", [Refused("no such step"), Unreachable("scancel: no answer within 30 s")])
def test_a_job_that_is_not_woken_finds_its_order(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Protects a resize from a signal that Slurm refuses or does not answer: the order is there all the same."""

    def signal(*_: object, **__: object) -> None:
        raise error

    world = make_world()
    monkeypatch.setattr(world.slurm, "signal", signal)
    world.change()
    world.check()
    assert world.states == THERE


def test_a_hold_of_the_owners_that_came_first_is_not_lifted(make_world: Make) -> None:
    """Held between the decision and our own hold, which looks the same: it stays, and Slurm is asked nothing."""
    world = make_world(running=False)
    world.slurm.leave(0)
    world.job.held_by = "owner"
    world.machine.new.add(world.begin().id)
    resize = world.finish()
    assert world.calls == [] and resize.state == State.ABANDONED and world.job.held_by == "owner"


def test_a_job_that_starts_just_before_it_is_held_back_keeps_its_new_shape(make_world: Make) -> None:
    """The hold comes too late, strikes the running job's priority, and is taken back."""
    world = make_world()
    world.begin()
    world.until(State.RELEASING, State.WAITING)
    rigid = fill(world, 3)

    def start_first() -> None:
        world.slurm.end(rigid.job_id, JobState.COMPLETED)
        world.slurm.pass_time(0.0)

    world.at("before hold", start_first)
    world.until(Stage(State.HOLDING, True))
    assert world.job.state is JobState.RUNNING and world.job.held_by == "us"
    resize = world.finish()
    world.check()
    assert resize.state == State.DONE and world.states[-4:] == ["holding_back", "releasing", "starting", "done"]


def test_a_waiting_job_that_starts_just_before_it_is_held_runs_on_unheld(make_world: Make) -> None:
    """The same race on the way there; releasing a running job must not ask for StartTime."""
    world = make_world(running=False)

    world.at("before hold", lambda: world.slurm.pass_time(0.0))
    world.begin()
    world.advance()
    assert world.job.state is JobState.RUNNING and world.job.held_by == "us"
    resize = world.finish()
    world.check()
    assert (resize.state, str(resize.outcome)) == ("rolled_back", "it runs at its old shape")
    assert world.slurm.calls[-1] == ("release", False)


def test_a_job_that_starts_before_anything_was_done_is_left_alone(make_world: Make) -> None:
    """Nothing was asked of Slurm, nothing is."""
    world = make_world(running=False)
    world.begin()
    world.slurm.pass_time(1)
    world.advance()
    resize = world.finish()
    assert world.calls == [] and world.job.shape == OLD
    assert (resize.state, resize.outcome.code) == ("abandoned", RESIZE_OVERTAKEN)


def test_an_old_shape_that_is_refused_is_tried_again(make_world: Make) -> None:
    """Slurm never starts the job at the new one."""
    world = make_world()
    world.slurm.cluster.forbid_shape(world.job_id, NEW)
    refused: list[float] = []

    def refuses(shape: Shape) -> str:
        if shape == OLD and len(refused) < 3:
            refused.append(world.clock())
            return "not now"
        return ""

    world.slurm.refuses = refuses
    assert world.change().state == State.ROLLED_BACK and world.job.shape == OLD
    assert len(refused) == 3 and world.calls[-1] == "reshape"
    world.check()


@pytest.mark.parametrize("half", [{"shape": NEW}, {"kind": "a100"}], ids=["shape", "type"])
def test_a_shape_or_type_that_was_taken_alone_is_put_back(make_world: Make, half: dict[str, object]) -> None:
    """Slurm took one of them, refused the other, and then refuses what the job had once."""
    world = make_world(kinds=("v100", "a100"))
    world.slurm.cluster.forbid_shape(world.job_id, NEW)
    refused: list[Shape] = []

    def refuses(shape: Shape) -> str:
        if shape == OLD and OLD in refused:
            return ""
        if shape == NEW:
            for name, value in half.items():
                setattr(world.job, name, value)
        refused.append(shape)
        return "not now"

    world.slurm.refuses = refuses
    assert world.change().state == State.ROLLED_BACK and refused == [NEW, OLD]
    world.check()


# -- the drain -------------------------------------------------------------------------------------------------------


def test_a_companion_that_comes_back_late_leaves_the_job_to_train_on(make_world: Make) -> None:
    """A job waits a minute for its requeue: after that it has gone on, and a requeue would cost it work."""
    world = make_world()
    world.begin()
    world.advance()
    world.slurm.pass_time(3)
    world.slurm.pass_time(3)
    assert world.job.run is not None and world.job.run.waits_since is not None
    world.slurm.pass_time(DRAIN_WAIT_S - 8)  # it waits still, but not for much longer
    world.machine = world.companion()
    resize = world.finish()
    world.check()
    assert (resize.state, str(resize.outcome)) == ("abandoned", "it was not requeued in time and trains on")
    assert world.calls == []


def test_a_clock_of_the_job_that_is_ahead_does_not_stretch_its_minute(make_world: Make) -> None:
    """How long a job waits is counted from when the companion first read of it, also after many looks."""
    world = make_world()
    world.interrupt = down_at("before requeue_hold")
    world.begin()
    world.until(State.REQUEUING)
    deadline = world.resize.deadline
    assert deadline is not None and deadline < world.clock() + DRAIN_WAIT_S
    world.machine.reports.drained = lambda job, restart, order: world.clock()  # type: ignore[method-assign]
    world.clock.now = deadline + 1
    world.advance()
    assert world.resize.state == State.ABANDONED


def test_a_clock_of_the_job_that_is_behind_does_not_shorten_its_minute(make_world: Make) -> None:
    """Its report seems older than the minute for which the job waits, but cannot be older than the resize."""
    world = make_world()
    world.clock.now += 2 * DRAIN_WAIT_S
    assert world.change().state == State.DONE


def test_a_report_that_is_found_late_leaves_the_job_to_train_on(make_world: Make) -> None:
    """Its file shows the checkpoint once the job's minute is over: a requeue would cost it what it has done since."""
    world = make_world(settings={"drain_timeout_s": 3 * DRAIN_WAIT_S})
    shown_from, drained = world.clock() + DRAIN_WAIT_S + 10, world.machine.reports.drained

    def found(job: WholeJob, restart: int, order: int) -> float | None:
        return drained(job, restart, order) if world.clock() > shown_from else None

    world.machine.reports.drained = found  # type: ignore[method-assign]
    resize = world.change()
    world.check()
    assert (resize.state, str(resize.outcome)) == ("abandoned", "it was not requeued in time and trains on")
    assert world.calls == []


def test_the_order_is_written_once(make_world: Make) -> None:
    """A companion that starts anew finds it in force, and gives it again only where it is not."""
    world = make_world(drain_s=30.0)
    world.begin()
    for _ in range(5):
        world.tick()
    assert world.events == ["before order", "after order"]
    world.machine = world.companion()
    for _ in range(5):
        world.tick()
    assert world.events == ["before order", "after order"]
    (world.job.directory / directory_name(world.job_id) / ORDERS).unlink()
    world.machine = world.companion()
    world.tick()
    assert world.events == ["before order", "after order"] * 2
    text = (world.job.directory / directory_name(world.job_id) / ORDERS).read_bytes()
    assert decode_order(text).number == world.resize.order_number
    assert world.finish().state == State.DONE
    world.check()


@pytest.mark.parametrize("state", [Stage(State.DRAINING), Stage(State.REQUEUING)])
def test_a_job_that_slurm_requeues_by_itself_keeps_its_shape_and_batch(make_world: Make, state: State) -> None:
    """Preempted while draining: its next run has the old shape, so the batch ordered for the new one is taken back."""
    world = make_world()
    world.interrupt = down_at("before requeue_hold")
    world.begin()
    world.until(state)
    world.slurm.cluster.preempt(world.job_id)
    resize = world.finish()
    world.check()
    assert resize.state == State.ABANDONED
    assert world.job.runs[-1].restart == 1 and world.job.run is not None
    assert world.job.run.batch == OLD_BATCH


def test_a_suspended_job_is_waited_for_and_then_let_be(make_world: Make) -> None:
    """A suspended run has not ended: its drain stays until it is late, and is called off then."""
    world = make_world()
    world.begin()
    world.advance()
    world.job.record.state = JobState.SUSPENDED
    world.tick()
    assert world.resize.state == State.DRAINING
    for _ in range(50):
        world.tick()
    assert str(world.resize.outcome) == "no checkpoint in time"
    world.job.record.state = JobState.RUNNING
    world.tick()
    world.check()


# -- opting out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_out", OPT_OUTS)
@pytest.mark.parametrize("state", [State.DRAINING, State.REQUEUING, State.RESHAPING])
def test_opting_out_of_a_running_jobs_resize(make_world: Make, state: State, opt_out: Callable[[World], None]) -> None:
    """Until it is reshaped an opted-out job is told to train on or gets its old shape back; from then on too."""
    world = make_world()

    world.at(f"after journal {state.value}", lambda: opt_out(world))
    world.begin()
    if state is State.DRAINING:
        opt_out(world)
    resize = world.finish()
    world.check()
    assert ("reshape", NEW) not in world.slurm.calls
    if state is State.RESHAPING:
        assert resize.state == State.ROLLED_BACK
    else:
        assert resize.state == State.ABANDONED and world.calls == []
        assert str(resize.outcome) == "resizing was switched off"


@pytest.mark.parametrize("opt_out", OPT_OUTS)
@pytest.mark.parametrize("event", ["", "after hold"])
def test_opting_out_of_a_waiting_jobs_resize(make_world: Make, event: str, opt_out: Callable[[World], None]) -> None:
    """A waiting job is not held, or released at its old shape."""
    world = make_world(running=False)
    world.slurm.cluster.set_begin(world.job_id, world.clock() + 1000)
    world.at(event, lambda: opt_out(world))
    world.begin()
    if not event:
        opt_out(world)
    resize = world.finish()
    world.check()
    assert ("reshape", NEW) not in world.slurm.calls
    assert resize.state == (State.ROLLED_BACK if event else State.ABANDONED)


@pytest.mark.parametrize("opt_out", OPT_OUTS)
@pytest.mark.parametrize("state", [State.RELEASING, State.WAITING, State.STARTING])
def test_opting_out_after_the_reshape_takes_nothing_back_at_once(
    make_world: Make, state: State, opt_out: Callable[[World], None]
) -> None:
    """The job is released at the shape it has; what was begun is finished, never left half done."""
    world = make_world()
    world.begin()
    world.at(f"after journal {state.value}", lambda: opt_out(world))
    assert world.finish().state == State.DONE
    world.check()


# -- what others do in between ---------------------------------------------------------------------------------------

OPEN = [stage for stage in TRANSITIONS if stage.state not in BLOCK_HANDLERS]


def reach(world: World, stage: Stage) -> None:
    """Take a resize to a state by the road that leads there."""
    if stage.back and stage.state is not State.HOLDING:
        world.slurm.refuses = lambda shape: "no" if shape == NEW else ""
    if stage == Stage(State.HOLDING, True):
        world.interrupt = lambda number, event: fill(world, 3) and None if event == "before reshape" else None
    if stage.state is State.HOLDING:
        world.slurm.hold_refused = ""
    if stage.state is State.PARKING:
        world.parks = True
    world.begin()
    world.halt(str(stage))
    world.machine = world.companion()


def _another(world: World) -> None:
    """Slurm lost its state while no companion ran, and counts from the beginning again."""
    read = world.slurm.job

    def other(job_id: JobKey) -> SlurmJob:
        return replace(read(job_id), submit_time=world.clock() + 60.0, restart=0, comment="", user="bob")

    world.slurm.job = other  # type: ignore[method-assign]


GONE: dict[str, tuple[Callable[[World], None], str]] = {
    "cancelled": (lambda world: world.slurm.end(world.job_id, JobState.CANCELLED), "the job is CANCELLED"),
    "forgotten": (lambda world: world.slurm.forget(world.job_id), "Slurm no longer knows the job"),
    "another's": (_another, "Slurm no longer knows the job"),
}


@pytest.mark.parametrize("how", GONE)
@pytest.mark.parametrize("state", OPEN, ids=str)
def test_a_job_that_is_gone_ends_its_resize(make_world: Make, state: Stage, how: str) -> None:
    """At any point: nothing more is asked of Slurm, nothing is revived, and a new job with the same id is left
    alone."""
    world = make_world(running=state != Stage(State.HOLDING))
    reach(world, state)
    go, outcome = GONE[how]
    go(world)
    asked = len(world.calls)
    world.tick()
    resize = world.resize if how == "another's" else world.finish()
    assert (resize.state, str(resize.outcome)) == ("ended", outcome) and len(world.calls) == asked
    if how == "cancelled":
        world.check()
        assert world.job.state is JobState.CANCELLED


@pytest.mark.parametrize("state", OPEN, ids=str)
def test_a_job_cancelled_between_the_look_and_the_call_stays_cancelled(make_world: Make, state: Stage) -> None:
    """Slurm revives ended jobs on a plain requeue; `Incomplete` is what keeps a cancelled one dead."""
    world = make_world(running=state != Stage(State.HOLDING))
    reach(world, state)

    def cancel(number: int, event: str) -> None:
        if event.startswith("before ") and "journal" not in event:
            world.slurm.end(world.job_id, JobState.CANCELLED)

    world.interrupt = cancel
    world.finish()
    world.check()


@pytest.mark.parametrize("state", [s for s in OPEN if s.state not in (State.DRAINING, State.STARTING)])
def test_a_job_that_its_owner_releases_is_not_disturbed(make_world: Make, state: Stage) -> None:
    """The owner may let the job go at any point; the resize ends at whatever shape that leaves."""
    world = make_world(running=state != Stage(State.HOLDING))
    reach(world, state)
    world.slurm.owner_releases(world.job_id)
    world.slurm.pass_time(130)
    world.slurm.owner_releases(world.job_id)
    world.finish()
    world.check()
    assert world.job.state is JobState.RUNNING


@pytest.mark.parametrize("by", ["owner", "operator"])
@pytest.mark.parametrize("state", OPEN, ids=str)
def test_a_hold_by_others_closes_the_resize(make_world: Make, state: Stage, by: str) -> None:
    """Nobody waits for ever for a held job, and an operator's hold is left to the operator."""
    world = make_world(running=state != Stage(State.HOLDING))
    reach(world, state)
    for _ in range(200):
        if world.resize.ended is not None:
            break
        world.slurm.owner_holds(world.job_id, by)
        world.tick()
    resize = world.finish()
    assert resize.ended is not None
    if by == "operator":
        assert "defer" not in world.calls
        assert world.job.held_by == "operator" or world.job.state is not JobState.PENDING
    if by == "operator" and state.state is State.PARKING:
        assert (resize.state, str(resize.outcome)) == ("rolled_back", "it waits at its old shape, held by an operator")


@pytest.mark.parametrize("state", [stage for stage in OPEN if stage.state in (State.WAITING, State.STARTING)])
def test_a_release_that_slurm_forgot_is_repeated(make_world: Make, state: Stage) -> None:
    """slurmctld died, and began again from a state in which the job stood in our hold."""
    world = make_world()
    reach(world, state)
    world.slurm.forgets_release(world.job_id)
    resize = world.finish()
    assert (world.job.state, world.job.held_by) == (JobState.RUNNING, "") and "held" not in str(resize.outcome)


@pytest.mark.parametrize("down_s", [5, 7200])
def test_a_release_of_a_job_that_waits_is_repeated_too(make_world: Make, down_s: int) -> None:
    """Its hold looks like the owner's: slurmctld started since the job was seen out of it."""
    world = make_world(running=False)
    rigid = fill(world, 4)
    reach(world, Stage(State.WAITING))
    world.machine.seen = world.slurm.snapshot()
    world.slurm.pass_time(down_s)
    world.slurm.forgets_release(world.job_id, requeued=False)
    world.slurm.end(rigid.job_id, JobState.COMPLETED)
    assert world.finish().state == State.DONE and world.job.state is JobState.RUNNING
    assert world.states.count("reshaping") == 2


def test_a_hold_after_a_start_of_slurmctld_that_forgot_nothing_is_the_owners(make_world: Make) -> None:
    """It started before the release, long after it, or before the job was last seen to wait without a hold."""
    for booted, seen in ((-10.0, False), (3600.0, False), (5.0, True)):
        world = make_world(running=False)
        fill(world, 4)
        reach(world, Stage(State.WAITING))
        world.slurm.booted = world.clock() + booted
        if seen:
            world.slurm.pass_time(10)
            world.machine.seen = world.slurm.snapshot()
        world.slurm.owner_holds(world.job_id)
        assert world.finish().outcome.code == "stands_held" and world.job.held_by == "owner"


@pytest.mark.parametrize("lives", [False, True])
@pytest.mark.parametrize("state", [one for one in OPEN if one not in (Stage(State.DRAINING), Stage(State.HOLDING))])
def test_a_requeue_that_slurm_forgot_is_repeated(make_world: Make, state: Stage, lives: bool) -> None:
    """slurmctld died, and began again from a state in which the job ran, as it shows it, without a process. A job that
    it began once more trains on."""
    world = make_world()
    reach(world, state)
    if state.state is State.REQUEUING:
        world.tick()
    world.slurm.pass_time(70)
    world.slurm.forgets_requeue(world.job_id, lives=lives)
    forgot = world.clock()
    while world.job.run is None and world.resize.ended is None:
        world.tick()
        assert world.clock() < forgot + 60
    resize = world.finish()
    assert world.calls.count("requeue_hold") == (1 if lives else 2) and not world.job.held_by
    if not lives:
        world.check()
        assert resize.state == (State.ROLLED_BACK if state.back else State.DONE)
        assert world.parks or world.job.run is not None


@dataclass
class Ticks:
    """What a companion does of stale holds, tick after tick."""

    world: World
    ours: tuple[JobKey, ...] = ()

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.stale = StaleHolds(self.world.slurm, self.world.store, self.world.clock)

    def tick(self, **shown: Any) -> None:
        self.world.slurm.pass_time(5)
        seen = replace(self.world.slurm.job(self.world.job_id), **shown)
        self.stale.release([(self.world.job_id, seen)], self.ours)


@pytest.mark.parametrize("others", ["", "owner", "operator"])
def test_a_release_that_slurm_forgot_after_the_resize_is_repeated(make_world: Make, others: str) -> None:
    """Nobody else would let the job go. A hold that others put on it since is theirs."""
    world = make_world()
    assert world.change().state == State.DONE
    world.slurm.forgets_release(world.job_id)
    if others:
        world.job.held_by, world.job.record.requeue_held = others, False
    Ticks(world).tick(requeue_held=True)
    assert world.job.held_by == others
    world.slurm.pass_time(130)
    assert others or world.job.state is JobState.RUNNING


def test_a_release_that_slurm_forgot_with_a_later_run_is_repeated(make_world: Make) -> None:
    """The job stands in the hold of the requeue before its last one, and its restart count has fallen."""
    world = make_world()
    assert world.change().state == State.DONE
    (record,) = world.store.jobs([world.job_id]).values()
    restart, now = world.job.restart, world.clock()
    world.store.record_jobs([replace(record, restart=restart + 1, submit_time=now + 2)])
    world.slurm.forgets_release(world.job_id)
    world.store.record_jobs([replace(record, restart=restart, submit_time=now + 1)])
    Ticks(world).tick()
    assert world.job.held_by == ""


@pytest.mark.parametrize("restarted", [False, True], ids=["same companion", "another"])
@pytest.mark.parametrize(
    "after",
    [
        "nothing",
        "a resize that gave up",
        "the owner's hold",
        "the owner's hold that no tick saw",
        "the owner's hold, not considered",
        "the owner's later hold",
        "down for half an hour",
        "down for two hours",
    ],
)
def test_a_hold_of_a_job_that_waited_is_ours_if_slurm_forgot_its_release(
    make_world: Make, after: str, restarted: bool
) -> None:
    """By its looks it might be the owner's: it is theirs if it was seen before slurmctld started, came later, or Slurm
    considered the job in between. A companion that starts later knows that too, but not when slurmctld went down."""
    world = make_world(running=False)
    fill(world, 4)
    world.begin()
    world.until(State.DONE)
    ticks = Ticks(world)
    if after == "the owner's hold":
        world.slurm.owner_holds(world.job_id)
    if after == "the owner's hold, not considered":
        world.slurm.pass_time(600)
    ticks.tick()
    if after in ("the owner's hold that no tick saw", "the owner's hold, not considered"):
        world.slurm.owner_holds(world.job_id)
    if after == "the owner's hold, not considered":
        world.job.record.considered = 0.0
    world.slurm.pass_time({"down for half an hour": 1800, "down for two hours": 7200}.get(after, 5))
    if world.job.held_by:
        world.slurm.booted = world.clock()
    else:
        world.slurm.forgets_release(world.job_id, requeued=False)
        world.job.held_by = "us"
    if restarted:
        ticks.restart()
    if after == "a resize that gave up":
        world.begin()
        world.machine.new.add(world.resize.id)
        world.until(State.ABANDONED)
    if after == "the owner's later hold":
        world.job.held_by = ""
        ticks.tick()
        world.slurm.owner_holds(world.job_id)
    ticks.tick()
    ticks.tick()
    unknown = {"the owner's hold, not considered": "", "down for two hours": "us"} if restarted else {}
    assert world.job.held_by == unknown.get(after, "owner" if "owner" in after else "")


def test_a_release_that_slurm_forgot_and_then_refused_is_repeated(make_world: Make) -> None:
    world = make_world(running=False)
    fill(world, 4)
    world.begin()
    world.until(State.DONE)
    world.slurm.forgets_release(world.job_id, requeued=False)
    ticks = Ticks(world)
    world.slurm.release_refused = lambda shape: "not now"
    ticks.tick()
    assert world.job.held_by
    world.slurm.release_refused = lambda shape: ""
    ticks.tick()
    assert world.job.held_by == ""


def test_a_resize_that_found_the_job_in_our_hold_hides_nothing(make_world: Make) -> None:
    """Slurm forgot the release after a decision was made: that resize gives up, and the hold is ours all the same."""
    world = make_world()
    assert world.change().state == State.DONE
    world.slurm.forgets_release(world.job_id)
    resize = world.change()
    assert resize.state == State.ABANDONED
    Ticks(world).tick()
    assert world.job.held_by == ""


@pytest.mark.parametrize("held_in", [Stage(State.WAITING), Stage(State.WAITING, True)])
def test_an_owners_hold_in_the_queue_is_kept(make_world: Make, held_in: Stage) -> None:
    """Once the job is released, a hold is its owner's, and the resize ends there."""
    world = make_world()
    reach(world, held_in)
    world.slurm.owner_releases(world.job_id)
    world.slurm.owner_holds(world.job_id)
    resize = world.finish()
    assert world.job.held_by == "owner" and str(resize.outcome).endswith("held by its owner")


@pytest.mark.parametrize("by", ["owner", "operator"])
@pytest.mark.parametrize("state", [Stage(State.DRAINING), Stage(State.REQUEUING)])
def test_a_hold_on_a_running_job_is_kept(make_world: Make, state: Stage, by: str) -> None:
    """It is meant for the job's next start: requeued by us it would pass for our own, and be lifted."""
    world = make_world()
    reach(world, state)
    world.slurm.owner_holds(world.job_id, by)
    resize = world.finish()
    assert (world.job.state, world.job.held_by, world.job.restart) == (JobState.RUNNING, by, 0)
    assert (resize.state, str(resize.outcome)) == (State.ABANDONED, "it was held while it ran")


def test_a_run_that_ends_before_its_hello(make_world: Make) -> None:
    """Preempted right after the resize: it took effect all the same."""
    world = make_world(hello_s=50.0)
    world.begin()
    world.until(State.STARTING)
    world.slurm.cluster.preempt(world.job_id)
    world.slurm.leave(0)
    resize = world.finish()
    assert str(resize.outcome) == "it waits at its new shape, and that run ended before it reported its start"


def test_the_outcome_is_what_slurm_holds(make_world: Make) -> None:
    """An owner who reshapes the job meanwhile is not told that it has a shape that it has not."""
    world = make_world()
    world.begin()
    world.until(State.STARTING)
    world.job.shape = type(NEW)(1, 3)
    resize = world.finish()
    assert (resize.state, str(resize.outcome)) == ("rolled_back", "it runs at another shape")


# -- errors ----------------------------------------------------------------------------------------------------------


def test_unreachable_is_passed_on_and_repeated(make_world: Make) -> None:
    """A controller that is down is the caller's to wait for; the resize goes on when it is back."""
    world = make_world()
    world.begin()
    world.until(State.DRAINING)
    fault = world.slurm.fault

    def down(event: str) -> None:
        raise Unreachable("slurmctld does not answer")

    world.slurm.fault = down
    with pytest.raises(Unreachable):
        world.machine.advance(world.resize)
    world.slurm.fault = fault
    assert world.finish().state == State.DONE
    world.check()


def test_another_error_is_looked_at_again(make_world: Make, caplog: pytest.LogCaptureFixture) -> None:
    """An answer that makes no sense is logged and does not spread to the caller."""
    world = make_world()
    world.begin()
    slurm: Slurm = world.slurm
    fault = slurm.fault

    def nonsense(event: str) -> None:
        raise Refused("squeue --json: not JSON")

    slurm.fault = nonsense
    assert world.machine.advance(world.resize).state == State.DRAINING
    assert "not JSON" in caplog.text
    slurm.fault = fault
    assert world.finish().state == State.DONE


def test_a_drain_that_was_called_off_is_not_followed_by_a_requeue(make_world: Make) -> None:
    """The companion died before it had written down what it told the job: to train on."""
    world = make_world()
    world.begin()

    def interrupt(number: int, event: str) -> None:
        if event == "before journal abandoned":
            raise Crash(event)

    world.slurm.requeue_refused = "Requested operation is presently disabled"
    world.interrupt = interrupt
    for _ in range(4):
        world.tick()
    assert world.resize.state == State.REQUEUING
    world.slurm.requeue_refused, world.interrupt = "", lambda number, event: None
    assert world.finish().state == State.ABANDONED
    assert world.job.requeues == []
    world.check()


def test_a_drain_that_was_called_off_is_not_ordered_again(make_world: Make) -> None:
    """Under its old number, which the job would not obey, and in place of the word that lets it train on."""
    world = make_world(drain_s=1000.0)
    world.begin()

    def crash_once() -> None:
        world.interrupt = lambda number, event: None
        raise Crash

    world.at("before journal abandoned", crash_once)
    world.finish()
    text = (world.job.directory / directory_name(world.job_id) / ORDERS).read_bytes()
    order = decode_order(text)
    assert not order.drain and order.number > (world.resize.order_number or 0)
    assert world.events.count("before order") == 3


@pytest.mark.parametrize("shown", [True, False], ids=["in force", "an older one is shown"])
def test_numbers_of_orders_rise_though_the_clock_is_set_back(make_world: Make, shown: bool) -> None:
    """Protects from orders that a job does not obey, since it has read a newer one; also while a file system shows that
    one's predecessor."""
    world = make_world(drain_s=1000.0)
    world.begin()
    world.tick()
    path = world.job.directory / directory_name(world.job_id) / ORDERS
    if not shown:
        path.unlink()
    world.clock.now -= 7200.0
    world.tick()
    assert world.resize.state == State.ABANDONED, "a deadline that is far ahead is as good as past"
    assert decode_order(path.read_bytes()).number == (world.resize.order_number or 0) + 1


def test_a_clock_that_is_set_back_does_not_put_off_the_next_try(make_world: Make) -> None:
    """A job must not stay held for as long as the clock was ahead."""
    world = make_world()
    world.begin()
    refused: list[float] = []

    def set_back() -> None:
        if not refused:
            refused.append(world.clock.now)
            world.clock.now -= 7200.0
            raise Unreachable("before release")

    world.at("before release", set_back)
    world.until(State.RELEASING)
    for _ in range(30):
        world.tick()
    assert refused and world.job.held_by != "us"


def test_a_shape_that_slurm_never_starts_is_rolled_back_of_a_waiting_job_too(make_world: Make) -> None:
    """Slurm takes it, releases the job, and says BadConstraints once it looks at it."""
    world = make_world(running=False)
    world.slurm.cluster.set_begin(world.job_id, 1e12)
    world.slurm.cluster.forbid_shape(world.job_id, NEW)

    world.at("before release", lambda: world.slurm.cluster.set_begin(world.job_id, world.clock() + 2.0))
    assert world.change().state == State.ROLLED_BACK
    assert world.job.shape == OLD
    assert "waiting" in world.states and "holding_back" in world.states


def test_a_shape_that_slurm_has_not_looked_at_is_put_back_if_our_clock_is_ahead(make_world: Make) -> None:
    """By ours the job's start is over, and so is its wait; by Slurm's it has not begun, and nobody knows of the shape
    whether it ever starts there."""
    world = make_world(running=False)
    world.slurm.cluster.forbid_shape(world.job_id, NEW)
    world.slurm.cluster.set_begin(world.job_id, world.clock() + 500.0)
    world.machine.clock = lambda: world.clock() + 1000.0
    resize = world.change()
    assert (resize.state, world.job.shape, world.job.held_by) == (State.ROLLED_BACK, OLD, ""), world.states


def test_a_job_that_slurm_holds_between_a_look_and_the_old_shape_is_let_go(make_world: Make) -> None:
    """Its start is far, so nobody knows of the new shape: Slurm looks at it just before the old one is put back."""
    world = make_world(running=False)
    world.slurm.cluster.forbid_shape(world.job_id, NEW)
    world.slurm.cluster.set_begin(world.job_id, world.clock() + 500.0)
    world.begin()
    shapes = []

    def looks(number: int, event: str) -> None:
        shapes.extend([event] if event == "before reshape" else [])
        if len(shapes) == 2:
            world.slurm.cluster.set_begin(world.job_id, world.clock())
            world.pass_time(2.0)
            assert world.job.held_by == "slurm"

    world.interrupt = looks
    resize = world.finish()
    assert (resize.state, world.job.shape, world.job.held_by) == (State.ROLLED_BACK, OLD, ""), world.states
    assert len(shapes) >= 2


@pytest.mark.parametrize("seconds", [0.2, 60.0])
def test_a_job_that_slurm_holds_since_it_never_starts_is_let_go(make_world: Make, seconds: float) -> None:
    """Of a requeued job too, however soon Slurm looks at its new shape: nobody else would release it."""
    world = make_world()
    world.slurm.cluster.forbid_shape(world.job_id, NEW)
    world.begin()
    world.until(State.RELEASING, State.WAITING)
    for _ in range(30):
        world.tick(seconds)
    assert world.resize.state == State.ROLLED_BACK, world.states
    assert world.job.shape == OLD and world.job.held_by == ""


def test_a_requeued_job_settles_before_it_is_released(make_world: Make) -> None:
    """Protects the new run from what Slurm still sends to end the last one; a clock set back does not keep it held."""
    world = make_world(settings={"settle_s": 3.0})
    world.begin()
    while world.states[-1] != State.RELEASING:
        world.tick(0.5)
    arrived = world.clock()
    assert world.slurm.job(world.job_id).held
    while world.slurm.job(world.job_id).held:
        assert world.clock() < arrived + 4.0
        world.tick(0.5)
    assert world.clock() >= arrived + 3.0

    again = make_world(settings={"settle_s": 3.0})
    again.begin()
    while again.states[-1] != State.RELEASING:
        again.tick(0.5)
    again.clock.now -= 7200.0
    again.tick(0.5)
    assert not again.slurm.job(again.job_id).held


OTHER_SIZES = Spec(32, 512, 64, 1000, 10, limits=StrategyLimits("ring", (SizeLimits(OLD.gpus, OLD.gpus),)))


@pytest.mark.parametrize("state", [State.DRAINING, State.REQUEUING, State.RESHAPING])
@pytest.mark.parametrize("told", [(OTHER_SIZES, ""), (None, "spec.json: sizes: not a list")])
def test_a_strategy_that_changes_meanwhile_turns_a_running_job_back(
    make_world: Make, state: State, told: tuple[Spec | None, str]
) -> None:
    """A job that can no longer train at its new size trains on, or gets its old one back."""
    world = make_world()

    def change() -> None:
        world.told = told

    world.at(f"after journal {state.value}", change)
    world.begin()
    if state is State.DRAINING:
        world.told = told
    resize = world.finish()
    world.check()
    assert ("reshape", NEW) not in world.slurm.calls
    said = [str(step.detail) for step in world.store.resize_steps(resize.id)] + [str(resize.outcome)]
    wanted = f"ring runs on {OLD.gpus} GPU" if told[0] is not None else "its spec, which says"
    assert any(text.startswith(wanted) for text in said), said


@pytest.mark.parametrize("lasts_s", [5.0, 10_000.0], ids=["a moment", "for long"])
@pytest.mark.parametrize("state", THERE[:-1])
def test_a_job_whose_files_do_not_answer(make_world: Make, state: str, lasts_s: float) -> None:
    """Its resize goes on once they do, or is given up in time: the job is neither left held nor lost."""
    world = make_world(settings={"drain_timeout_s": 60.0})
    until = 0.0

    def run(function: Callable[..., Any], *arguments: object) -> Any:
        if world.clock() < until:
            raise NoAnswer("the file system /lustre has not answered since 12:00")
        return function(*arguments)

    def told(job: WholeJob) -> tuple[Spec | None, str]:
        return run(lambda: (None, ""))

    def drained(job: WholeJob, restart: int, order: int) -> float | None:
        return run(PlainReports(world.slurm).drained, job, restart, order)

    def fall_silent(number: int, event: str) -> None:
        nonlocal until
        if event == f"after journal {state}":
            until = until or world.clock() + lasts_s

    world.machine.read_spec = told
    world.machine.reports.drained = drained  # type: ignore[method-assign]
    world.interrupt = fall_silent
    world.begin()
    if state == "draining":
        until = world.clock() + lasts_s
    with run_by(run):
        while world.resize.ended is None:
            world.tick()
            assert world.clock() < 1_000_000 + 1000
    assert until > 1_000_000
    world.finish()
    if lasts_s > 100 and state == "requeuing":
        # Its batch cannot be put back: the next decision orders one.
        assert world.resize.state == State.ABANDONED and not world.job.requeues and not world.job.held_by
        return
    world.check()
    if lasts_s < 100 and state in ("draining", "requeuing", "waiting", "starting"):
        assert world.resize.state == State.DONE

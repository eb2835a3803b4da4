"""Each way that a change of blocks can go, on the simulated cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ones_db import MembershipRecord, ResizeRecord, Store, StoreError
from ones_db.shape import Shape
from ones_wrapper.protocol import Membership, encode_report
from slurm_ones.act import blocks
from slurm_ones.act.blocks import guests_among
from slurm_ones.act.holds import HeldTasks, StaleHolds
from slurm_ones.act.orders import OrderError
from slurm_ones.act.transitions import Stage, State
from slurm_ones.companion import Companion
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.rules.blocks import Moves, train_together
from slurm_ones.simulate.slurm.nodes import SlurmConf
from slurm_ones.slurm.client import NotResizable, Refused, SlurmError, Unreachable
from slurm_ones.slurm.model import JobState, Queue, SlurmJob, Task
from tests.act.block_world import CONF, BlockWorld
from tests.act.world import Crash

Make = Callable[..., BlockWorld]
ONE, TWO, FOUR = Shape(1, 1), Shape(1, 2), Shape(1, 4)
BACK = Stage(State.LEAVING, True)
THERE = ["preparing", "opening", "joining", "leaving", "done"]


@pytest.fixture
def make(empty: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(before: Mapping[int, Shape] | None = None, **how: Any) -> BlockWorld:
            return stack.enter_context(BlockWorld(empty, empty.parent, before, **how))

        yield made


def test_blocks_join_and_the_others_are_held_first(make: Make) -> None:
    """Never is the throttle lifted before all that wait are held, and the order comes before the release."""
    world = make()
    resize = world.change({1: TWO, 2: ONE})
    world.check()
    assert world.states == THERE
    calls = [event.split()[1] for event in world.events if event.startswith("before") and "journal" not in event]
    assert calls == ["hold_waiting", "throttle", "reshape", "order", "signal", "release", "release"]
    hot, app = world.training.hot, world.training.application
    assert hot is not None and resize.pause_s == pytest.approx(hot.grow_s(app)), "as long as its state takes"
    assert world.order.blocks == (0, 1, 2) and world.order.batch == 32
    assert world.training.gpus == 4


def test_blocks_leave_and_can_be_used_again(make: Make) -> None:
    world = make({1: TWO, 2: ONE})
    world.change({}, (1,))
    world.check()
    assert world.states == THERE
    assert world.tasks[1].held and world.tasks[1].pending
    world.change({1: FOUR})
    world.check()
    assert world.resize.state == State.DONE and world.training.gpus == 6


def test_a_job_outlives_its_first_block(make: Make) -> None:
    """Another one takes its place, and leads the next term."""
    world = make()
    world.change({1: FOUR}, (0,))
    world.check()
    assert world.states == THERE and world.training.members == (1,) and world.training.term == 1
    assert world.tasks[0].held


def test_a_shape_that_is_refused_costs_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No order was given for it."""

    def refuse(task: Task, shape: Shape, *, kind: str | None, queue: Queue) -> None:
        raise NotResizable(f"{task} does not take {shape}")

    world = make()
    monkeypatch.setattr(world.simulated.client, "reshape", refuse)
    resize = world.change({1: FOUR})
    world.check()
    assert world.states == ["preparing", "leaving_back", "rolled_back"] and resize.outcome.code == "shape_refused"
    assert "after order" not in world.events


def test_a_shape_at_which_slurm_never_starts_a_block(make: Make) -> None:
    """It took it, and says so once it has looked."""
    world = make()
    world.cluster.forbid_shape(world.job_id, FOUR)
    resize = world.change({1: FOUR})
    world.check()
    assert resize.state == State.ROLLED_BACK and resize.outcome.code == "never_starts"
    assert 1 in world.machine_held(), "Slurm held it, not its owner"


@pytest.mark.parametrize("state", [State.PREPARING, State.OPENING, State.JOINING])
def test_a_block_that_its_owner_moves_to_another_partition(make: Make, state: State | Stage) -> None:
    """Its shape was chosen for the partition that the others train in: it is not let go in another one."""
    world = make()
    world.drain_all()
    world.begin({1: TWO})
    if state is State.PREPARING:
        world.cluster.move(world.job_id, Queue("elsewhere"))

    world.at(f"after journal {state.value}", lambda: world.cluster.move(world.job_id, Queue("elsewhere")))
    resize = world.finish()
    if state is not State.PREPARING:  # when the throttle is still there
        world.check()
    assert resize.outcome.code == "blocks_differ" and dict(resize.outcome.arguments) == {"what": "partition"}
    assert ("before release" in world.events) == (state is State.JOINING)


def test_a_block_that_waits_too_long_is_taken_back(make: Make) -> None:
    """Somebody else took the GPUs: the order is called off, and the block is held again."""
    world = make()
    world.drain_all()
    resize = world.change({1: ONE})
    world.check()
    assert world.states == ["preparing", "opening", "joining", "leaving_back", "rolled_back"]
    assert resize.outcome.code == "queued_too_long" and world.order.blocks == (0,) and world.order.batch == 16


def test_a_block_that_waits_for_a_limit_is_taken_back_at_once(make: Make) -> None:
    """Nobody knows for how long it would wait."""
    world = make()
    world.cluster.conf = SlurmConf(account_gpus={"": 2})
    world.begin({1: FOUR})
    began = world.clock()
    resize = world.finish()
    world.check()
    assert resize.state == State.ROLLED_BACK and resize.outcome.code == "limit_reached"
    assert dict(resize.outcome.arguments) == {"cause": "AssocGrpGRES"}
    assert resize.ended is not None and resize.ended - began < world.settings.resize.blocks_wait_s / 2


@pytest.mark.parametrize("code", ["block_ended", "block_preempted"])
def test_a_block_that_ends_before_it_joined(make: Make, code: str) -> None:
    """That it is preempted is no failure of the job's, and it can be used again."""
    world = make()
    world.begin({1: ONE})
    world.until(State.JOINING)
    world.simulated.pass_time(3)
    if code == "block_ended":
        world.cluster.kill(Task(world.job_id, 1), 1)
    else:
        world.preempt(1)
    resize = world.finish()
    world.check()
    assert (resize.state, resize.outcome.code) == (State.ROLLED_BACK, code)
    if code == "block_preempted":
        assert 1 in world.machine_held() and not world.store.histories([world.job_id])[world.job_id].failures


@pytest.mark.parametrize("state", [State.PREPARING, State.OPENING, State.JOINING, State.LEAVING, BACK])
def test_a_job_that_is_cancelled(make: Make, state: State | Stage) -> None:
    """By its owner, in every state: obeyed at once, and nothing is left behind."""
    world = make({1: ONE})
    _reach(world, state)
    world.cluster.cancel(world.job_id)
    for _ in range(60):
        world.tick()
    world.tidy()
    assert world.resize.ended is not None
    assert not any(job.pending or job.running for job in world.tasks.values())


@pytest.mark.parametrize("state", [State.PREPARING, State.OPENING, State.JOINING, BACK])
@pytest.mark.parametrize("how", ["comment", "no blocks", "stop file"])
def test_a_job_that_opts_out(make: Make, state: State | Stage, how: str) -> None:
    """It stays as it was, and what was begun is taken back."""
    world = make({1: ONE})
    _reach(world, state)
    if how == "comment":
        world.cluster.set_comment(world.job_id, "ones: gpus=1-16 resize=off array=blocks")
    elif how == "no blocks":
        world.cluster.set_comment(world.job_id, "ones: gpus=1-16")
    else:
        world.stop_file.touch()
    world.finish()
    assert world.resize.state == State.ROLLED_BACK
    assert state is BACK or world.resize.outcome.code == "switched_off"
    assert {*world.training.members} == {0, 1}


def test_a_block_that_its_owner_holds_stays_held(make: Make) -> None:
    """Released once, and never against their will; nor is it used again."""
    world = make()
    world.drain_all()
    world.begin({1: ONE})
    world.until(State.JOINING)
    world.cluster.hold(Task(world.job_id, 1))
    resize = world.finish()
    world.check()
    assert resize.outcome.code == "block_held" and world.tasks[1].held
    assert 1 not in world.machine_held() and 2 in world.machine_held()


def test_a_block_that_its_owner_holds_before_we_do(make: Make) -> None:
    """After it was chosen, and before it was looked at again."""
    world = make()
    world.begin({1: ONE})
    world.machine.new.add(world.resize.id)
    world.cluster.hold(Task(world.job_id, 1))
    resize = world.finish()
    assert resize.outcome.code == "block_held" and "before release" not in world.events
    world.change({2: ONE})
    for task in (0, 2):
        world.cluster.cancel(Task(world.job_id, task))
    world.simulated.pass_time(60)
    world.tidy()
    assert world.tasks[1].held, "its owner keeps it, and the job did not say that it is over"


@pytest.mark.parametrize("task", [0, 1, 3])
def test_a_task_that_its_owner_holds_before_the_waiting_job_is_reshaped(make: Make, task: int) -> None:
    """To hold and release the whole array, as was decided, would lift the owner's hold."""
    world = make(waits=True)
    world.begin_waiting(TWO)
    world.cluster.hold(Task(world.job_id, task))
    resize = world.finish()
    assert (resize.state, resize.outcome.code) == (State.ABANDONED, "held_by_owner")
    assert {number for number, job in world.tasks.items() if job.held} == {task}


@pytest.mark.parametrize("state", [State.HOLDING, State.RESHAPING, State.RELEASING])
def test_a_task_that_its_owner_lets_go_leaves_none_held(make: Make, state: State) -> None:
    """The job starts by it while the whole array stands in our hold: the others do not stay there."""
    world = make(waits=True)
    world.begin_waiting(TWO)

    def let_go() -> None:
        world.cluster.release(Task(world.job_id, 0))
        world.resume_all()
        world.simulated.pass_time(5)

    world.at("after hold" if state is State.HOLDING else f"after journal {state.value}", let_go)
    world.finish()
    assert world.tasks[0].running and not any(job.held for job in world.tasks.values()), world.states


def test_a_waiting_job_of_blocks_is_reshaped_as_a_whole(make: Make) -> None:
    world = make(waits=True)
    world.begin_waiting(TWO)
    assert world.finish().state == State.DONE
    assert not any(job.held for job in world.tasks.values())
    assert {job.gpus_per_node for job in world.tasks.values()} == {2}


@pytest.mark.parametrize("down_s", [5, 600])
def test_a_block_whose_release_slurm_forgets_before_it_joined(
    make: Make, monkeypatch: pytest.MonkeyPatch, down_s: int
) -> None:
    """slurmctld died: the block stands in our hold again, and stays ours."""
    world = make()
    world.drain_all()
    world.begin({1: ONE})
    world.until(State.JOINING)
    world.machine.seen = world.simulated.client.snapshot()
    world.simulated.pass_time(down_s)
    _forget_release(world, monkeypatch)
    resize = world.finish()
    world.check()
    assert (resize.state, resize.outcome.code) == (State.ROLLED_BACK, "block_release_forgotten")
    assert 1 in world.machine_held()


@pytest.mark.parametrize("began", ["after", "before"])
def test_a_block_whose_release_slurm_forgets_after_it_joined(
    make: Make, monkeypatch: pytest.MonkeyPatch, began: str
) -> None:
    """It is let go again if slurmctld started since, and those that are held for later are not."""
    world = make()
    world.begin({1: ONE})
    world.until(State.DONE)
    client = world.simulated.client
    stale = StaleHolds(client, world.store, world.clock)
    ours = {Task(world.job_id, task) for task in world.machine_held()}

    def tick() -> None:
        world.simulated.pass_time(2)
        stale.release([(world.job_id, job) for job in client.tasks(world.job_id)], ours)

    tick()
    world.simulated.pass_time(2)
    if began == "after":
        _forget_release(world, monkeypatch)
    world.cluster.kill(Task(world.job_id, 1), 1)
    world.simulated.pass_time(30)
    world.cluster.reuse(Task(world.job_id, 1))
    tick()
    assert world.tasks[1].held == (began == "before") and world.tasks[2].held


@pytest.mark.parametrize("requeued", [True, False])
def test_a_companion_that_starts_later_lets_go_a_block_whose_start_slurm_forgot(make: Make, requeued: bool) -> None:
    """Once: a hold that comes after that is the owner's, to the next companion too."""
    world = make()
    world.begin({1: ONE})
    world.until(State.DONE)
    world.drain_all()
    _forget_start(world, 1, requeued=requeued)
    _next_companion(world)
    assert not world.tasks[1].held and world.tasks[2].held and 1 not in world.machine_held()
    world.cluster.hold(Task(world.job_id, 1))
    _next_companion(world)
    assert world.tasks[1].held


@pytest.mark.parametrize("how", ["seen to wait", "seen before another change", "never ours"])
def test_an_owners_hold_stands_after_slurm_forgot_that_the_block_started(make: Make, how: str) -> None:
    """Slurm's older state has the block waiting and released already."""
    world = make()
    world.begin({1: ONE})
    world.until(State.DONE)
    task = 0 if how == "never ours" else 1
    world.drain_all()
    _forget_start(world, task, requeued=False)
    world.cluster.release(Task(world.job_id, task))
    if how != "never ours":
        world.tidy()
    world.cluster.hold(Task(world.job_id, task))
    if how == "seen before another change":
        world.change({2: ONE})
    _next_companion(world)
    assert world.tasks[task].held and task not in world.machine_held()


def _next_companion(world: BlockWorld) -> None:
    """Two ticks of a companion that starts now."""
    stale = StaleHolds(world.simulated.client, world.store, world.clock)
    for _ in range(2):
        world.tidy()
        ours = {Task(world.job_id, task) for task in world.machine_held()}
        stale.release([(world.job_id, job) for job in world.simulated.client.tasks(world.job_id)], ours)
        world.simulated.pass_time(2)


@pytest.mark.parametrize("joined", [False, True])
def test_an_owners_hold_stands_after_slurm_forgot_the_block_in_a_resize(
    make: Make, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """slurmctld died: the block waits again, and is seen to, before its owner holds it. It may have been the only
    one."""
    world = make()
    world.machine.settings = world.machine.settings.model_copy(update={"blocks_wait_s": 200.0})
    world.drain_all()
    world.begin({1: ONE}, (0,))
    world.until(State.JOINING)
    world.simulated.pass_time(2)
    if joined:
        world.resume_all()
        while {*world.training.members} != {1} or world.tasks[0].running:
            world.simulated.pass_time(1)
        world.drain_all()
        _forget_start(world, 1, requeued=False)
        world.cluster.release(Task(world.job_id, 1))
    _restart(world, monkeypatch)
    world.simulated.pass_time(2)
    world.tick()
    world.tidy()
    world.machine.seen = world.simulated.client.snapshot()
    world.cluster.hold(Task(world.job_id, 1))
    resize = world.finish()
    for _ in range(3):
        world.simulated.pass_time(60)
        world.tidy()
    assert (resize.state, resize.outcome.code) == (("ended", "job_ended") if joined else ("rolled_back", "block_held"))
    assert world.tasks[1].pending and world.tasks[1].held and 1 not in world.machine_held()


@pytest.mark.parametrize("state", [State.JOINING, State.LEAVING])
def test_a_job_goes_on_if_slurm_forgets_the_start_of_its_only_block(make: Make, state: State) -> None:
    """It took the other's place, which has left: the hold in which it stands again is ours."""
    world = make()
    world.begin({1: ONE}, (0,))
    world.until(State.JOINING)
    while 1 not in world.training.members or world.tasks[0].running:
        world.tick() if world.resize.state != state else world.simulated.pass_time(1)
    _forget_start(world, 1, requeued=False)
    assert world.finish().state == State.ENDED
    for _ in range(3):
        world.simulated.pass_time(60)
        world.tidy()
    assert world.tasks[1].running and {*world.training.members} == {1} and 1 not in world.machine_held()


@pytest.mark.parametrize("trains", [True, False], ids=["the other trains", "its start is forgotten too"])
@pytest.mark.parametrize("restarted", [True, False])
def test_a_block_whose_end_slurm_forgets_is_put_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, trains: bool, restarted: bool
) -> None:
    """It has no process that an order could end. If Slurm forgot the other's start too, that one starts again."""
    world = make({1: ONE, 2: ONE})
    world.change({}, (1,))
    world.begin({1: ONE}, (0, 2))
    world.until(State.DONE)
    client, began, number = world.simulated.client, str(round(world.clock()) + 2), world.order.number
    if restarted:
        monkeypatch.setattr(client, "config", lambda: {"BOOT_TIME": began})
    _forget_end(world, 0)
    if not trains:
        world.cluster.kill(Task(world.job_id, 1), 1)
        record = world.cluster.records.get(Task(world.job_id, 1))
        record.state, record.restart = JobState.COMPLETED, record.restart - 1
    stale = StaleHolds(client, world.store, world.clock)

    def tick(after_s: float) -> None:
        world.simulated.pass_time(after_s)
        world.tidy()
        ours = {Task(world.job_id, task) for task in world.machine_held()}
        stale.release([(world.job_id, job) for job in client.tasks(world.job_id)], ours)

    for after_s in (0, 30, 60, 60):
        tick(after_s)
    assert {*world.training.members} == {1} and world.tasks[0].running and world.order.number == number
    for _ in range(4):
        tick(120)
    assert {*world.training.members} == {1} and 2 in world.machine_held()
    if restarted:
        assert world.tasks[0].pending and world.tasks[0].held and 0 in world.machine_held()
    assert (world.order.number > number) != restarted


def _forget_end(world: BlockWorld, task: int) -> None:
    """slurmctld begins again from a state in which the task ran. It has no process."""
    record = world.cluster.records.get(Task(world.job_id, task))
    assert record.pending and record.held_by
    record.state, record.restart, record.held_by, record.requeue_held = JobState.RUNNING, record.restart - 1, "", False
    record.start_time, record.node_list = world.clock() - 60, world.tasks[1].node_list
    record.gpus = dict.fromkeys(record.node_list, 1)
    record.cancel_events()


def _forget_release(world: BlockWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmctld begins again from a state in which task 1 stood in our hold."""
    _restart(world, monkeypatch)
    world.cluster.hold(Task(world.job_id, 1))


def _restart(world: BlockWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    began = str(round(world.clock()))
    monkeypatch.setattr(world.simulated.client, "config", lambda: {"BOOT_TIME": began})


def _forget_start(world: BlockWorld, task: int, *, requeued: bool) -> None:
    """slurmctld begins again from a state in which the task stood in our hold, that of a requeue or another. Its
    processes are ended."""
    key, restart = Task(world.job_id, task), world.tasks[task].restart
    world.cluster.kill(key, 1)
    world.simulated.pass_time(30)
    world.cluster.reuse(key)
    record = world.cluster.records.get(key)
    record.restart, record.requeue_held = restart, requeued


@pytest.mark.parametrize("how", ["goes on", "stop file", "the job ends"])
def test_a_task_that_its_owner_holds_before_we_do_is_never_ours(make: Make, how: str) -> None:
    """It is one of those that were to be held alone, and not to join: what we remember says so, and what is stored."""
    world = make()
    held = HeldTasks(world.store)
    world.begin({1: ONE})
    assert 2 in held.of(world.job_id)
    world.machine.new.add(world.resize.id)
    world.cluster.hold(Task(world.job_id, 2))
    if how == "stop file":
        world.stop_file.touch()
    elif how == "the job ends":
        world.cluster.hold(Task(world.job_id, 1))
        world.cluster.hold(Task(world.job_id, 3))
        for task in world.tasks.keys() - {1, 2, 3}:
            world.cluster.cancel(Task(world.job_id, task))
        world.simulated.pass_time(5)
    world.finish()
    assert world.resize.state == {"goes on": "done", "stop file": "rolled_back", "the job ends": "ended"}[how]
    assert world.tasks[2].held and not {2} & (held.of(world.job_id) | held.ever(world.job_id) | world.machine_held())
    if how == "goes on":
        assert 3 in held.of(world.job_id) == world.machine_held()
    elif how == "the job ends":
        assert not {1, 3} & world.machine_held()


@pytest.mark.parametrize("state", [State.PREPARING, State.JOINING])
def test_blocks_that_their_owner_holds_at_once(make: Make, state: State | Stage) -> None:
    """As by the job's number: none of them is ours from then on."""
    world = make()
    world.drain_all()
    world.begin({1: ONE, 2: ONE})
    world.machine.new.add(world.resize.id)
    if state is State.JOINING:
        world.until(state)
    for task in (1, 2):
        world.cluster.hold(Task(world.job_id, task))
    resize = world.finish()
    assert str(resize.outcome) == "blocks 1, 2 were held by others" and resize.state == State.ROLLED_BACK
    assert not {1, 2} & world.machine_held()


@pytest.mark.parametrize("restarted", [False, True], ids=["remembered", "stored"])
def test_a_block_that_its_owner_lets_go_and_holds_again_is_not_ours(make: Make, restarted: bool) -> None:
    """Between two changes: once it was seen out of our hold a later one is not ours, by what is stored too."""
    world = make()
    world.change({1: ONE})
    assert 2 in world.machine_held() and 1 not in world.machine_held(), "a block that trains is in nobody's hold"
    world.drain_all()  # what is let go waits
    world.cluster.release(Task(world.job_id, 2))
    world.tidy()
    if restarted:
        world.machine = world.companion()
    world.cluster.hold(Task(world.job_id, 2))
    world.tidy()
    assert not {2} & (world.held.of(world.job_id) | world.machine_held()) and 3 in world.machine_held()
    assert 2 in world.held.ever(world.job_id), "what the job leaves behind when it says that it is over"


def test_a_second_record_of_a_task_lets_nothing_go(make: Make) -> None:
    """Slurm may show one of an earlier end beside the one that waits in our hold, where nobody opts in any more."""
    world = make()
    world.change({1: ONE})
    tasks = world.simulated.client.tasks(world.job_id)
    waits = next(job for job in tasks if 2 in job.array_tasks)
    ended = replace(waits, job_id=waits.job_id + 100, array_tasks=(2,), state=JobState.CANCELLED, held=False)
    world.held.look(world.job_id, [ended, *tasks])
    assert 2 in world.held.of(world.job_id)
    world.held.look(world.job_id, [ended])
    assert 2 not in world.held.of(world.job_id)


def test_what_was_let_go_stays_so_where_a_write_was_only_said_to_have_failed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later note does not take the first one back, whatever the owner holds again meanwhile."""
    world = make()
    world.change({1: ONE})
    world.drain_all()  # what is let go waits
    world.cluster.release(Task(world.job_id, 2))
    write = world.store.note_let_go

    def lost_answer(resize_id: int, tasks: Sequence[int]) -> ResizeRecord:
        write(resize_id, tasks)
        raise StoreError("gone")

    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(world.store, "note_let_go", lost_answer)
        world.tidy()
    world.cluster.hold(Task(world.job_id, 2))
    world.cluster.release(Task(world.job_id, 3))
    world.tidy()
    assert world.held.of(world.job_id).isdisjoint({2, 3}) and HeldTasks(world.store).of(world.job_id).isdisjoint({2, 3})


def test_a_block_gives_up_the_type_of_gpu_that_it_had_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that asks for no type has its blocks ask for none, whatever they joined with at an earlier change."""
    world = make()
    client, asked = world.simulated.client, list[str | None]()
    tasks = client.tasks

    def typed(array_id: int) -> tuple[SlurmJob, ...]:
        return tuple(replace(job, kind="slow") if job.pending and not asked else job for job in tasks(array_id))

    def reshape(task: Task, shape: Shape, *, kind: str | None, queue: Queue) -> None:
        asked.append(kind)

    monkeypatch.setattr(client, "tasks", typed)
    monkeypatch.setattr(client, "reshape", reshape)
    world.change({1: ONE})
    assert asked == [""] and world.resize.state == State.DONE


def test_a_block_that_slurm_requeues_while_the_others_are_held_starts_again(make: Make) -> None:
    """It waits as they do at that moment, and nobody would ever let it go: it was never ours to hold."""
    world = make()

    world.at("before hold_waiting", lambda: world.cluster.preempt(Task(world.job_id, 0)))
    world.change({1: TWO})
    assert "after hold_waiting" in world.events
    assert not world.tasks[0].held and world.tasks[2].held
    world.simulated.pass_time(300)
    assert world.tasks[0].running and 0 in world.training.members


def test_an_owner_who_opts_out_between_two_blocks(make: Make) -> None:
    """Each block gets its shape after a look of its own: what the owner said meanwhile counts."""
    world = make()

    world.at("after reshape", world.stop_file.touch)
    world.change({1: TWO, 2: TWO})
    assert world.states == ["preparing", "leaving_back", "rolled_back"]
    assert world.events.count("before reshape") == 1


def test_a_clock_behind_slurms_does_not_make_a_change_last(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that started in the future, by this host's clock, is waited for no longer than one that waits."""
    world = make()
    slurms = world.clock
    world.clock = lambda: slurms() - 7200.0  # type: ignore[method-assign]
    world.machine = world.companion()
    monkeypatch.setattr(blocks, "_joined", lambda *_: False)
    world.change({1: ONE})
    assert world.resize.state == State.ROLLED_BACK and "did not train together" in str(world.resize.outcome)


def test_a_block_that_its_owner_cancels(make: Make) -> None:
    """While it joins: the job trains on. One that trained: the job trains on without it."""
    world = make({1: ONE})
    world.begin({2: ONE})
    world.until(State.JOINING)
    world.cluster.cancel(Task(world.job_id, 2))
    world.finish()
    world.check()
    assert world.resize.state == State.ROLLED_BACK
    world.begin({3: ONE})
    world.until(State.JOINING)
    world.cluster.cancel(Task(world.job_id, 1))
    world.finish()
    assert {*world.training.members} == {0, 3} and world.resize.state == State.DONE


def test_a_claim_of_a_block_that_slurm_has_not_started_is_not_believed(make: Make) -> None:
    """Hostile reports: the change goes on by what Slurm knows."""
    world = make()
    world.drain_all()
    world.begin({1: ONE})
    world.until(State.JOINING)
    lie = Membership(9, (0, 1), (0, 0), 1, 2, 2, 5, 32, 0.1, order=world.resize.order_number)
    with (world.training.files.directory / "reports-0.jsonl").open("ab") as file:
        file.write(encode_report(50, world.clock(), lie))
    world.tick()
    assert world.resize.state == State.JOINING
    world.finish()
    assert world.resize.state == State.ROLLED_BACK


@pytest.mark.parametrize("comment", ["", "nothing for a companion"], ids=["", "opted out"])
def test_a_job_that_ended_leaves_no_held_tasks(make: Make, comment: str) -> None:
    """Also where nobody in the job could cancel them, and the companion was started later; what we held once is not
    forgotten with the opt-in."""
    world = make()
    world.change({1: ONE})
    if comment:
        world.cluster.set_comment(world.job_id, comment)
    for task in (0, 1):
        world.cluster.cancel(Task(world.job_id, task))
    world.simulated.pass_time(60)
    assert any(job.pending and job.held for job in world.tasks.values())
    world.machine = world.companion()
    world.tidy()
    assert not any(job.pending for job in world.tasks.values())


def all_leave(world: BlockWorld, *blocks: int) -> None:
    """As at their time limits: they complete, and nobody says that the job is over."""
    for task in blocks:
        world.cluster.kill(Task(world.job_id, task), 0)
    world.simulated.pass_time(20)
    for task in blocks:
        world.cluster.records.get(Task(world.job_id, task)).state = JobState.COMPLETED
    assert not any(job.running for job in world.tasks.values())


def test_a_job_whose_blocks_all_left_without_a_word_goes_on(make: Make) -> None:
    """Nobody's job is lost: one of the tasks that wait takes it up, each time that it got further."""
    world = make()
    world.change({1: ONE})
    for left, member in (((0, 1), 2), ((2,), 3)):
        all_leave(world, *left)
        world.tidy()
        world.simulated.pass_time(60)
        assert world.training.members == (member,) and world.training.term > 0


@pytest.mark.parametrize("error", [Unreachable("no answer"), Refused("try again")])
def test_a_job_whose_blocks_all_left_goes_on_at_the_next_try(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: SlurmError
) -> None:
    """A controller that is away for a moment must not cost it all that it has trained."""
    world = make()
    world.change({1: ONE})
    all_leave(world, 0, 1)
    with monkeypatch.context() as patch, suppress(Unreachable):
        patch.setattr(world.leftovers, "client", Mock(wraps=world.client, release=Mock(side_effect=error)))
        world.tidy()
    world.tidy()
    world.simulated.pass_time(60)
    assert world.training.members == (2,)


def test_an_operators_hold_stays_when_a_job_goes_on(make: Make) -> None:
    """Another task takes it up; while an operator holds all that wait, none is released or cancelled."""
    world = make()
    world.change({1: ONE})
    all_leave(world, 0, 1)
    waiting = [task for task, job in world.tasks.items() if job.pending]
    for task in waiting:
        world.cluster.release(Task(world.job_id, task))
        world.cluster.hold(Task(world.job_id, task), "admin")
    for tasks in ([], [3]):
        for task in tasks:
            world.cluster.release(Task(world.job_id, task))
            world.cluster.hold(Task(world.job_id, task))
        world.tidy()
        world.simulated.pass_time(60)
        assert world.training.members == tuple(tasks)
        assert all(world.tasks[task].admin_held for task in {*waiting} - {*tasks})


@pytest.mark.parametrize("mode", ["act", "advise"])
def test_a_job_whose_blocks_all_left_goes_on_next_to_a_stop_file(make: Make, mode: str) -> None:
    """To stop resizes, or to act no longer, must not cost a job all that it has trained."""
    world = make()
    world.change({1: ONE})
    all_leave(world, 0, 1)
    world.stop_file.touch()
    settings = world.settings.model_copy(update={"mode": mode})
    Companion(settings, world.client, world.store, clock=world.clock, say=lambda line: None).tick()
    world.simulated.pass_time(60)
    assert world.training.members == (2,)


QUEUES = [Queue(qos="guest"), Queue("scavenge", account="guests"), Queue("scavenge", "guest", "guests")]


@pytest.mark.parametrize("queue", QUEUES, ids=str)
def test_blocks_join_as_guests_and_are_base_again(make: Make, queue: Queue) -> None:
    """In the queue of guests from before their release, and in that of their job before they are released as base; all
    the while it is one job, in its own partition."""
    world = make(guests=queue, conf=replace(CONF, licenses={"matlab": 9}))
    for job in world.cluster.records.named(world.job_id):
        job.account, job.licenses = "mine", (("matlab", 1),)
    own = Queue.of(world.tasks[0])
    world.change({1: TWO, 2: ONE}, guests=(1,))
    world.check()
    assert world.resize.state == State.DONE
    assert not any(queue.other_than(world.tasks[1])) and any(queue.other_than(world.tasks[2]))
    assert world.tasks[1].licenses == ()
    assert Queue.of(world.tasks[2]) == own
    seen = world.observer.observe().elastic[world.job_id]
    assert seen.refusal is None and seen.partition == own.partition and len(seen.job.running_blocks) == 3
    world.preempt(1)
    world.tidy()
    world.change({1: TWO})
    world.check()
    assert world.resize.state == State.DONE and Queue.of(world.tasks[1]) == own


@pytest.mark.parametrize(
    ("asked", "dropped", "guests"),
    [(1, (), (3, 4)), (2, (), (3, 4)), (3, (), (3,)), (4, (), (4,)), (5, (), ()), (1, (0, 2), (3,)), (2, (0, 2), (4,))],
)
def test_which_blocks_join_as_guests(make: Make, asked: int, dropped: tuple[int, ...], guests: tuple[int, ...]) -> None:
    """Those beyond the GPUs that the user asked for, of which blocks 0 and 2 have one each and guests count for none; a
    job has a base block whatever leaves."""
    world = make(guests=QUEUES[0])
    world.change({1: TWO, 2: ONE}, guests=(1,))
    seen = world.observer.observe().elastic[world.job_id]
    moves = Moves(((3, TWO), (4, ONE)), dropped)
    assert guests_among(seen, moves, asked) == guests
    assert seen.optin is not None
    kept_out = replace(seen, optin=replace(seen.optin, guests=False))
    assert guests_among(kept_out, moves, asked) == ()


def test_a_membership_whose_members_slurm_restarted_leaves_nobody_out(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one member runs again, next to a block that trains and has not reported yet."""
    world = make({1: ONE})
    read = world.machine.reports.membership

    def stale(job: WholeJob, order: int | None = None) -> MembershipRecord | None:
        found = read(job, order)
        restarts = (world.tasks[1].restart + 1,)
        return found and replace(found, report=replace(found.report, blocks=(1,), restarts=restarts))

    monkeypatch.setattr(world.machine.reports, "membership", stale)
    world.drain_all()
    assert world.change({2: ONE}).outcome.code == "queued_too_long"
    assert world.order.blocks == (0, 1)


def test_a_block_that_trained_before_and_joins_again_is_taken_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from a released block that nobody counts: the newest report still names its earlier start."""
    world = make({1: ONE})
    read = world.machine.reports.membership

    def stale(job: WholeJob, order: int | None = None) -> MembershipRecord | None:
        found = read(job, order)
        return found and replace(found, report=replace(found.report, blocks=(0, 1), restarts=(0, 0)))

    world.preempt(1)
    world.tidy()
    monkeypatch.setattr(world.machine.reports, "membership", stale)
    world.drain_all()
    assert world.change({1: ONE}).outcome.code == "queued_too_long"
    assert world.order.blocks == (0,) and world.tasks[1].held


@pytest.mark.parametrize(("other", "code"), [({}, "base_ended"), ({3: ONE}, "blocks_train")], ids=["none", "another"])
def test_a_guest_does_not_take_the_place_of_a_base_block_that_ends(
    make: Make, other: dict[int, Shape], code: str
) -> None:
    """Between the plan and the release the only base block fails: the guest is not released, unless a base block joins
    with it."""
    world = make(guests=QUEUES[0])
    world.change({1: TWO}, guests=(1,))
    world.begin({2: ONE} | other, guests=(2,))
    seen = len(world.events)

    def fail() -> None:
        if world.tasks[0].running:
            world.cluster.kill(Task(world.job_id, 0), 9)

    world.at("after journal opening", fail)
    resize = world.finish()
    assert resize.outcome.code == code
    assert ("before release" in world.events[seen:]) == bool(other)
    assert world.tasks[2].held != bool(other) and world.tasks[1].running


def test_a_base_block_leads_rather_than_a_guest(make: Make) -> None:
    """The order names it first, whatever its number is, also one of a batch; so it leads when the leader leaves."""
    world = make(guests=QUEUES[0])
    world.change({1: ONE, 2: TWO}, guests=(1,))
    assert world.order.blocks == (0, 2, 1) and world.training.members[0] == 0
    seen = world.observer.observe().elastic[world.job_id]
    assert seen.job.base_first((0, 1, 2)) == (0, 2, 1)
    world.preempt(0)
    assert world.training.members == (2, 1)


@pytest.mark.parametrize(
    ("own_s", "has_s", "most_s", "limit_s"),
    [
        (3600, 3600, math.inf, 3600),
        (3600, 3600, 3600, 3600),
        (3600, 3600, 3000, 2960),
        (3600, 2940, 2950, 2940),
        (3600, 2940, 2930, 2890),
        (3600, 600, 2950, 2910),
        (3600, 600, math.inf, 3600),
        (0, 0, 3000, 2960),
        (0, 0, math.inf, 0),
        (3600, 3600, 30, 60),
    ],
)
def test_the_time_limit_of_a_guest(make: Make, own_s: float, has_s: float, most_s: float, limit_s: float) -> None:
    """That of the base, or if that reaches into a reservation as long as there is once it has waited 40 s; one that is
    right already stays, however often it is asked."""
    world = make(guests=QUEUES[0])
    own, job = Queue("gpu", "normal", "", own_s), replace(world.tasks[1], time_limit_s=has_s)
    found = blocks._limit_s(job, own, most_s, 40.0)
    assert found == limit_s
    if found == most_s - 40.0:
        assert blocks._limit_s(replace(job, time_limit_s=found), own, most_s - 35.0, 40.0) == found


def test_a_guest_ends_before_the_next_reservation(make: Make) -> None:
    """In the update that moves it; base again it has the limit of its job."""
    world = make(guests=QUEUES[0])
    for job in world.cluster.records.named(world.job_id):
        job.limit_s = 7200.0
    world.machine.longest_s = lambda partition, shape, reservation: {"gpu": 1000.0}[partition]
    world.change({1: TWO, 2: ONE}, guests=(1,))
    limits = {task: world.tasks[task].time_limit_s for task in (0, 1, 2)}
    assert world.resize.state == State.DONE and limits == {0: 7200.0, 1: 960.0, 2: 7200.0}
    assert sum(event == "before reshape" for event in world.events) == 1
    world.preempt(1)
    world.tidy()
    world.change({1: TWO})
    assert world.resize.state == State.DONE and world.tasks[1].time_limit_s == 7200.0


@pytest.mark.parametrize("again", [False, True], ids=["known", "after a restart"])
def test_a_job_all_of_whose_tasks_have_been_guests_gets_its_own_queue_back(make: Make, again: bool) -> None:
    """Slurm does not know any more where it was submitted; the database does."""
    world = make(guests=QUEUES[1], conf=replace(CONF, licenses={"matlab": 9}))
    for record in world.cluster.records.known_of(world.job_id):
        record.account, record.licenses = "mine", (("matlab", 1),)
    own = Queue.of(world.tasks[0])
    known = world.store.jobs([world.job_id])[world.job_id]
    known = replace(known, partition=own.partition, qos=own.qos, account="mine", licenses=own.licenses)
    world.store.record_jobs([known])
    for record in world.cluster.records.known_of(world.job_id):
        record.partitions, record.account, record.licenses = ("scavenge",), "guests", ()
    if again:
        world.machine = world.companion()
    for _ in range(2):
        seen = world.observer.observe().elastic[world.job_id]
        assert (seen.partition, seen.job.home.account, seen.refusal) == (own.partition, "mine", None)
        assert seen.job.home.licenses == (("matlab", 1),)
    world.change({1: ONE})
    assert world.resize.state == State.DONE and Queue.of(world.tasks[1]) == own


def test_a_block_that_is_preempted_while_others_join_is_put_back_at_once(make: Make) -> None:
    """It has no part in the change, which goes on."""
    world = make({1: ONE, 2: ONE})
    world.begin({3: ONE})
    world.until(State.JOINING)
    world.cluster.preempt(Task(world.job_id, 1), "cancel", grace_s=5)
    world.simulated.pass_time(6)
    world.tidy()
    assert world.store.open_resizes() and world.tasks[1].pending and world.tasks[1].held
    assert 1 in world.machine_held()
    world.wanted -= {1}
    world.finish()
    world.tidy()
    assert world.resize.state == State.DONE and {*world.training.members} == {0, 2, 3}
    assert 1 in world.machine_held()


@pytest.mark.parametrize("taken", [(1,), (1, 2), (0,)], ids=str)
@pytest.mark.parametrize("interrupted", [False, True])
def test_blocks_that_slurm_preempts_are_put_back(make: Make, taken: tuple[int, ...], interrupted: bool) -> None:
    """At the next tick, outside of a change too; a companion that dies before leaves none that is nobody's."""
    world = make({1: ONE, 2: ONE})
    world.change({3: ONE})
    world.preempt(*taken)
    if interrupted:
        world.at("before reuse", Mock(side_effect=Crash))
        with pytest.raises(Crash):
            world.tidy()
        world.interrupt = lambda number, event: None
        world.machine = world.companion()
    world.tidy()
    assert all(world.tasks[task].pending and world.tasks[task].held for task in taken)
    world.tidy()
    assert {*taken} <= world.machine_held() == world.held.of(world.job_id)
    assert len(world.store.histories([world.job_id])[world.job_id].preempted) == len(taken)
    world.change(dict.fromkeys(taken, TWO))
    world.check()
    assert world.resize.state == State.DONE and not {*taken} & world.machine_held()


def test_a_preempted_block_of_a_job_that_is_left_alone_stays_so(make: Make) -> None:
    """Its owner opted out, or nothing was ever changed by us: there is no record of whose hold it would be."""
    world = make({1: ONE})
    world.preempt(1)
    world.tidy()
    assert world.tasks[1].state is JobState.PREEMPTED
    world.change({2: ONE})
    world.cluster.set_comment(world.job_id, "ones: gpus=1-16 resize=off array=blocks")
    world.tidy()
    assert world.tasks[1].state is JobState.PREEMPTED


@pytest.mark.parametrize(
    ("first", "guests"), [((), ()), ((1,), ()), ((0,), (1,))], ids=["at once", "one after the other", "a guest last"]
)
def test_a_job_all_of_whose_blocks_are_preempted_goes_on(
    make: Make, first: tuple[int, ...], guests: tuple[int, ...]
) -> None:
    """Nobody's job is lost: of the tasks that wait in our hold one takes it up."""
    world = make(guests=Queue("scavenge"))
    world.change({1: ONE}, guests=guests)
    for taken in (first, tuple({0, 1} - {*first})):
        world.preempt(*taken)
        world.tidy()
    world.simulated.pass_time(60)
    world.tidy()
    world.simulated.pass_time(60)
    assert len(world.training.members) == 1 and world.training.term > 0


@pytest.mark.parametrize(
    ("restart", "ahead_s"), [(0, 0.0), (0, 3600.0), (1, 0.0)], ids=["", "clock ahead", "restarted"]
)
def test_a_block_that_runs_apart_is_ordered_to_end(
    make: Make, monkeypatch: pytest.MonkeyPatch, restart: int, ahead_s: float
) -> None:
    """One that hangs would keep its GPUs for ever. Nothing is known of blocks that started since they reported who
    trains."""
    world = make({1: ONE})
    world.change({2: ONE})
    clock, number = world.leftovers.clock, world.order.number
    world.leftovers.clock = lambda: clock() + ahead_s
    report_lost(world, (0, 1), (restart, restart))
    world.tidy()
    assert world.order.number == number, "not at once: it may be about to join again"
    elastic, history = world.observer.observe().elastic[world.job_id], world.store.histories([world.job_id])
    assert train_together(elastic, history[world.job_id]) == ([] if restart else [0, 1])
    world.simulated.pass_time(310)
    with monkeypatch.context() as patch:
        patch.setattr(world.leftovers.orders, "write", Mock(side_effect=OrderError("no space left")))
        world.tidy()
    world.tidy()
    if restart:
        assert world.order.number == number
        return
    assert world.order.blocks == (0, 1) and world.order.number > number
    number = world.order.number
    world.tidy()
    assert world.order.number == number, "once is enough"


def test_a_base_block_that_seems_apart_from_guests_is_not_ordered_to_end(make: Make) -> None:
    """If clocks are hours apart, the report that it joined them is not believed."""
    world = make(guests=QUEUES[0])
    world.change({1: ONE}, guests=(1,))
    number = world.order.number
    report_lost(world, (1,), (0,))
    for _ in range(2):
        world.tidy()
        world.simulated.pass_time(310)
    assert world.tasks[0].running and world.order.number == number


def report_lost(world: BlockWorld, blocks: tuple[int, ...], restarts: tuple[int, ...]) -> None:
    """Write the report that these blocks train on without the others."""
    lost = Membership(9, blocks, restarts, 1, len(blocks), 2, 50, 32, 0.1, why="lost")
    with (world.training.files.directory / "reports-0.jsonl").open("ab") as file:
        file.write(encode_report(60, world.clock(), lost))


def test_a_job_whose_owner_keeps_it_from_running_is_not_cancelled(make: Make) -> None:
    """Its blocks were requeued into a hold by hand."""
    world = make()
    world.change({1: ONE})
    world.cluster.cancel(Task(world.job_id, 1))
    world.simulated.client.requeue_hold(Task(world.job_id, 0))
    world.simulated.pass_time(60)
    world.tidy()
    assert world.tasks[0].pending and world.tasks[2].pending
    assert world.tasks[2].state is JobState.PENDING


@pytest.mark.parametrize("looked", [True, False], ids=["acted before", "acted then"])
def test_a_job_whose_owner_holds_it_after_a_change_is_not_cancelled(make: Make, looked: bool) -> None:
    """The block that took its first one's place trained, was requeued, and waits when the change is looked at again."""
    world = make()
    world.begin({1: TWO}, (0,))
    world.until(State.JOINING)
    world.simulated.pass_time(60)
    assert world.training.members == (1,)
    world.observer.observe()
    world.cluster.preempt(Task(world.job_id, 1))
    world.simulated.pass_time(30)  # until its last process is gone
    if looked:
        world.finish()
    assert world.tasks[1].pending and not world.tasks[1].held
    world.cluster.hold(world.job_id)
    world.finish()
    assert world.resize.state == (State.ROLLED_BACK if looked else State.ENDED)
    world.simulated.pass_time(60)
    world.tidy()
    assert all(job.pending and job.held for task, job in world.tasks.items() if task)
    world.cluster.release(Task(world.job_id, 1))
    world.simulated.pass_time(200)
    assert world.tasks[1].running


def test_a_block_that_was_to_leave_and_is_requeued_first_starts_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's reports are not believed, so that nobody is known to train: it has no other block."""
    monkeypatch.setattr(Store, "membership", lambda *_, **__: None)
    world = make()
    world.begin({1: ONE}, (0,))
    world.simulated.pass_time(70)  # and nobody looks
    world.cluster.preempt(Task(world.job_id, 0))
    world.finish()
    assert world.resize.state == State.ROLLED_BACK and not world.tasks[0].held
    world.simulated.pass_time(300)
    assert world.training.members, "it, or the next behind the throttle, which nobody has lifted yet"


def test_a_block_that_joined_unseen_and_is_requeued_starts_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose place it took has left."""
    world = make()
    world.begin({1: TWO}, (0,))
    world.until(State.JOINING)
    monkeypatch.setattr(Store, "membership", lambda *_, **__: None)
    world.simulated.pass_time(60)
    assert world.training.members == (1,)
    world.cluster.preempt(Task(world.job_id, 1))
    world.simulated.pass_time(30)
    world.finish()
    assert world.resize.state == State.ROLLED_BACK and world.tasks[0].held and not world.tasks[1].held
    world.simulated.pass_time(300)
    assert world.tasks[1].running


def test_a_member_that_has_left_shows_that_the_others_joined(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a block that took another's place: by clocks that are hours apart, its report is not believed."""
    world = make({1: TWO})
    world.tidy()
    before = world.store.membership(world.job_id)
    assert before is not None and set(before.report.blocks) == {0, 1}
    monkeypatch.setattr(Store, "membership", lambda store, job, order=None: before if order is None else None)
    world.begin({2: ONE}, (0,))
    world.until(State.JOINING)
    world.simulated.pass_time(60)
    assert set(world.training.members) == {1, 2}
    world.finish()
    world.check()
    assert world.resize.state == State.DONE and set(world.order.blocks or ()) == {1, 2}


def test_a_base_block_that_joined_unseen_stays_next_to_guests(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks that are hours apart its report is not believed: neither the change that goes back, nor the next one,
    orders it away."""
    world = make(guests=QUEUES[0])
    world.change({1: TWO, 2: ONE}, guests=(1, 2))
    world.cluster.kill(Task(world.job_id, 0), 9)
    world.simulated.pass_time(60)
    world.tidy()
    before = world.store.membership(world.job_id)
    assert before is not None and set(before.report.blocks) == {1, 2}
    monkeypatch.setattr(Store, "membership", lambda store, job, order=None: before if order is None else None)
    world.begin({3: ONE})
    world.until(State.JOINING)
    world.simulated.pass_time(60)
    assert set(world.training.members) == {1, 2, 3}
    assert world.finish().outcome.code == "blocks_not_joined"
    assert world.order.blocks == (3, 1, 2) and set(world.training.members) == {1, 2, 3}
    world.begin({}, (2,))
    world.until(State.JOINING)
    assert world.order.blocks == (3, 1)
    world.finish()
    assert set(world.training.members) == {1, 3}


def test_a_block_that_its_owner_holds_keeps_the_job_if_its_report_is_not_believed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the only one's place, by clocks that are hours apart, and Slurm requeued it into the owner's hold."""
    world = make()
    world.tidy()
    before = world.store.membership(world.job_id)
    monkeypatch.setattr(Store, "membership", lambda store, job, order=None: before if order is None else None)
    world.begin({1: ONE}, (0,))
    world.until(State.LEAVING)
    world.cluster.hold(Task(world.job_id, 1))
    world.cluster.preempt(Task(world.job_id, 1))
    world.simulated.pass_time(60)
    assert world.finish().state == State.ENDED
    for _ in range(3):
        world.simulated.pass_time(60)
        world.tidy()
    assert world.tasks[1].pending and world.tasks[1].held


def test_a_newcomer_that_is_all_that_is_left_is_not_ordered_away(make: Make) -> None:
    """Who trained was preempted, and another that was to join waits for room."""
    world = make()
    world.drain_all()
    world.begin({1: ONE, 2: Shape(4, 4)})
    world.until(State.JOINING)
    world.simulated.pass_time(25)
    world.resume_all()
    world.cluster.preempt(Task(world.job_id, 0), "cancel")
    world.simulated.pass_time(5)
    assert world.tasks[0].ended and world.tasks[1].running and world.tasks[2].pending
    world.finish()
    assert world.order.blocks == (1,) and world.tasks[1].running


def test_the_last_block_that_waits_is_not_put_back(make: Make) -> None:
    """Its owner requeued it, and the one that took its place has failed."""
    world = make()

    def lose() -> None:
        world.cluster.reuse(Task(world.job_id, 0))
        world.cluster.release(Task(world.job_id, 0))
        world.cluster.kill(Task(world.job_id, 1), 1)

    world.at("before journal leaving", lose)
    world.change({1: TWO}, (0,))
    assert world.states == THERE and world.tasks[1].state is JobState.FAILED
    assert world.tasks[0].pending and not world.tasks[0].held
    _stays_its_owners(world, 0)


def test_a_block_that_is_left_to_train_on_is_its_owners_to_hold(make: Make) -> None:
    """It waits too long, and the last other block is cancelled as the change is taken back."""
    world = make()
    world.at("before journal leaving_back", lambda: world.cluster.cancel(Task(world.job_id, 0)))
    world.drain_all()
    assert world.change({1: ONE}).state == State.ROLLED_BACK
    assert world.tasks[1].pending and not world.tasks[1].held and 2 in world.machine_held()
    _stays_its_owners(world, 1)


def test_a_block_that_was_to_leave_and_that_its_owner_holds_first_is_not_ours(make: Make) -> None:
    """It is held while it trains, and Slurm requeues it into that hold before the change is taken back."""
    world = make({1: ONE})
    world.drain_all()
    world.begin({2: ONE}, (1,))
    world.until(State.JOINING)
    world.cluster.hold(Task(world.job_id, 1))
    world.cluster.preempt(Task(world.job_id, 1))
    assert world.finish().state == State.ROLLED_BACK and 2 in world.machine_held()
    _stays_its_owners(world, 1)


def test_a_block_that_its_owner_holds_before_it_has_left_is_not_ours(make: Make) -> None:
    """It is held while it trains, and Slurm requeues it into that hold before the other takes its place."""
    world = make({1: ONE})
    world.begin({2: ONE}, (1,))
    world.until(State.JOINING)
    world.cluster.hold(Task(world.job_id, 1))
    world.cluster.preempt(Task(world.job_id, 1))
    assert world.finish().state == State.DONE and world.tasks[1].pending and 3 in world.machine_held()
    _stays_its_owners(world, 1)


def _stays_its_owners(world: BlockWorld, task: int) -> None:
    """Its owner holds it before the companion looks again, which only starts then."""
    world.cluster.hold(Task(world.job_id, task))
    world.simulated.pass_time(60)
    world.machine = world.companion()
    for _ in range(3):
        world.tidy()
        world.simulated.pass_time(60)
    assert task not in world.machine_held() and world.tasks[task].held


def test_a_block_put_back_without_a_report_of_it_is_ours(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job never says that it trains without it, and fails: what waits is cancelled, though by the newest report it
    trained last."""
    world = make({1: ONE})
    world.observer.observe()
    stale = world.store.membership(world.job_id)
    assert stale is not None and stale.report.blocks == (0, 1)
    monkeypatch.setattr(Store, "membership", lambda store, job, order=None: stale if order is None else None)
    world.change({}, (1,))
    assert world.resize.state == State.DONE and world.tasks[1].held
    world.cluster.kill(Task(world.job_id, 0), 1)
    world.simulated.pass_time(60)
    world.tidy()
    assert not any(job.pending for job in world.tasks.values())


def _reach(world: BlockWorld, state: State | Stage) -> None:
    """A change of blocks 0 and 1 in that state, which is not done with."""
    world.begin({2: TWO} if state is not State.LEAVING else {}, () if state is not State.LEAVING else (1,))
    if state is BACK:
        world.until(State.JOINING)
        world.simulated.pass_time(3)
        world.cluster.kill(Task(world.job_id, 2), 1)
    world.halt(str(Stage(state) if isinstance(state, State) else state))


def test_an_order_is_called_off_at_the_next_try(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for a moment: the blocks that were taken back must not stay wanted, nor their batch ordered."""
    world = make()
    world.drain_all()
    world.begin({1: ONE})
    world.until(State.JOINING)
    world.stop_file.touch()
    with monkeypatch.context() as patch:
        patch.setattr(world.machine.orders, "write", Mock(side_effect=OrderError("no space left")))
        for _ in range(5):
            world.tick()
    resize = world.finish()
    assert resize.state == State.ROLLED_BACK
    assert world.order.number > (resize.order_number or 0) and world.order.blocks == (0,)

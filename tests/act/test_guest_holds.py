"""Running guests are held where Slurm requeues them, and nowhere else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_ones.act.arrays import comes_back
from slurm_ones.act.transitions import State
from slurm_ones.simulate.slurm.nodes import Qos, SlurmConf
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import Partition, Queue, Task
from tests.act.block_world import BlockWorld
from tests.act.test_blocks import ONE, TWO
from tests.act.world import Crash
from tests.marks import nightly
from tests.slurm.make import PENDING

GUEST, SCAVENGE = Queue(qos="guest"), Queue("scavenge")
REQUEUE = SlurmConf(qos=(Qos("normal", 10, ("guest",)), Qos("guest", mode="requeue")))
CANCEL = SlurmConf(qos=(Qos("normal", 10, ("guest",)), Qos("guest", mode="cancel")))
Make = Callable[..., BlockWorld]


@pytest.fixture
def make(empty: Path) -> Iterator[Make]:
    """A job with base block 0, and guests 1 and 2."""
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(_world(empty, empty.parent, **how))


def _world(empty: Path, folder: Path, **how: Any) -> BlockWorld:
    world = BlockWorld(empty, folder, quick=True, **({"guests": GUEST, "conf": REQUEUE} | how))
    assert world.change({1: TWO, 2: ONE}, guests=(1, 2)).state == State.DONE
    return world


def _held(world: BlockWorld) -> set[int]:
    return {task for task, job in world.tasks.items() if job.running and job.held}


@pytest.mark.parametrize(
    ("how", "held"),
    [
        ({}, {1, 2}),
        ({"guests": SCAVENGE, "preempt": "requeue"}, {1, 2}),
        ({"conf": CANCEL}, set()),
        ({"guests": SCAVENGE, "preempt": "cancel", "conf": SlurmConf()}, set()),
        ({"conf": replace(REQUEUE, requeue_exit="1-255")}, set()),
    ],
    ids=["QOS", "partition", "QOS cancels", "partition cancels", "RequeueExit"],
)
def test_which_guests_are_held_while_they_run(make: Make, how: Mapping[str, Any], held: set[int]) -> None:
    """Never a base block; none whose hold Slurm would turn into one that its owner cannot release."""
    if how.get("guests") == SCAVENGE:
        how = {"conf": SlurmConf()} | how
    world = make(**how)
    world.tidy()
    assert _held(world) == held
    assert held <= world.machine_held()
    seen = world.observer.observe().elastic[world.job_id]
    assert not seen.job.held and seen.refusal is None


CONFIG = {"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE", "RequeueExit": "(null)"}
BY_PARTITION = CONFIG | {"PreemptType": "preempt/partition_prio"}


@pytest.mark.parametrize(
    ("config", "mode", "of_partition", "back"),
    [
        (CONFIG, "", "", True),
        (CONFIG, "off", "CANCEL", True),
        (CONFIG, "cluster", "", True),
        (CONFIG, "cancel", "REQUEUE", False),
        (CONFIG | {"PreemptMode": "CANCEL"}, "requeue", "", True),
        (CONFIG | {"PreemptMode": "GANG,SUSPEND"}, "", "", False),
        (CONFIG | {"RequeueExitHold": "99"}, "requeue", "", False),
        (CONFIG | {"RequeueExit": "1-255"}, "requeue", "", False),
        (BY_PARTITION, "cancel", "", True),
        (BY_PARTITION, "", "CANCEL", False),
        (BY_PARTITION | {"PreemptMode": "CANCEL"}, "", "REQUEUE", True),
        ({}, "", "", False),
    ],
)
def test_what_becomes_of_a_guest(config: Mapping[str, str], mode: str, of_partition: str, back: bool) -> None:
    """By its QOS or its partition, whichever Slurm goes by, and the cluster's mode if that says nothing."""
    job = replace(PENDING, qos="guest")
    partition = Partition("gpu", True, (), 0.0, 0, False, preempt_mode=of_partition)
    assert comes_back(job, config, partition, {"guest": mode}) is back
    assert not comes_back(replace(job, requeue=False), config, partition, {"guest": mode})


@pytest.mark.parametrize("again", [False, True], ids=["known", "after a restart"])
def test_a_guest_that_is_requeued_comes_back_held_and_is_used_again(make: Make, again: bool) -> None:
    """Also if nobody is there when Slurm takes it; the next change releases it."""
    world = make()
    world.tidy()
    world.cluster.preempt(Task(world.job_id, 1), "requeue", grace_s=30)
    if again:
        world.machine = world.companion()
    world.simulated.pass_time(300)
    world.tidy()
    assert world.tasks[1].pending and world.tasks[1].held and {*world.training.members} == {0, 2}
    assert world.held.of(world.job_id) >= {1}
    world.change({1: TWO}, guests=(1,))
    world.tidy()
    assert world.resize.state == State.DONE and _held(world) == {1, 2}


def test_a_guest_that_was_not_held_rejoins(make: Make) -> None:
    """Slurm starts it as soon as there is room, and it is held from then on."""
    world = make()
    world.cluster.preempt(Task(world.job_id, 1), "requeue", grace_s=30)
    world.simulated.pass_time(300)
    assert {*world.training.members} == {0, 1, 2}
    world.tidy()
    assert _held(world) == {1, 2}


@pytest.mark.parametrize("owner", [False, True], ids=["ours", "the owner's"])
def test_whose_hold_it_is_in_which_a_guest_waits_that_was_reshaped_before(make: Make, owner: bool) -> None:
    """The last of its job: it goes on from our hold, which is younger than its shape, and stays in its owner's."""
    world = make()
    world.drain_all()
    for task in (0, 2):
        world.cluster.cancel(Task(world.job_id, task))
    world.cluster.preempt(Task(world.job_id, 1), "requeue")
    world.simulated.pass_time(60)
    world.tidy()
    world.begin_waiting(ONE, {1: ONE})
    assert world.finish().state == State.DONE and world.tasks[1].pending and not world.tasks[1].held
    world.cluster.release(Task(world.job_id, 3))  # its owner
    world.resume_all()
    world.simulated.pass_time(60)
    world.tidy()
    assert {*world.training.members} == {1, 3} and _held(world) == {1}
    if owner:
        world.cluster.release(Task(world.job_id, 1))
        world.tidy()
        world.cluster.hold(Task(world.job_id, 1))
    world.cluster.kill(Task(world.job_id, 3), 1)
    world.simulated.pass_time(60)
    world.cluster.preempt(Task(world.job_id, 1), "requeue")
    world.simulated.pass_time(60)
    assert world.tasks[1].pending and world.tasks[1].held
    world.tidy()
    world.simulated.pass_time(60)
    assert world.training.members == (() if owner else (1,)) and world.tasks[1].held is owner


def _comment(world: BlockWorld, text: str) -> None:
    for task in world.cluster.records.known_of(world.job_id):
        world.cluster.set_comment(task.to_model().key, text)


def _guests_off(world: BlockWorld) -> None:
    _comment(world, "ones: gpus=1-16 guests=off array=blocks")


def _no_queue(world: BlockWorld) -> None:
    world.settings = world.settings.model_copy(update={"guests": {}})


OVER: dict[str, Callable[[BlockWorld], object]] = {
    "guests off": _guests_off,
    "opted out": lambda world: _comment(world, "nothing for a companion"),
    "left alone": lambda world: _comment(world, "ones: gpus=1-16 resize=off array=blocks"),
    "no queue": _no_queue,
    "stopped": lambda world: world.stop_file.touch(),
    "without base": lambda world: world.cluster.kill(Task(world.job_id, 0), 0),
}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("again", [False, True], ids=["known", "after a restart"])
def test_no_guest_stays_held_for_nobody(make: Make, over: str, again: bool) -> None:
    """It runs on, and starts again by itself when Slurm has taken it."""
    world = make()
    world.tidy()
    OVER[over](world)
    if again or over == "no queue":
        world.machine = world.companion()
    world.simulated.pass_time(10)
    world.tidy()
    assert not _held(world)
    world.tidy()
    assert not _held(world) and not world.machine_held() & {1, 2}


def test_a_guest_that_its_owner_releases_is_not_held_again(make: Make) -> None:
    world = make()
    world.tidy()
    world.simulated.client.release(Task(world.job_id, 1), start_now=False)
    world.tidy()
    world.tidy()
    assert _held(world) == {2} and 1 not in world.machine_held()


def test_a_hold_that_slurm_forgot_is_put_on_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmctld began again from what it had saved before."""
    world = make()
    world.tidy()
    world.cluster.release(Task(world.job_id, 1))
    config = {**world.simulated.client.config(), "BOOT_TIME": f"{world.clock() + 5:.0f}"}
    monkeypatch.setattr(world.simulated.client, "config", lambda: config)
    world.tidy()
    assert _held(world) == {1, 2}


def test_a_guest_that_an_operator_holds_stays_held(make: Make) -> None:
    world = make()
    world.tidy()
    world.cluster.hold(Task(world.job_id, 1), "admin")
    _guests_off(world)
    world.tidy()
    assert _held(world) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Crash, nightly(Unreachable)])
def test_an_interruption_between_any_two_steps(empty: Path, kind: type[BaseException]) -> None:
    """Killed, or cut off from Slurm, as guests are held and as their holds are lifted: the next tick ends both."""

    def interrupted(stop: int | None) -> int:
        with tempfile.TemporaryDirectory(dir=empty.parent) as name, _world(empty, Path(name)) as world:
            first = len(world.events)
            world.fail({first + stop: kind} if stop is not None else {})
            for change, held in ((None, {1, 2}), (_guests_off, set[int]())):
                if change is not None:
                    change(world)
                try:
                    world.tidy()
                except kind:
                    world.machine = world.companion()
                    world.tidy()
                assert _held(world) == held
                world.tidy()
                assert ({1, 2} <= world.machine_held()) is bool(held)
            return len(world.events) - first

    for stop in range(interrupted(None)):
        interrupted(stop)

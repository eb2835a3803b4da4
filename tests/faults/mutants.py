"""Companions with one thing left out that keeps a job safe: the harness of faults must find each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from ones_db import ResizeRecord, engine
from ones_db.shape import Shape
from slurm_ones.act import actor, blocks
from slurm_ones.act.machine import Machine
from slurm_ones.act.resize import HANDLERS
from slurm_ones.act.transitions import TRANSITIONS, Stage, State
from slurm_ones.jobs.elastic import Elastic, WholeJob
from slurm_ones.jobs.observer import DrainReports, Observer
from slurm_ones.rules.blocks import GuestSizes, Moves
from slurm_ones.rules.gate import target_of
from slurm_ones.service.leadership import Leadership
from slurm_ones.simulate.slurm import simulated_client as client_module
from slurm_ones.slurm.client import Refused, SlurmError
from slurm_ones.slurm.model import SlurmJob, Task


@contextmanager
def no_reading_back() -> Iterator[None]:
    """What Slurm took only in part stays so."""

    def reshape(
        read: Callable[[int], SlurmJob],
        update: Callable[[SlurmJob, Shape], None],
        job_id: int,
        shape: Shape,
        *rest: Any,
    ) -> None:
        try:
            update(read(job_id), shape)
        except SlurmError:
            return

    with mock.patch.object(client_module, "reshape", reshape):
        yield


@contextmanager
def refused_and_forgotten() -> Iterator[None]:
    """A refused update ends the resize, and nobody releases the job."""

    original = HANDLERS[State.RESHAPING]

    def reshaping(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
        if resize.back:
            return original(machine, resize, job)
        try:
            machine.client.reshape(job.job_id, target_of(resize))
        except Refused:
            return machine.move(resize, State.ABANDONED)
        return machine.move(resize, State.RELEASING)

    there = Stage(State.RESHAPING)
    allowed = {there: TRANSITIONS[there] | {Stage(State.ABANDONED)}}
    with mock.patch.dict(HANDLERS, {State.RESHAPING: reshaping}), mock.patch.dict(TRANSITIONS, allowed):  # type: ignore[arg-type]
        yield


def no_checkpoint() -> AbstractContextManager[Any]:
    """A job is requeued without waiting for its checkpoint."""
    return mock.patch.object(DrainReports, "drained", lambda self, job, restart, order: self._clock())


def deaf_to_owners() -> AbstractContextManager[Any]:
    """Nobody asks whether the owner still wants it."""
    return mock.patch.object(Observer, "may_resize", lambda self, job: True)


@contextmanager
def no_fence() -> Iterator[None]:
    """A leader that was stopped does not look whether it still leads."""
    with (
        mock.patch.object(Leadership, "check", lambda self: None),
        mock.patch.object(engine, "check_term", lambda *_: None),
    ):
        yield


@contextmanager
def impatient_memory() -> Iterator[None]:
    """A new companion forgets the resizes that the one before it left open."""
    from tests.faults.store import FaultyStore

    begun: set[int] = set()
    before, opened = FaultyStore.begin_resize, FaultyStore.open_resizes

    def begin(self: FaultyStore, record: ResizeRecord) -> ResizeRecord:
        made = before(self, record)
        begun.add(id(self) + made.id)
        return made

    def mine(self: FaultyStore) -> list[ResizeRecord]:
        return [resize for resize in opened(self) if id(self) + resize.id in begun]

    with mock.patch.object(FaultyStore, "begin_resize", begin), mock.patch.object(FaultyStore, "open_resizes", mine):
        yield


@contextmanager
def released_unordered() -> Iterator[None]:
    """Blocks are released, and the job is ordered to train with them only the next time that somebody looks."""
    opening = blocks.BLOCK_HANDLERS[State.OPENING]

    def hasty(machine: Machine, resize: ResizeRecord, array: WholeJob) -> ResizeRecord:
        held = [task for task, _ in resize.added if array.tasks[task].pending and array.tasks[task].held]
        for task in held:
            machine.client.release(Task(array.job_id, task), start_now=False)
        return resize if held else opening(machine, resize, array)

    with mock.patch.dict(blocks.BLOCK_HANDLERS, {State.OPENING: hasty}):
        yield


def never_held() -> AbstractContextManager[Any]:
    """Tasks that wait behind the throttle of their array are not held before it is lifted, and all of them start."""
    return mock.patch.multiple(blocks, _unheld=lambda resize, array: [], _released_by_owner=lambda array: False)


@contextmanager
def base_left_to_slurm() -> Iterator[None]:
    """Every block that joins is released in the guests' queue, and nobody looks again."""

    def all_of_them(elastic: Elastic, moves: Moves, asked: int) -> tuple[int, ...]:
        return tuple(task for task, _ in moves.added)

    with (
        mock.patch.object(actor, "guests_among", all_of_them),
        mock.patch.object(blocks, "_lacks_base", lambda machine, resize, array: None),
    ):
        yield


def base_leaves_first() -> AbstractContextManager[Any]:
    """Guests stay in place of base blocks."""
    return mock.patch.object(GuestSizes, "keep_base", lambda self, blocks, stay, added=(): True)


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no reading back of a reshape": no_reading_back,
    "no release after a refused update": refused_and_forgotten,
    "a requeue without a checkpoint": no_checkpoint,
    "an owner who is not heard": deaf_to_owners,
    "a leader that does not ask whether it leads": no_fence,
    "a resize that a new companion does not take up": impatient_memory,
    "blocks released before the order": released_unordered,
    "a throttle lifted before the tasks are held": never_held,
    "a base block in the queue of guests": base_left_to_slurm,
    "a guest that stays in place of base": base_leaves_first,
}

"""Changing a job of blocks while it trains: new blocks are held, shaped and released, then some join and others leave.

No state of this road takes anything from the job: it trains on as it is until all blocks that it is ordered to train
with are ready, and it is the job that says when it does. So a companion may die anywhere; the next one goes on from the
stored state. A block that is not wanted any more ends by itself and is put back into a hold, to be used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from ones_db import ResizeRecord
from ones_db.reasons import Reason, reason
from ones_wrapper.protocol import Membership, Order
from slurm_ones.act.arrays import Array, is_alive, look_at
from slurm_ones.act.machine import Machine
from slurm_ones.act.orders import OrderError
from slurm_ones.act.preparing import changes, elsewhere, prepared, to_join, unfit
from slurm_ones.act.stale_holds import forgotten, may_be_ours
from slurm_ones.act.transitions import State
from slurm_ones.rules.blocks import held_by_others
from slurm_ones.slurm.client import Refused, UnknownJob
from slurm_ones.slurm.model import JobState

log = logging.getLogger(__name__)


def advance_blocks(
    machine: Machine, resize: ResizeRecord, handle: Callable[[ResizeRecord, Array], ResizeRecord]
) -> ResizeRecord:
    """Look at the job, and do what the resize's state asks for."""
    try:
        array = look_at(machine.client, resize.job_id)
    except UnknownJob:
        return machine.move(resize, State.ENDED, reason("job_unknown"))
    others = _held_by_others(machine, resize, array)
    chosen = others & to_join(resize)
    # Those that were chosen stay noted, so that a next look finds them too; why this is taken back names them.
    resize = _note_held(machine, resize, {*resize.held} - (others - chosen))
    if not array.alive:
        seen = _newest(machine, array)
        if seen is not None and seen.order == resize.order_number:
            # Who trained by its order is not held by us any more: if it waits in a hold, somebody else's.
            resize = _note_held(machine, resize, {*resize.held} - {*seen.blocks})
        ended = [job for job in array.tasks.values() if job.ended]
        last = max(ended, key=lambda job: job.end_time, default=array.job)
        why = held_by_others(chosen) if chosen else reason("job_ended", state=last.state.value)
        return machine.move(resize, State.ENDED, why)
    if chosen:
        return _withdraw(machine, resize, held_by_others(chosen))
    # Whatever its task says, its term is what its reports and orders go by.
    return handle(resize, replace(array, job=replace(array.job, restart=resize.restart)))


# -- preparing ---------------------------------------------------------------------------------------------------------


def _preparing(machine: Machine, resize: ResizeRecord, array: Array) -> ResizeRecord:
    machine.new.discard(resize.id)
    if (why := machine.hindered(resize, array.job)) is not None:
        return _withdraw(machine, resize, why)
    if not resize.added:
        return machine.move(resize, State.OPENING)
    if (why := unfit(resize, array)) is not None:
        return _withdraw(machine, resize, why)
    if machine.times.late(resize):
        return _withdraw(machine, resize, reason("blocks_not_ready"))
    if not prepared(resize, array) and machine.times.due(resize):
        for change in changes(resize):
            why = change(machine, resize, array)
            if why is not None:
                return _withdraw(machine, resize, why)
            array = look_at(machine.client, resize.job_id)
            why = reason("switched_off") if not machine.wanted(array.job) else unfit(resize, array)
            if why is not None:
                return _withdraw(machine, resize, why)
            if prepared(resize, array):
                break
    return machine.move(resize, State.OPENING) if prepared(resize, array) else resize


def _held_by_others(machine: Machine, resize: ResizeRecord, array: Array) -> set[int]:
    """At the first look at it, those of the tasks that we are to hold that somebody has held since they were chosen:
    it was not us. None at any other look."""
    if resize.id not in machine.new or resize.state != State.PREPARING.value:
        return set()
    return {task for task in resize.held if (job := array.tasks.get(task)) is not None and job.held}


# -- there -------------------------------------------------------------------------------------------------------------


def _opening(machine: Machine, resize: ResizeRecord, array: Array) -> ResizeRecord:
    if (why := machine.hindered(resize, array.job) or elsewhere(resize, array)) is not None:
        return _withdraw(machine, resize, why)
    # The order first: a block that starts looks whether it is wanted.
    if machine.orders.last_number(array.job) < (resize.order_number or 0):
        blocks = (_training(machine, resize, array) - {*resize.dropped}) | {task for task, _ in resize.added}
        if not blocks:
            return _withdraw(machine, resize, reason("blocks_not_ready"))
        try:
            _order(machine, resize, array, blocks, resize.new_batch, resize.order_number or 0)
        except OrderError as error:
            return _withdraw(machine, resize, reason("order_not_written", problem=str(error)))
    if (closed := _ours_to_release(resize, array)) and machine.times.due(resize):
        for task in closed:
            try:
                _release(machine, array, task)
            except Refused as error:
                return _withdraw(machine, resize, reason("release_refused", answer=str(error)))
    elif closed:
        return resize
    wait_s = machine.settings.blocks_wait_s if resize.added else machine.settings.drain_timeout_s
    return machine.move(resize, State.JOINING, deadline=machine.clock() + wait_s)


def _ours_to_release(resize: ResizeRecord, array: Array) -> list[int]:
    jobs = ((task, array.tasks.get(task)) for task, _ in resize.added)
    return [task for task, job in jobs if job is not None and job.pending and job.held and not job.admin_held]


def _release(machine: Machine, array: Array, task: int) -> None:
    """Raises `Refused`."""
    key = array.key(task)
    # Slurm delays what was requeued, nothing else.
    if machine.settings.start_now and array.tasks[task].restart > 0:
        try:
            machine.client.release(key, start_now=True)
            return
        except Refused as error:
            log.info("job %s: it is released to start after Slurm's own delay: %s", key, error)
    machine.client.release(key, start_now=False)


def _joining(machine: Machine, resize: ResizeRecord, array: Array) -> ResizeRecord:
    if _joined(machine, resize, array) is not None:
        return machine.move(resize, State.LEAVING, deadline=machine.clock() + machine.settings.blocks_wait_s)
    if (why := machine.hindered(resize, array.job) or elsewhere(resize, array)) is not None:
        return _withdraw(machine, resize, why)
    why = _hindered(machine, resize, array)
    return _withdraw(machine, resize, why) if why is not None else resize


def _hindered(machine: Machine, resize: ResizeRecord, array: Array) -> Reason | None:
    """Why the blocks will not train together; None while they may."""
    late, now = machine.times.late(resize), machine.clock()
    waiting, since = not resize.added, 0.0
    for task, _ in resize.added:
        job = array.tasks.get(task)
        if job is None:
            return reason("block_unknown", task=task)
        # Before a hold: Slurm itself holds what it will never start.
        if job.pending and job.never_starts:
            return reason("never_starts", cause=job.reason)
        if may_be_ours(job) and forgotten(machine.client, machine.store.resize_steps(resize.id)[-1].time):
            return reason("block_release_forgotten", task=task)
        if job.pending and job.held:
            jobs = ((one, array.tasks.get(one)) for one in to_join(resize))
            return held_by_others([one for one, its in jobs if its and its.held and not its.never_starts])
        if job.ended or job.completing:
            return reason("block_ended", task=task, state=job.state.value)
        waiting, since = waiting or job.pending, max(since, job.start_time)
    if waiting and late:
        given = machine.settings.blocks_wait_s
        return reason("queued_too_long", seconds=given) if resize.added else reason("blocks_not_joined")
    # Where this host's clock is behind Slurm's, a start lies in the future: then the wait as a whole counts.
    if not waiting and (now > since + machine.settings.start_timeout_s or (late and now < since)):
        return reason("blocks_not_joined")
    return None


def _leaving(machine: Machine, resize: ResizeRecord, array: Array) -> ResizeRecord:
    left = _put_back(machine, array, resize.dropped)
    if left and not machine.times.late(resize):
        return resize
    why = reason("blocks_linger", task=min(left)) if left else reason("blocks_train")
    seen = machine.reports.membership(array.job, resize.order_number)
    return machine.move(resize, State.DONE, why, pause_s=seen.report.pause_s if seen is not None else None)


# -- back --------------------------------------------------------------------------------------------------------------


def _withdraw(machine: Machine, resize: ResizeRecord, why: Reason) -> ResizeRecord:
    return machine.move(resize, State.WITHDRAWING, why, deadline=machine.times.start_deadline)


def _withdrawing(machine: Machine, resize: ResizeRecord, array: Array) -> ResizeRecord:
    number, last = resize.order_number or 0, machine.orders.last_number(array.job)
    seen = _joined(machine, resize, array) if last >= number else None
    training = _training(machine, resize, array) or _to_start(resize, array)
    try:
        if seen is not None and last > number:
            # It had the order before it could be called off: what it does is what it is to do.
            running = {*seen.blocks} & _running(array)
            _order(machine, resize, array, running, resize.new_batch, machine.orders.next_number(array.job))
        elif seen is None and last == number:
            _order(machine, resize, array, training, resize.old_batch, machine.orders.next_number(array.job))
    except OrderError as error:
        log.warning("job %d: its order could not be called off: %s", resize.job_id, error)
    if seen is not None:
        deadline = machine.clock() + machine.settings.blocks_wait_s
        return machine.move(resize, State.LEAVING, reason("blocks_joined"), deadline=deadline)
    # Where some had joined already they stay, and those whose place they took are gone.
    tasks = [task for task in (*(task for task, _ in resize.added), *resize.dropped) if task not in training]
    # Whom we hold must be known also where the job never reports that they left, or is stopped right after; and whom we
    # do not, since its owner may.
    loose = {task for task in resize.held if (job := array.tasks.get(task)) and job.pending and not job.held}
    resize = _note_held(machine, resize, ({*resize.held} - training - loose) | {*tasks})
    left = _put_back(machine, array, tasks)
    if left and not machine.times.late(resize):
        return resize
    return machine.move(resize, State.ROLLED_BACK, _cause(machine, resize))


def _note_held(machine: Machine, resize: ResizeRecord, tasks: set[int]) -> ResizeRecord:
    return resize if tasks == {*resize.held} else machine.store.note_held(resize.id, sorted(tasks))


def _cause(machine: Machine, resize: ResizeRecord) -> Reason:
    """Why it was taken back, as it was written down then."""
    steps = [step for step in machine.store.resize_steps(resize.id) if step.state == State.WITHDRAWING.value]
    return steps[-1].detail


# -- both --------------------------------------------------------------------------------------------------------------


def _put_back(machine: Machine, array: Array, tasks: Collection[int]) -> list[int]:
    """Have those of the tasks wait in a hold that do not run any more; those that still run. What ended in another way
    than it was to, or Slurm has forgotten, is let go; and what waits where no other block is left for the job."""
    left = []
    others = (job for task, job in array.tasks.items() if task not in tasks and not job.ended)
    alone = all(job.pending and job.held for job in others)
    for task in tasks:
        job = array.tasks.get(task)
        if job is None or (job.ended and job.state is not JobState.COMPLETED) or (job.pending and job.held):
            continue
        if job.completing or not (job.pending or job.ended):
            left.append(task)
            continue
        try:
            if job.pending:
                if not alone:
                    machine.client.hold(array.key(task))
            elif machine.wanted(array.job):
                machine.client.reuse(array.key(task))
        except Refused as error:
            log.info("job %s: it is not kept for another time: %s", array.key(task), error)
            if job.pending:
                left.append(task)  # it has started, if anything
    return left


def _newest(machine: Machine, array: Array) -> Membership | None:
    found = machine.reports.membership(array.job)
    return found.report if found is not None else None


def _joined(machine: Machine, resize: ResizeRecord, array: Array) -> Membership | None:
    """The newest membership where it is the one that was ordered: those that were to join are in it, by the start that
    Slurm knows of, and those that were to leave are not."""
    seen = _newest(machine, array)
    if seen is None:
        return None
    restarts = dict(zip(seen.blocks, seen.restarts, strict=False))
    for task, _ in resize.added:
        job = array.tasks.get(task)
        if job is None or not job.running or restarts.get(task) != job.restart:
            return None
    return seen if restarts.keys().isdisjoint(resize.dropped) else None


def _training(machine: Machine, resize: ResizeRecord, array: Array) -> set[int]:
    """The tasks that train together, by their newest report as far as Slurm agrees; or that run, without those that are
    to join. One that Slurm starts again is still meant."""
    seen = _newest(machine, array)
    known = {task for task, job in array.tasks.items() if is_alive(job)}
    members = {*seen.blocks} & known if seen is not None else set()
    return members or _running(array) - {task for task, _ in resize.added}


def _to_start(resize: ResizeRecord, array: Array) -> set[int]:
    """The tasks that wait in no hold: where none is known to train, those with which the job starts again. One that is
    to join is meant where there is no other."""
    waiting = {task for task, job in array.tasks.items() if job.pending and not job.held}
    return waiting - {task for task, _ in resize.added} or waiting


def _running(array: Array) -> set[int]:
    return {task for task, job in array.tasks.items() if job.running}


def _order(
    machine: Machine, resize: ResizeRecord, array: Array, blocks: Collection[int], batch: int | None, number: int
) -> None:
    """Order the job to train with these blocks; durable when it returns. Raises `OrderError`."""
    seen = _newest(machine, array)
    leader = array.tasks.get(seen.blocks[0]) if seen is not None and seen.blocks else None
    job = array.job
    if leader is not None and leader.running:
        # It is the one to be woken.
        job = replace(leader, job_id=job.job_id, restart=job.restart)
    gain = machine.gains.get(resize.id) if number == resize.order_number else None
    order = Order(number, resize.restart, batch, blocks=tuple(sorted(blocks)) or None, gain=gain)
    machine.orders.write(job, order, wake=True)


BLOCK_HANDLERS: dict[State, Callable[[Machine, ResizeRecord, Array], ResizeRecord]] = {
    State.PREPARING: _preparing,
    State.OPENING: _opening,
    State.JOINING: _joining,
    State.LEAVING: _leaving,
    State.WITHDRAWING: _withdrawing,
}

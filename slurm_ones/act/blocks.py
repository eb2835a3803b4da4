"""Resizes of jobs of blocks while they train. Tasks are held, reshaped and released; then blocks join and leave.

The job trains on with its old blocks until all new blocks are ready, then reports its new membership. Training never
waits for the companion; a new companion continues from the stored state. A block that leaves ends by itself, and its
task is held again for later use.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from ones_db import ResizeRecord
from ones_db.reasons import Reason, reason
from ones_wrapper.protocol import Membership, Order
from ones_wrapper.protocol.slurm_commands import NO_LICENSES
from slurm_ones.act.arrays import is_alive, look_at
from slurm_ones.act.holds import forgot_release, forgot_start, may_be_ours
from slurm_ones.act.machine import Machine
from slurm_ones.act.orders import OrderError
from slurm_ones.act.transitions import State
from slurm_ones.jobs.elastic import Elastic, WholeJob
from slurm_ones.rules.blocks import Moves, has_left, held_by_others, task_of, with_base
from slurm_ones.slurm.client import Refused, UnknownJob
from slurm_ones.slurm.model import JobState, Queue, SlurmJob, Task

log = logging.getLogger(__name__)

Step = Callable[[Machine, ResizeRecord, WholeJob], None]


def advance_blocks(machine: Machine, resize: ResizeRecord) -> ResizeRecord:
    """Advance a resize by blocks: read the job from Slurm and do what the resize's state requires."""
    try:
        array = _look(machine, resize)
    except UnknownJob:
        return machine.move(resize, State.ENDED, reason("job_unknown"))
    if machine.is_another(array):
        return machine.move(resize, State.ENDED, reason("job_unknown"))
    others = _held_by_others(machine, resize, array)
    chosen = others & dict(resize.added).keys()
    # Chosen tasks stay in the record, so that the next look finds them too. The reason for taking the change back names
    # them.
    resize = _note_held(machine, resize, {*resize.held} - (others - chosen))
    if not any(map(is_alive, array.blocks)):
        # A task that trained by this order is no longer held by the companion. If it waits in a hold, somebody else
        # holds it, unless Slurm forgot its start.
        seen, joined = _newest(machine, array), State(resize.state) is State.LEAVING and not resize.back
        trained = {*dict(resize.added)} if joined else set()
        if seen is not None and seen.order == resize.order_number:
            trained |= {*seen.blocks}
        forgot = {task for task, job in array.tasks.items() if forgot_start(machine.store, resize.job_id, job)}
        trained -= forgot
        resize = _note_held(machine, resize, ({*resize.held} - trained) | forgot)
        if loose := trained & {*dict(resize.added)} - {*resize.let_go}:
            resize = machine.store.note_let_go(resize.id, sorted({*resize.let_go} | loose))
        ended = [job for job in array.tasks.values() if job.ended]
        last = max(ended, key=lambda job: job.end_time, default=array.first)
        why = held_by_others(chosen) if chosen else reason("job_ended", state=last.state.value)
        return machine.move(resize, State.ENDED, why)
    if chosen:
        return _turn(machine, resize, held_by_others(chosen))
    return BLOCK_HANDLERS[State(resize.state)](machine, resize, array)


def _look(machine: Machine, resize: ResizeRecord) -> WholeJob:
    # Reports and orders go by the resize's term, whatever the tasks show.
    return look_at(machine.client, resize.job_id, resize.restart, machine.guests)


def guests_among(elastic: Elastic, moves: Moves, asked: int) -> tuple[int, ...]:
    """Return the tasks of joining blocks that become guests because they exceed `asked`, the GPUs that the user asked
    for. The job keeps at least one base block."""
    if not elastic.takes_guests:
        return ()
    staying = (job for job in elastic.job.running_blocks if task_of(job) not in moves.dropped)
    base = sum(elastic.shape_of(job).gpus for job in staying if not elastic.job.is_guest(job))
    found = []
    for task, shape in moves.added:
        if base + shape.gpus <= asked:
            base += shape.gpus
        else:
            found.append(task)
    return tuple(found if base else found[:-1])


# -- preparing ---------------------------------------------------------------------------------------------------------


def _preparing(machine: Machine, resize: ResizeRecord, array: WholeJob) -> ResizeRecord:
    machine.new.discard(resize.id)
    why = machine.hindered(resize, array)
    if why is None and resize.added:
        why = _unfit(resize, array)
        if why is None and machine.late(resize):
            why = reason("blocks_not_ready")
        if why is None and not _prepared(machine, resize, array) and machine.due(resize):
            array, why = _prepare(machine, resize, array)
    if why is not None:
        return _turn(machine, resize, why)
    return machine.move(resize, State.OPENING) if _prepared(machine, resize, array) else resize


def _prepare(machine: Machine, resize: ResizeRecord, array: WholeJob) -> tuple[WholeJob, Reason | None]:
    """Hold all waiting tasks, lift the array's throttle, and set the shapes of the tasks that will join. No step starts
    a task, and each can be repeated.

    Return the job as Slurm then shows it, and the reason if a step failed.
    """
    steps: list[tuple[Step, Callable[[str], Reason]]] = [
        (_hold, lambda answer: reason("hold_refused", answer=answer)),
        (_lift_throttle, lambda answer: reason("throttle_refused", answer=answer)),
        *(
            (partial(_give_shape, task=task), lambda answer: reason("shape_refused", answer=answer))
            for task, _ in resize.added
        ),
    ]
    for step, refused in steps:
        try:
            with suppress(UnknownJob):  # the next look shows it
                step(machine, resize, array)
        except Refused as error:
            return array, refused(str(error))
        array = _look(machine, resize)
        why = reason("switched_off") if not machine.wanted(array) else _unfit(resize, array)
        if why is not None or _prepared(machine, resize, array):
            return array, why
    return array, None


def _hold(machine: Machine, resize: ResizeRecord, array: WholeJob) -> None:
    unheld = _unheld(resize, array)
    if len(unheld) > 1:
        # Tasks are named: a block that trains may be requeued by Slurm at this moment, and must start again.
        machine.client.hold_waiting(resize.job_id, unheld)
    else:
        for task in unheld:
            machine.client.hold(Task(array.job_id, task))


def _lift_throttle(machine: Machine, resize: ResizeRecord, array: WholeJob) -> None:
    # Never before the tasks are held: all of them would start.
    if _throttled(array) and not _unheld(resize, array) and not _released_by_owner(array):
        machine.client.throttle(resize.job_id, 0)


def _give_shape(machine: Machine, resize: ResizeRecord, array: WholeJob, *, task: int) -> None:
    """Set the shape of a joining block; requeue it first if it has ended. Do nothing while a waiting task is not held
    or the array has a throttle."""
    job = array.tasks[task]
    if _unheld(resize, array) or _throttled(array) or job.completing:
        return
    if not job.pending:
        machine.client.reuse(Task(array.job_id, task))
    queue = _queue(machine, resize, array, task)
    machine.client.reshape(Task(array.job_id, task), dict(resize.added)[task], kind=resize.new_kind, queue=queue)


def _queue(machine: Machine, resize: ResizeRecord, array: WholeJob, task: int) -> Queue:
    """Return the queue into which a joining block is moved before its release: the guests' queue for a guest, and the
    base blocks' queue for a former guest. An empty queue means no move."""
    job, own = array.tasks[task], _home(machine, array)
    partition = own.partition.partition(",")[0]
    if task in resize.guests:
        queue = machine.guests.get(partition, Queue())
        most_s = machine.longest_s(queue.partition or partition, dict(resize.added)[task], job.reservation)
        limit_s = _limit_s(job, own, most_s, machine.settings.blocks_wait_s)
        return queue._replace(time_limit_s=limit_s, licenses=NO_LICENSES)
    return own if array.is_guest(job) else Queue()


def _home(machine: Machine, array: WholeJob) -> Queue:
    """Return the queue of the job's base blocks; if all its tasks are guests by now, read it from the database."""
    if array.is_guest(array.home):
        known = machine.store.jobs([array.job_id]).get(array.job_id)
        if known is not None:
            return Queue(known.partition, known.qos, known.account, licenses=known.licenses)
    return Queue.of(array.home)


def _limit_s(job: SlurmJob, own: Queue, most_s: float, wait_s: float) -> float:
    """Return a guest's time limit in seconds; 0 for none. `most_s` is the time until a reservation.

    A guest gets the base blocks' limit if this is at most `most_s`. Otherwise it gets `most_s - wait_s`, so that it may
    wait in the queue; a present limit close to that is kept.
    """
    wanted = own.time_limit_s or math.inf
    if wanted <= most_s:
        return 0.0 if math.isinf(wanted) else wanted
    if 0.0 < job.time_limit_s <= most_s <= job.time_limit_s + 2.0 * wait_s + 60.0:
        return job.time_limit_s
    return max(60.0, most_s - wait_s)


def _prepared(machine: Machine, resize: ResizeRecord, array: WholeJob) -> bool:
    """Tell whether all waiting tasks are held, and the joining tasks have their shape, kind and queue."""
    if not resize.added:
        return True
    for task, shape in resize.added:
        job, queue = array.tasks[task], _queue(machine, resize, array, task)
        if not (job.pending and job.held and job.has_shape(shape) and job.kind == resize.new_kind):
            return False
        if any(queue.other_than(job)):
            return False
    return not _unheld(resize, array) and not _throttled(array)


def _unheld(resize: ResizeRecord, array: WholeJob) -> list[int]:
    tasks = ({*resize.held} | dict(resize.added).keys()) & array.tasks.keys()
    return sorted(task for task in tasks if array.tasks[task].pending and not array.tasks[task].held)


def _throttled(array: WholeJob) -> bool:
    return any(job.throttle for job in array.tasks.values())


def _released_by_owner(array: WholeJob) -> bool:
    """Tell whether a task that never ran is pending and not held. Then its owner released it after the plan, and Slurm
    may start it before the order is written."""
    return any(task and job.pending and not job.held and not job.restart for task, job in array.tasks.items())


def _unfit(resize: ResizeRecord, array: WholeJob) -> Reason | None:
    """Return the reason why a joining block cannot be prepared; None if each can."""
    for task, _ in resize.added:
        job = array.tasks.get(task)
        if job is None:
            return reason("block_unknown", task=task)
        if job.admin_held:
            return reason("block_held", task=task)
        if not job.pending and not has_left(job):
            return reason("block_taken", task=task)
    return _elsewhere(resize, array)


def _elsewhere(resize: ResizeRecord, array: WholeJob) -> Reason | None:
    waiting = (job for task, _ in resize.added if (job := array.tasks.get(task)) is not None and job.pending)
    if all(job.shares_partition(array.home) or array.is_guest(job) for job in waiting):
        return None
    return reason("blocks_differ", what="partition")


def _held_by_others(machine: Machine, resize: ResizeRecord, array: WholeJob) -> set[int]:
    """Return the tasks that somebody else held between the plan and the resize's first step; none at later steps."""
    if resize.id not in machine.new or resize.state != State.PREPARING.value:
        return set()
    return {task for task in resize.held if (job := array.tasks.get(task)) is not None and job.held}


# -- there -------------------------------------------------------------------------------------------------------------


def _opening(machine: Machine, resize: ResizeRecord, array: WholeJob) -> ResizeRecord:
    why = machine.hindered(resize, array) or _elsewhere(resize, array) or _lacks_base(machine, resize, array)
    why = why or _order_blocks(machine, resize, array)
    if why is not None:
        return _turn(machine, resize, why)
    ours = [(task, job) for task, job in _joining_jobs(resize, array) if job.pending and job.held]
    if closed := [task for task, job in ours if not job.admin_held]:
        if not machine.due(resize):
            return resize
        for task in closed:
            job = array.tasks[task]
            try:
                # Slurm delays the start of a requeued task. A launcher without a companion delays the next base block.
                machine.release(Task(array.job_id, task), now=job.restart > 0 or job.eligible_time > machine.clock())
            except Refused as error:
                return _turn(machine, resize, reason("release_refused", answer=str(error)))
    # Leaving blocks have as long as a checkpoint may take.
    deadline = machine.deadline(State.JOINING if resize.added else State.DRAINING)
    return machine.move(resize, State.JOINING, deadline=deadline)


def _lacks_base(machine: Machine, resize: ResizeRecord, array: WholeJob) -> Reason | None:
    """Return a reason if a base block has ended since the plan, so that a joining guest would replace it; else None."""
    known = machine.store.jobs([array.job_id]).get(array.job_id) if resize.guests else None
    if known is None:
        return None
    staying = (array.tasks[task] for task in _training(resize, array, _newest(machine, array)) - {*resize.dropped})
    base = sum(machine.gpus_of(job) for job in staying if not (job.ended or array.is_guest(job)))
    base += sum(shape.gpus for task, shape in resize.added if task not in resize.guests)
    guests = (shape.gpus for task, shape in resize.added if task in resize.guests)
    return reason("base_ended") if any(base + gpus <= known.requested_shape.gpus for gpus in guests) else None


def _order_blocks(machine: Machine, resize: ResizeRecord, array: WholeJob) -> Reason | None:
    """Write the order to train with the new blocks, unless it is written already. Return the reason if it cannot be
    written.

    The order must be written before the blocks are released: each reads it at its start.
    """
    if machine.orders.last_number(array) >= (resize.order_number or 0):
        return None
    seen = _newest(machine, array)
    dropped = {*resize.dropped}
    staying = _with_base(machine, array, _training(resize, array, seen) - dropped) - dropped
    blocks = staying | dict(resize.added).keys()
    if not blocks:
        return reason("blocks_not_ready")
    try:
        _order(machine, resize, array, seen, blocks, resize.new_batch, resize.order_number or 0)
    except OrderError as error:
        return reason("order_not_written", problem=str(error))
    return None


def _joining_jobs(resize: ResizeRecord, array: WholeJob) -> list[tuple[int, SlurmJob]]:
    return [(task, array.tasks[task]) for task, _ in resize.added if task in array.tasks]


def _joining(machine: Machine, resize: ResizeRecord, array: WholeJob) -> ResizeRecord:
    if _joined(resize, array, _newest(machine, array)):
        return machine.move(resize, State.LEAVING)
    why = machine.hindered(resize, array) or _elsewhere(resize, array) or _never_joins(machine, resize, array)
    return _turn(machine, resize, why) if why is not None else resize


def _never_joins(machine: Machine, resize: ResizeRecord, array: WholeJob) -> Reason | None:
    """Return the reason why the joining blocks will never train with the job's other blocks; None if they still may."""
    late, now = machine.late(resize), machine.clock()
    waiting, since = not resize.added, 0.0
    for task, _ in resize.added:
        job = array.tasks.get(task)
        if job is None:
            return reason("block_unknown", task=task)
        # This is checked before a hold, since Slurm itself holds a job that it can never start.
        if job.pending and job.never_starts:
            return reason("never_starts", cause=job.reason)
        if job.limited:
            return reason("limit_reached", cause=job.reason)
        released = machine.store.resize_steps(resize.id)[-1].time
        if may_be_ours(job) and forgot_release(machine.client, released, job, machine.seen):
            return reason("block_release_forgotten", task=task)
        if job.pending and job.held:
            jobs = _joining_jobs(resize, array)
            return held_by_others([one for one, its in jobs if its.held and not its.never_starts])
        if job.state is JobState.PREEMPTED:
            return reason("block_preempted", task=task)
        if job.ended or job.completing:
            return reason("block_ended", task=task, state=job.state.value)
        waiting, since = waiting or job.pending, max(since, job.start_time)
    if waiting and late:
        given = machine.settings.blocks_wait_s
        return reason("queued_too_long", seconds=given) if resize.added else reason("blocks_not_joined")
    # If this clock is behind Slurm's, a start seems to be in the future. Then the whole wait counts.
    if not waiting and (now > since + machine.settings.start_timeout_s or (late and now < since)):
        return reason("blocks_not_joined")
    return None


def _leaving(machine: Machine, resize: ResizeRecord, array: WholeJob) -> ResizeRecord:
    if resize.back:
        return _withdrawing(machine, resize, array)
    seen = machine.reports.membership(array, resize.order_number)
    resize, left = _put_back(machine, resize, array, resize.dropped)
    if left and not machine.late(resize):
        return resize
    why = reason("blocks_linger", task=min(left)) if left else reason("blocks_train")
    return machine.move(resize, State.DONE, why, pause_s=seen.report.pause_s if seen is not None else None)


# -- back --------------------------------------------------------------------------------------------------------------


def _turn(machine: Machine, resize: ResizeRecord, why: Reason) -> ResizeRecord:
    # Blocks that start learn only after this that they are not wanted.
    return machine.move(resize, State.LEAVING, why, back=True, deadline=machine.deadline(State.STARTING))


def _withdrawing(machine: Machine, resize: ResizeRecord, array: WholeJob) -> ResizeRecord:
    number, last = resize.order_number or 0, machine.orders.last_number(array)
    seen = _newest(machine, array)
    joined = last >= number and _joined(resize, array, seen)
    # If all training blocks are gone, the running ones go on, even those that were to join; else those that may start.
    training = _training(resize, array, seen) or _running(array) or _to_start(resize, array)
    training = _with_base(machine, array, training)
    stands = False
    try:
        if seen is not None and joined and last > number:
            # The job got the order before it could be cancelled. So it is ordered to do what it does already.
            running = ({*seen.blocks, *dict(resize.added)} - {*resize.dropped}) & _running(array)
            _order(machine, resize, array, seen, running, resize.new_batch, machine.orders.next_number(array))
        elif not joined and last == number:
            _order(machine, resize, array, seen, training, resize.old_batch, machine.orders.next_number(array))
    except OrderError as error:
        log.warning("job %d: the order to train with new blocks could not be cancelled: %s", resize.job_id, error)
        stands = True
    if joined:
        return machine.move(resize, State.LEAVING, reason("blocks_joined"), back=False)
    # If some blocks had joined already they stay, and the blocks that they replaced are gone.
    tasks = [task for task in (*dict(resize.added), *resize.dropped) if task not in training]
    # Tasks that the companion holds must be stored even if the job never reports that they left, or is stopped right
    # after. Tasks that it does not hold must be removed, since their owner may hold them later.
    loose = {task for task in resize.held if (job := array.tasks.get(task)) and job.pending and not job.held}
    resize = _note_held(machine, resize, (({*resize.held} - loose) | {*dict(resize.added)}) - training)
    resize, left = _put_back(machine, resize, array, tasks)
    if (left or stands) and not machine.late(resize):
        return resize
    # The reason is the one stored when the resize turned back.
    why = next(step.detail for step in machine.store.resize_steps(resize.id) if step.back)
    return machine.move(resize, State.ROLLED_BACK, why)


def _note_held(machine: Machine, resize: ResizeRecord, tasks: set[int]) -> ResizeRecord:
    return resize if tasks == {*resize.held} else machine.store.note_held(resize.id, sorted(tasks))


# -- both --------------------------------------------------------------------------------------------------------------


def _put_back(
    machine: Machine, resize: ResizeRecord, array: WholeJob, tasks: Collection[int]
) -> tuple[ResizeRecord, list[int]]:
    """Hold the tasks that no longer run, for later use. Return the resize and the tasks that still run.

    Failed tasks and tasks that Slurm forgot are skipped. If the job has no other live block, a pending task is not
    held, but stored as released. Each hold is stored before it is set, so any other hold is the owner's or an
    operator's.
    """
    left = []
    others = (job for task, job in array.tasks.items() if task not in tasks and not job.ended)
    alone = all(job.pending and job.held for job in others)
    unheld = {task for task in tasks if (job := array.tasks.get(task)) and not (job.pending and job.held)}
    loose = {task for task in unheld if alone and array.tasks[task].pending and not array.tasks[task].completing}
    let_go = ({*resize.let_go} - unheld) | loose
    if let_go != {*resize.let_go}:
        resize = machine.store.note_let_go(resize.id, sorted(let_go))
    for task in tasks:
        job = array.tasks.get(task)
        if job is None or (job.ended and not has_left(job)) or (job.pending and job.held) or task in loose:
            continue
        if job.completing or not (job.pending or job.ended):
            left.append(task)
            continue
        resize = _note_held(machine, resize, {*resize.held, task})
        try:
            if job.pending:
                machine.client.hold(Task(array.job_id, task))
            elif machine.wanted(array):
                machine.client.reuse(Task(array.job_id, task))
        except Refused as error:
            log.info("block %s: it could not be held for later use: %s", Task(array.job_id, task), error)
            if job.pending:
                left.append(task)  # the task has probably started
    return resize, left


def _newest(machine: Machine, array: WholeJob) -> Membership | None:
    found = machine.reports.membership(array)
    return found.report if found is not None else None


def _joined(resize: ResizeRecord, array: WholeJob, seen: Membership | None) -> bool:
    """Tell whether the change has happened: all joining blocks run, and `seen`, the job's newest membership, has them
    and no leaving block. Restart counts must be Slurm's.

    An older membership suffices once one of its leaving base blocks has completed: that happens only after the joining
    blocks train.
    """
    if seen is None:
        return False
    restarts = dict(zip(seen.blocks, seen.restarts, strict=False))
    joining = [array.tasks.get(task) for task, _ in resize.added]
    if not all(job is not None and job.running for job in joining):
        return False
    # A base block leaves only after the others have joined, while a preempted guest may end at any time. The report is
    # not believed if clocks are hours apart.
    base = (job for task in resize.dropped if (job := array.tasks.get(task)) and not array.is_guest(job))
    gone = (job for job in base if job.state is JobState.COMPLETED)
    if any(restarts.get(task_of(job)) == job.restart for job in gone):
        return True
    reported = all(job is not None and restarts.get(task_of(job)) == job.restart for job in joining)
    return reported and restarts.keys().isdisjoint(resize.dropped)


def _training(resize: ResizeRecord, array: WholeJob, seen: Membership | None) -> set[int]:
    """Return the tasks that train together: the live tasks of `seen`, the newest membership, except joining blocks that
    Slurm has restarted since. If none is left, return the running tasks that are not joining."""
    alive, running = {task: job for task, job in array.tasks.items() if is_alive(job)}, _running(array)
    starts = dict(zip(seen.blocks, seen.restarts, strict=False)) if seen is not None else {}
    same = {task for task in starts.keys() & alive if starts[task] == alive[task].restart}
    joining = dict(resize.added).keys()
    members = (starts.keys() & alive) - (joining - same)
    if members and not same & running:
        return members | running
    return members or running - joining


def _with_base(machine: Machine, array: WholeJob, training: set[int]) -> set[int]:
    known = machine.store.jobs([array.job_id]).get(array.job_id) if training & array.guests else None
    return with_base(array, training, known.requested_shape.gpus, machine.gpus_of) if known is not None else training


def _to_start(resize: ResizeRecord, array: WholeJob) -> set[int]:
    waiting = {task for task, job in array.tasks.items() if job.pending and not job.held}
    return waiting - dict(resize.added).keys() or waiting


def _running(array: WholeJob) -> set[int]:
    return {task for task, job in array.tasks.items() if job.running}


def _order(
    machine: Machine,
    resize: ResizeRecord,
    array: WholeJob,
    seen: Membership | None,
    blocks: Collection[int],
    batch: int | None,
    number: int,
) -> None:
    leader = array.tasks.get(seen.blocks[0]) if seen is not None and seen.blocks else None
    gain = machine.gains.get(resize.id) if number == resize.order_number else None
    order = Order(number, resize.restart, batch, blocks=array.base_first(blocks) or None, gain=gain)
    machine.orders.write(array, order, wake=leader if leader is not None and leader.running else array.first)


BLOCK_HANDLERS: dict[State, Callable[[Machine, ResizeRecord, WholeJob], ResizeRecord]] = {
    State.PREPARING: _preparing,
    State.OPENING: _opening,
    State.JOINING: _joining,
    State.LEAVING: _leaving,
}

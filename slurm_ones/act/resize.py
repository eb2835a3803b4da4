"""Resizes by a requeue, as durable state machines. Only resizes change jobs' shapes.

Each state is stored before its action is done (transitions.py), and each action can be repeated. After a crash the next
companion reads the job from Slurm and continues. A job's own reports are trusted only for the fact that its checkpoint
is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ones_db import ResizeRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import DRAIN_WAIT_S, Order
from slurm_ones.act.arrays import job_of
from slurm_ones.act.blocks import advance_blocks
from slurm_ones.act.holds import forgot_release, in_our_hold, may_be_ours
from slurm_ones.act.machine import ASK_AGAIN_S, Machine
from slurm_ones.act.orders import OrderError
from slurm_ones.act.transitions import Stage, State
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.rules.blocks import BLOCKS, REQUEUE
from slurm_ones.rules.gate import kind_of_target, target_of
from slurm_ones.slurm.client import Refused, UnknownJob
from slurm_ones.untrusted_files import NoAnswer

log = logging.getLogger(__name__)

AT_ONCE_S = 3.0
"""Seconds up to which an earliest start in the future counts as now (Slurm 22.05 sets it a little ahead)."""


class ResizeMachine(Machine):
    """Machine that advances resizes by requeue and by blocks."""

    def advance(self, resize: ResizeRecord) -> ResizeRecord:
        """Advance the resize as far as possible now; return its record. Raises `Unreachable`, never `Refused`."""
        while not State(resize.state).final:
            before = Stage.of(resize)
            try:
                resize = ADVANCE[resize.mechanism](self, resize)
            except Refused as error:
                # The next look tries again. Other jobs' resizes must not wait for it.
                log.error("job %d: %s: %s", resize.job_id, before, error)
                break
            except NoAnswer as error:
                # The resize stays as it is until the deadline of its state.
                log.info("job %d: %s: %s", resize.job_id, before, error)
                break
            if Stage.of(resize) == before:
                break
        return resize


def _advance_requeue(machine: Machine, resize: ResizeRecord) -> ResizeRecord:
    try:
        job = job_of(machine.client, resize)
    except UnknownJob:
        return machine.move(resize, State.ENDED, reason("job_unknown"))
    if machine.is_another(job):
        return machine.move(resize, State.ENDED, reason("job_unknown"))
    if job.ended:
        return machine.move(resize, State.ENDED, reason("job_ended", state=job.first.state.value))
    state = State(resize.state)
    if job.first.completing and resize.restart >= 0 and state is not State.DRAINING:
        return resize
    forgot, released = _forgot_requeue(machine, resize, job), state in (State.WAITING, State.STARTING)
    # A shape that was set since is forgotten too.
    again = forgot and (released or state is State.RELEASING)
    if again or (released and (in_our_hold(job.first, resize) or _is_held_again(machine, resize, job))):
        return machine.move(resize, State.RESHAPING, reason("release_forgotten"))
    if forgot:
        if machine.due(resize):
            machine.client.requeue_hold(job.key)
        return resize
    return HANDLERS[state](machine, resize, job)


def _forgot_requeue(machine: Machine, resize: ResizeRecord, job: WholeJob) -> bool:
    """Tell whether Slurm forgot that the job was requeued: it shows the old run, although the job waited since or the
    run reported its end. A held run does not count."""
    if not job.running or job.held or job.restart != resize.restart or job.first.start_time > resize.started:
        return False
    if State(resize.state) is State.REQUEUING:
        return machine.reports.gone(job, resize.restart)
    return State(resize.state) is not State.DRAINING


def _is_held_again(machine: Machine, resize: ResizeRecord, job: WholeJob) -> bool:
    if not may_be_ours(job.first):
        return False
    steps = machine.store.resize_steps(resize.id)
    held = any(step.state == State.HOLDING for step in steps)
    return held and forgot_release(machine.client, steps[-1].time, job.first, machine.seen)


# -- the drain ---------------------------------------------------------------------------------------------------------


def _draining(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    assert resize.order_number is not None
    if job.pending or job.restart != resize.restart:
        return _cancel_drain(machine, resize, job, reason("run_ended"))
    if machine.other_order(job) > resize.order_number:
        return machine.move(resize, State.ABANDONED, reason("other_companion"))
    if (why := machine.hindered(resize, job)) is not None:
        return _cancel_drain(machine, resize, job, why)
    if job.held:
        # Somebody else holds the job for its next start. After a requeue this hold would look like the companion's, and
        # be lifted.
        return _cancel_drain(machine, resize, job, reason("held_while_running"))
    # After a restart of the companion the order may be written already, or cancelled.
    if machine.due(resize, once=True) and machine.orders.last_number(job) < resize.order_number:
        gain = machine.gains.get(resize.id)
        order = Order(resize.order_number, resize.restart, resize.new_batch, drain=True, gain=gain)
        try:
            machine.orders.write(job, order, wake=job.first)
        except OrderError as error:
            return machine.move(resize, State.ABANDONED, reason("order_not_written", problem=str(error)))
    drained = machine.drained(resize, job)
    if drained is not None:
        # A job that has waited for nearly its whole minute is about to train on, and is left to do so.
        return machine.move(resize, State.REQUEUING, deadline=drained + DRAIN_WAIT_S - ASK_AGAIN_S)
    if machine.late(resize):
        return _cancel_drain(machine, resize, job, reason("no_checkpoint"))
    return resize


def _requeuing(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    if job.pending:
        if not job.held:
            return _cancel_drain(machine, resize, job, reason("released_before_reshape"))
        return machine.move(resize, State.PARKING if target_of(resize) == PARKED else State.RESHAPING)
    if job.restart != resize.restart:
        return _cancel_drain(machine, resize, job, reason("started_before_reshape"))
    if machine.late(resize) or machine.drained(resize, job) is None:
        return _cancel_drain(machine, resize, job, reason("not_requeued_in_time"))
    if machine.orders.last_number(job) > (resize.order_number or 0):
        # An earlier companion cancelled the drain, and died or could not store it.
        return machine.move(resize, State.ABANDONED, reason("drain_cancelled"))
    if (why := machine.hindered(resize, job)) is not None:
        return _cancel_drain(machine, resize, job, why)
    if job.held:
        return _cancel_drain(machine, resize, job, reason("held_while_running"))
    if job.running and machine.due(resize):
        try:
            machine.client.requeue_hold(job.key)
        except Refused as error:
            return _cancel_drain(machine, resize, job, reason("requeue_refused", answer=str(error)))
    return resize


def _cancel_drain(machine: Machine, resize: ResizeRecord, job: WholeJob, why: Reason) -> ResizeRecord:
    if machine.other_order(job) > (resize.order_number or 0):
        return machine.move(resize, State.ABANDONED, reason("other_companion"))  # the job follows that order
    _order_batch(machine, job, resize.restart, resize.old_batch)
    return machine.move(resize, State.ABANDONED, why)


def _order_batch(machine: Machine, job: WholeJob, restart: int, batch: int | None) -> None:
    try:
        machine.orders.write(job, Order(machine.orders.next_number(job), restart, batch), wake=job.first)
    except OrderError as error:
        log.warning("job %d: its old batch could not be ordered: %s", job.job_id, error)


# -- in a hold ---------------------------------------------------------------------------------------------------------


def _parking(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    if job.held and job.first.admin_held:
        return _finish(machine, resize, job)
    if job.held:
        if not machine.wanted(job):
            return machine.move(resize, State.RELEASING, reason("switched_off"), back=True)
        if machine.due(resize):
            try:
                # The order matters: a job that is released first could start before it is deferred.
                machine.deferrals.defer(job)
                machine.client.release(job.key, start_now=False)
            except Refused as error:
                return machine.move(resize, State.RELEASING, reason("defer_refused", answer=str(error)), back=True)
        return _handle_if_released(machine, resize)
    if machine.deferrals.ours(job):
        return machine.move(resize, State.DONE, reason("parked"))
    return machine.move(resize, State.RELEASING, reason("released_before_parking"), back=True)


def _holding(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    first = resize.id in machine.new and not resize.back
    machine.new.discard(resize.id)
    if first and job.pending and (job.held or any(block.pending and block.held for block in job.blocks)):
        # Neither the job nor a block was held when this was decided, so the owner has held it since.
        return machine.move(resize, State.ABANDONED, reason("held_by_owner"))
    if not job.pending:
        if resize.back:
            # The job runs at the new shape after all.
            return machine.move(resize, State.RELEASING, back=False)
        why = reason("started_before_reshape")
        # A hold that came too late must not outlast this run: it would take effect at the next requeue.
        return machine.move(resize, State.RELEASING if job.held else State.ABANDONED, why, back=job.held)
    if job.held:
        return machine.move(resize, State.RESHAPING)
    if (why_not := machine.hindered(resize, job)) is not None:
        return machine.move(resize, State.ABANDONED, why_not)
    if machine.due(resize):
        try:
            machine.client.hold(job.key)
        except Refused as error:
            return machine.move(resize, State.RELEASING, reason("hold_refused", answer=str(error)), back=True)
    return resize


def _reshaping(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    why = machine.hindered(resize, job)
    try:
        if why is None:
            _reshape(machine, resize, job)
            return machine.move(resize, State.RELEASING)
    except Refused as error:
        why = reason("old_shape_refused" if resize.back else "shape_refused", answer=str(error))
    # The job is not held until the old shape is accepted. That is tried again while it waits.
    return machine.move(resize, State.RELEASING if resize.back else State.RESHAPING, why, back=True)


def _reshape(machine: Machine, resize: ResizeRecord, job: WholeJob) -> None:
    """Ask Slurm for the shape after the resize, and for the kind of GPU if it changes. In a roll-back, order the old
    batch too. Raises `Refused`."""
    if resize.back and resize.restart >= 0:
        _order_batch(machine, job, resize.restart + 1, resize.old_batch)
    kind = None if resize.old_kind == resize.new_kind else kind_of_target(resize)
    machine.client.reshape(job.key, target_of(resize), kind=kind)
    machine.ask_for_few_switches(job, target_of(resize))


# -- released ----------------------------------------------------------------------------------------------------------


def _releasing(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    if job.held and job.first.never_starts and not resize.back:
        return machine.move(resize, State.RESHAPING, reason("never_starts", cause=job.first.reason), back=True)
    if job.held and job.first.admin_held:
        return _wait_at_old_shape(machine, resize, reason("held_by_operator"))
    if job.held:
        if machine.just_requeued(resize, job):
            return resize
        try:
            # A running job is released too: a hold that came too late would take effect at the next requeue.
            if machine.due(resize):
                # The `--begin` of a job that was waiting stays.
                machine.release(job.key, now=job.pending and resize.restart >= 0)
            return _handle_if_released(machine, resize)
        except UnknownJob:
            return resize
        except Refused as error:
            if resize.back:
                raise
            # Slurm may have taken a shape that it reported as refused. A companion that died then left the job with it.
            return machine.move(resize, State.RESHAPING, reason("release_refused", answer=str(error)), back=True)
    if job.pending:
        machine.deferrals.release(job)
    return machine.move(resize, State.WAITING if job.pending else State.STARTING)


def _handle_if_released(machine: Machine, resize: ResizeRecord) -> ResizeRecord:
    fresh = job_of(machine.client, resize)
    return resize if fresh.held else HANDLERS[State(resize.state)](machine, resize, fresh)


def _wait_at_old_shape(machine: Machine, resize: ResizeRecord, why: Reason) -> ResizeRecord:
    """Roll back because the job waits for something other than free GPUs: Slurm does not show whether it could start at
    the new shape."""
    return machine.move(resize, State.WAITING, why, back=True)


def _waiting(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    if job.running:
        return machine.move(resize, State.STARTING)
    if resize.back:
        return _waiting_back(machine, resize, job)
    # This is checked before a hold: Slurm itself holds a job that it can never start, and nobody else would release it.
    if job.first.never_starts:
        return machine.move(resize, State.HOLDING, reason("never_starts", cause=job.first.reason), back=True)
    if job.held:
        return _wait_at_old_shape(machine, resize, reason("held_by_owner"))
    if job.first.limited and (resize.restart >= 0 or resize.new_shape.gpus > resize.old_shape.gpus):
        return machine.move(resize, State.HOLDING, reason("limit_reached", cause=job.first.reason), back=True)
    late = machine.late(resize)
    if resize.restart < 0:
        # Nothing of a waiting job is interrupted. It may wait on once Slurm has considered its new shape.
        if job.eligible_time > machine.clock() + AT_ONCE_S or job.first.reason == "Dependency":
            return _wait_at_old_shape(machine, resize, reason("waits_for_other"))
        # A job that waits only for its start time shows that this clock is ahead of Slurm's, which has not considered
        # it yet.
        if (late and job.first.reason != "BeginTime") or job.first.reason not in ("", "None", "BeginTime"):
            return _finish(machine, resize, job)
    if late:
        why = reason("queued_too_long", seconds=machine.settings.max_wait_s)
        return machine.move(resize, State.HOLDING, why, back=True)
    return resize


def _waiting_back(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    late = machine.late(resize)
    steps = machine.store.resize_steps(resize.id) if job.pending and job.first.never_starts else ()
    if steps and not any(step.back and step.state == State.RESHAPING for step in steps):
        # Slurm held the job because of the new shape between two looks. It is reshaped once only, since the old shape
        # may never start either.
        return machine.move(resize, State.RESHAPING, reason("never_starts", cause=job.first.reason), back=True)
    if job.pending and _to_put_back(resize, job):
        # Slurm refused the old shape a moment ago, or was not asked for it yet.
        if machine.due(resize):
            try:
                _reshape(machine, resize, job)
            except Refused as error:
                log.warning("job %d: the old shape was refused: %s", job.job_id, error)
            else:
                return _waiting(machine, resize, job_of(machine.client, resize))
        if not late:
            return resize
    return _finish(machine, resize, job) if resize.restart < 0 or job.held or late else resize


def _starting(machine: Machine, resize: ResizeRecord, job: WholeJob) -> ResizeRecord:
    if resize.restart < 0:
        return _finish(machine, resize, job)
    pause = machine.reports.restarted(job, resize.restart)
    over = pause is not None or not job.running or machine.late(resize)
    return _finish(machine, resize, job, pause_s=pause) if over else resize


# -- the end -----------------------------------------------------------------------------------------------------------


def _finish(machine: Machine, resize: ResizeRecord, job: WholeJob, *, pause_s: float | None = None) -> ResizeRecord:
    """End the resize: as done if Slurm shows the new shape, else as rolled back. `pause_s` is the training pause that
    the requeued job reported."""
    # A job that was to be parked keeps its shape. If it comes here, it was released instead.
    done = resize.new_shape != PARKED and _at(resize, job, resize.new_shape, resize.new_kind)
    at = "its new shape" if done else "its old shape" if _at_old(resize, job) else "another shape"
    now = "waits" if job.pending else "runs"
    if job.held:
        said = reason("stands_held", now=now, shape=at, holder="an operator" if job.first.admin_held else "its owner")
    elif State(resize.state) is State.STARTING and resize.restart >= 0 and pause_s is None:
        said = reason("stands_no_start_report" if job.running else "stands_run_ended", now=now, shape=at)
    else:
        said = reason("stands", now=now, shape=at)
    return machine.move(resize, State.DONE if done else State.ROLLED_BACK, said, pause_s=pause_s)


def _at(resize: ResizeRecord, job: WholeJob, shape: Shape, kind: str) -> bool:
    return job.first.has_shape(shape) and (resize.old_kind == resize.new_kind or job.first.kind == kind)


def _at_old(resize: ResizeRecord, job: WholeJob) -> bool:
    return _at(resize, job, resize.old_shape, resize.old_kind)


def _to_put_back(resize: ResizeRecord, job: WholeJob) -> bool:
    if _at_old(resize, job):
        return False
    if resize.old_kind == resize.new_kind:
        return job.first.has_shape(resize.new_shape)
    shapes = job.first.has_shape(resize.new_shape) or job.first.has_shape(resize.old_shape)
    return shapes and job.first.kind in (resize.old_kind, resize.new_kind)


HANDLERS: dict[State, Callable[[Machine, ResizeRecord, WholeJob], ResizeRecord]] = {
    State.DRAINING: _draining,
    State.REQUEUING: _requeuing,
    State.PARKING: _parking,
    State.HOLDING: _holding,
    State.RESHAPING: _reshaping,
    State.RELEASING: _releasing,
    State.WAITING: _waiting,
    State.STARTING: _starting,
}
ADVANCE = {REQUEUE: _advance_requeue, BLOCKS: advance_blocks}

"""The resize: a durable state machine, and the only code that changes a job.

Each intent is in the database before it is acted on (transitions.py), and each action may be repeated: after a crash at
any point the machine looks at the job as Slurm holds it and goes on from there. What a job wrote is used for one
thing, to learn that its checkpoint is durable; lying about that harms the liar alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ones_db import ResizeRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import DRAIN_WAIT_S, Order
from slurm_ones.act.arrays import held_in_part, job_of
from slurm_ones.act.blocks import BLOCK_HANDLERS, advance_blocks
from slurm_ones.act.machine import Machine
from slurm_ones.act.orders import OrderError
from slurm_ones.act.stale_holds import forgotten, in_our_hold, may_be_ours
from slurm_ones.act.timing import ASK_AGAIN_S
from slurm_ones.act.transitions import State
from slurm_ones.rules.blocks import BLOCKS
from slurm_ones.rules.gate import kind_of_target, target_of
from slurm_ones.slurm.client import Refused, UnknownJob
from slurm_ones.slurm.model import Job

log = logging.getLogger(__name__)

AT_ONCE_S = 3.0
"""A job that was parked may start at once, which on Slurm 22.05 is two seconds from now."""

_RELEASED = {
    State.WAITING: State.RESHAPING,
    State.STARTING: State.RESHAPING,
    State.WAITING_BACK: State.RESHAPING_BACK,
    State.STARTING_BACK: State.RESHAPING_BACK,
}
"""States after a release, and where to begin again when Slurm forgets it."""


class ResizeMachine(Machine):
    """Carries resizes forward. `advance` may be called at any time, as often as one likes."""

    def advance(self, resize: ResizeRecord) -> ResizeRecord:
        """Take the resize as far as it goes now; returns how it stands. Raises `Unreachable`, and never `Refused`."""
        while not State(resize.state).final:
            before = resize.state
            try:
                resize = self._advance_once(resize)
            except Refused as error:
                # Looked at again next time; the others' resizes must not wait for it.
                log.error("job %d: %s: %s", resize.job_id, before, error)
                break
            if resize.state == before:
                break
        return resize

    def _advance_once(self, resize: ResizeRecord) -> ResizeRecord:
        if resize.mechanism == BLOCKS:
            return advance_blocks(self, resize, self._handle)
        try:
            job = job_of(self.client, resize)
        except UnknownJob:
            return self.move(resize, State.ENDED, reason("job_unknown"))
        if job.ended:
            return self.move(resize, State.ENDED, reason("job_ended", state=job.state.value))
        state = State(resize.state)
        if state in _RELEASED and (in_our_hold(job, resize) or self._is_held_again(resize, job)):
            return self.move(resize, _RELEASED[state], reason("release_forgotten"))
        return self._handle(resize, job)

    def _is_held_again(self, resize: ResizeRecord, job: Job) -> bool:
        """Whether a job that was held by its priority and then released stands in that hold, since Slurm forgot the
        release."""
        if not may_be_ours(job):
            return False
        steps = self.store.resize_steps(resize.id)
        held = any(step.state in (State.HOLDING, State.HOLDING_BACK) for step in steps)
        return held and forgotten(self.client, steps[-1].time)

    def _handle(self, resize: ResizeRecord, job: Any) -> ResizeRecord:
        """What the resize's state asks for, of the job as it is."""
        return HANDLERS[State(resize.state)](self, resize, job)

    def _draining(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        assert resize.order_number is not None
        if job.pending or job.restart != resize.restart:
            return self._cancel_drain(resize, job, reason("run_ended"))
        if self.rival(job) > resize.order_number:
            return self.move(resize, State.ABANDONED, reason("other_companion"))
        if (why := self.hindered(resize, job)) is not None:
            return self._cancel_drain(resize, job, why)
        if job.held:
            # Somebody else's, for its next start: once it is requeued it would pass for ours, and be lifted.
            return self._cancel_drain(resize, job, reason("held_while_running"))
        # After a restart of ours it may be there, or cancelled already.
        if self.times.due(resize, once=True) and self.orders.last_number(job) < resize.order_number:
            gain = self.gains.get(resize.id)
            order = Order(resize.order_number, resize.restart, resize.new_batch, drain=True, gain=gain)
            try:
                self.orders.write(job, order, wake=True)
            except OrderError as error:
                return self.move(resize, State.ABANDONED, reason("order_not_written", problem=str(error)))
        drained = self.reports.drained(job, resize.restart, resize.order_number)
        if drained is not None:
            # A job that has waited nearly its whole minute is about to train on: leave it to that.
            return self.move(resize, State.REQUEUING, deadline=drained + DRAIN_WAIT_S - ASK_AGAIN_S)
        if self.times.late(resize):
            return self._cancel_drain(resize, job, reason("no_checkpoint"))
        return resize

    def _requeuing(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.completing:
            return resize
        if job.pending:
            if not job.held:
                return self._cancel_drain(resize, job, reason("released_before_reshape"))
            return self.move(resize, State.PARKING if target_of(resize) == PARKED else State.RESHAPING)
        if job.restart != resize.restart:
            return self._cancel_drain(resize, job, reason("started_before_reshape"))
        if self.times.late(resize) or self.reports.drained(job, resize.restart, resize.order_number or 0) is None:
            return self._cancel_drain(resize, job, reason("not_requeued_in_time"))
        if self.orders.last_number(job) > (resize.order_number or 0):
            # A companion that died, or could not write it down, cancelled it.
            return self.move(resize, State.ABANDONED, reason("drain_cancelled"))
        if (why := self.hindered(resize, job)) is not None:
            return self._cancel_drain(resize, job, why)
        if job.held:
            return self._cancel_drain(resize, job, reason("held_while_running"))
        if job.running and self.times.due(resize):
            try:
                self.client.requeue_hold(job.key)
            except Refused as error:
                return self._cancel_drain(resize, job, reason("requeue_refused", answer=str(error)))
        return resize

    def _parking(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.held and job.admin_held:
            return self._finish(resize, job)
        if job.held:
            if not self.wanted(job):
                return self.move(resize, State.RELEASING_BACK, reason("switched_off"))
            if self.times.due(resize):
                try:
                    # In this order: a job that is released first could start in between.
                    self.deferrals.defer(job)
                    self.client.release(job.key, start_now=False)
                except Refused as error:
                    return self.move(resize, State.RELEASING_BACK, reason("defer_refused", answer=str(error)))
            return self._handle_if_released(resize, job)
        if self.deferrals.ours(job):
            return self.move(resize, State.DONE, reason("parked"))
        return self.move(resize, State.RELEASING_BACK, reason("released_before_parking"))

    def _holding(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        first = resize.id in self.new
        self.new.discard(resize.id)
        if first and job.pending and (job.held or held_in_part(self.client, resize, job)):
            # It was not when this was decided, and nobody else had a reason to.
            return self.move(resize, State.ABANDONED, reason("held_by_owner"))
        if not job.pending:
            if not job.held:
                return self.move(resize, State.ABANDONED, reason("started_before_reshape"))
            # A hold that came too late must not outlive this run: it would strike at its next requeue.
            return self.move(resize, State.RELEASING_BACK, reason("started_before_reshape"))
        if job.held:
            return self.move(resize, State.RESHAPING)
        if (why := self.hindered(resize, job)) is not None:
            return self.move(resize, State.ABANDONED, why)
        return self._hold(resize, job)

    def _reshaping(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if (why := self.hindered(resize, job)) is not None:
            return self.move(resize, State.RESHAPING_BACK, why)
        try:
            self._reshape(resize, job)
        except Refused as error:
            return self.move(resize, State.RESHAPING_BACK, reason("shape_refused", answer=str(error)))
        self.ask_for_few_switches(job, target_of(resize))
        return self.move(resize, State.RELEASING)

    def _releasing(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.held and job.never_starts:
            return self.move(resize, State.RESHAPING_BACK, reason("never_starts", cause=job.reason))
        try:
            return self._release(resize, job, State.WAITING, State.STARTING)
        except UnknownJob:
            return resize
        except Refused as error:
            # Slurm may have taken a shape that it refused; a companion that died then left the job with it.
            return self.move(resize, State.RESHAPING_BACK, reason("release_refused", answer=str(error)))

    def _waiting(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.running:
            return self.move(resize, State.STARTING, deadline=self.times.start_deadline)
        # Before a hold: Slurm itself holds what it will never start, and nobody else would let it go.
        if job.never_starts:
            return self.move(resize, State.HOLDING_BACK, reason("never_starts", cause=job.reason))
        if job.held:
            return self._wait_at_old_shape(resize, reason("held_by_owner"))
        late = self.times.late(resize)
        if resize.restart < 0:
            # Nothing of a job that waited is interrupted: it may wait on, once Slurm has had a look at its new shape.
            if job.eligible_time > self.clock() + AT_ONCE_S or job.reason == "Dependency":
                return self._wait_at_old_shape(resize, reason("waits_for_other"))
            if late or job.reason not in ("", "None", "BeginTime"):
                return self._finish(resize, job)
        if late:
            return self.move(resize, State.HOLDING_BACK, reason("queued_too_long", seconds=self.settings.max_wait_s))
        return resize

    def _starting(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if resize.restart < 0:
            return self._finish(resize, job)
        pause = self.reports.restarted(job, resize.restart)
        if pause is not None:
            return self._finish(resize, job, pause_s=pause)
        if not job.running:
            return self._finish(resize, job, remark="run_ended")
        if self.times.late(resize):
            return self._finish(resize, job, remark="no_start_report")
        return resize

    def _holding_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if not job.pending:
            # It started at the new shape after all.
            return self.move(resize, State.RELEASING)
        if job.held:
            return self.move(resize, State.RESHAPING_BACK)
        return self._hold(resize, job)

    def _reshaping_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        try:
            self._restore(resize, job)
        except Refused as error:
            # Not to be held for it: it is tried again of the job that waits.
            return self.move(resize, State.RELEASING_BACK, reason("old_shape_refused", answer=str(error)))
        return self.move(resize, State.RELEASING_BACK)

    def _releasing_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._release(resize, job, State.WAITING_BACK, State.STARTING_BACK)

    def _waiting_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.running:
            return self.move(resize, State.STARTING_BACK, deadline=self.times.start_deadline)
        late = self.times.late(resize)
        if job.pending and _to_put_back(resize, job):
            # Refused a moment ago, or not asked for yet.
            if self.times.due(resize):
                try:
                    self._restore(resize, job)
                except Refused as error:
                    log.warning("job %d: the old shape was refused: %s", job.job_id, error)
                else:
                    return self._handle(resize, job_of(self.client, resize))
            if not late:
                return resize
        if resize.restart < 0 or job.held or late:
            return self._finish(resize, job)
        return resize

    def _cancel_drain(self, resize: ResizeRecord, job: Job, why: Reason) -> ResizeRecord:
        """Tell a job that was drained to carry on as it was, at once rather than after its minute."""
        if self.rival(job) > (resize.order_number or 0):
            return self.move(resize, State.ABANDONED, reason("other_companion"))  # whose order it follows
        try:
            order = Order(self.orders.next_number(job), resize.restart, resize.old_batch)
            self.orders.write(job, order, wake=True)
        except OrderError as error:
            log.warning("job %d: the drain could not be cancelled: %s", job.job_id, error)
        return self.move(resize, State.ABANDONED, why)

    def _hold(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if self.times.due(resize):
            try:
                self.client.hold(job.key)
            except Refused as error:
                return self.move(resize, State.RELEASING_BACK, reason("hold_refused", answer=str(error)))
        return resize

    def _release(self, resize: ResizeRecord, job: Job, waiting: State, starting: State) -> ResizeRecord:
        if job.held and job.admin_held:
            return self._wait_at_old_shape(resize, reason("held_by_operator"))
        if job.held:
            if self.times.just_requeued(resize, job):
                return resize
            # Also a running job: a hold that came too late would strike at its next requeue.
            if self.times.due(resize):
                self._ask_to_release(resize, job)
            return self._handle_if_released(resize, job)
        if job.pending:
            self.deferrals.release(job)
            return self.move(resize, waiting, deadline=self.times.queue_deadline)
        return self.move(resize, starting, deadline=self.times.start_deadline)

    def _ask_to_release(self, resize: ResizeRecord, job: Job) -> None:
        # Slurm delays what was requeued, nothing else: a waiting job's own --begin stays.
        if self.settings.start_now and job.pending and resize.restart >= 0:
            try:
                self.client.release(job.key, start_now=True)
                return
            except Refused as error:
                log.info("job %d: it is released to start after Slurm's own delay: %s", job.job_id, error)
        self.client.release(job.key, start_now=False)

    def _handle_if_released(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        """After an action that takes effect at once: go on in this round if it did."""
        fresh = job_of(self.client, resize)
        return resize if fresh.held else self._handle(resize, fresh)

    def _wait_at_old_shape(self, resize: ResizeRecord, why: Reason) -> ResizeRecord:
        """For a job that waits for something else than room: Slurm does not say of it whether it would ever start at
        the new shape. Its hold, where it has one, is not ours and stays."""
        return self.move(resize, State.WAITING_BACK, why, deadline=self.times.queue_deadline)

    def _restore(self, resize: ResizeRecord, job: Job) -> None:
        """Its old batch and shape; raises `Refused` where Slurm does not take the shape."""
        if resize.restart >= 0:
            try:
                order = Order(self.orders.next_number(job), resize.restart + 1, resize.old_batch)
                self.orders.write(job, order, wake=True)
            except OrderError as error:
                log.warning("job %d: its batch could not be put back: %s", job.job_id, error)
        self._reshape(resize, job)
        self.ask_for_few_switches(job, target_of(resize))

    def _reshape(self, resize: ResizeRecord, job: Job) -> None:
        """Ask Slurm for the shape that the resize heads for, and for the kind of GPU where that changes."""
        kind = None if resize.old_kind == resize.new_kind else kind_of_target(resize)
        self.client.reshape(job.key, target_of(resize), kind=kind)

    def _finish(
        self, resize: ResizeRecord, job: Job, *, remark: str = "", pause_s: float | None = None
    ) -> ResizeRecord:
        """Close the resize by the shape that Slurm holds, whichever was asked for last. `remark` is what was odd."""
        new = resize.new_shape
        # A job that was to be parked keeps its shape: where it comes here, it was released instead.
        state = State.DONE if new != PARKED and _at_new(resize, job) else State.ROLLED_BACK
        at = "its old shape" if _at_old(resize, job) else "another shape"
        at = "its new shape" if state is State.DONE else at
        now = "waits" if job.pending else "runs"
        if job.held:
            why = reason("stands_held", now=now, shape=at, holder="an operator" if job.admin_held else "its owner")
        elif remark == "run_ended":
            why = reason("stands_run_ended", now=now, shape=at)
        elif remark:
            why = reason("stands_no_start_report", now=now, shape=at)
        else:
            why = reason("stands", now=now, shape=at)
        return self.move(resize, state, why, pause_s=pause_s)


def _is_at(resize: ResizeRecord, job: Job, shape: Shape, kind: str) -> bool:
    """Whether Slurm holds the job at that shape, and that kind of GPU where the resize changes it."""
    return job.has_shape(shape) and (resize.old_kind == resize.new_kind or job.kind == kind)


def _to_put_back(resize: ResizeRecord, job: Job) -> bool:
    """Whether Slurm holds what the resize asked for in place of what the job had, also where it took the shape or the
    kind of GPU alone. What is neither somebody else asked for."""
    if _at_old(resize, job):
        return False
    if resize.old_kind == resize.new_kind:
        return job.has_shape(resize.new_shape)
    shapes = job.has_shape(resize.new_shape) or job.has_shape(resize.old_shape)
    return shapes and job.kind in (resize.old_kind, resize.new_kind)


def _at_new(resize: ResizeRecord, job: Job) -> bool:
    return _is_at(resize, job, resize.new_shape, resize.new_kind)


def _at_old(resize: ResizeRecord, job: Job) -> bool:
    return _is_at(resize, job, resize.old_shape, resize.old_kind)


HANDLERS: dict[State, Callable[[ResizeMachine, ResizeRecord, Any], ResizeRecord]] = {
    State.DRAINING: ResizeMachine._draining,
    State.REQUEUING: ResizeMachine._requeuing,
    State.PARKING: ResizeMachine._parking,
    State.HOLDING: ResizeMachine._holding,
    State.RESHAPING: ResizeMachine._reshaping,
    State.RELEASING: ResizeMachine._releasing,
    State.WAITING: ResizeMachine._waiting,
    State.STARTING: ResizeMachine._starting,
    State.HOLDING_BACK: ResizeMachine._holding_back,
    State.RESHAPING_BACK: ResizeMachine._reshaping_back,
    State.RELEASING_BACK: ResizeMachine._releasing_back,
    State.WAITING_BACK: ResizeMachine._waiting_back,
    State.STARTING_BACK: ResizeMachine._starting,
    **BLOCK_HANDLERS,
}

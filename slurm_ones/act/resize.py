"""The resize: a durable state machine, and the only code that changes a job.

Each intent is in the database before it is acted on (states.py), and each action may be repeated: after a crash at
any point the machine looks at the job as Slurm holds it and goes on from there. What a job wrote is used for one
thing, to learn that its checkpoint is durable; lying about that harms the liar alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ones_db import ResizeRecord
from ones_wrapper.protocol import DRAIN_WAIT_S, Order
from slurm_ones.act.back import WayBack
from slurm_ones.act.orders import OrderError, last_number
from slurm_ones.act.stale_holds import in_our_hold
from slurm_ones.act.states import State
from slurm_ones.act.steps import ASK_AGAIN_S
from slurm_ones.rules.reserved import target_of
from slurm_ones.slurm.client import Refused, UnknownJob
from slurm_ones.slurm.model import PARKED, Job
from slurm_ones.slurm.reshape import never_starts

log = logging.getLogger(__name__)

_HELD = "it was held while it ran"
_LET_GO = {
    State.WAITING: State.RESHAPING,
    State.STARTING: State.RESHAPING,
    State.WAITING_BACK: State.RESHAPING_BACK,
    State.STARTING_BACK: State.RESHAPING_BACK,
}
"""States after a release, and where to begin again when it is forgotten."""
_AT_ONCE_S = 3.0
"""A job that was parked may start at once, which on Slurm 22.05 is two seconds from now."""


class Machine(WayBack):
    """Carries resizes forward. `advance` may be called at any time, as often as one likes."""

    def advance(self, resize: ResizeRecord) -> ResizeRecord:
        """Take the resize as far as it goes now; returns how it stands. Raises `Unreachable`, no other `SlurmError`."""
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
        try:
            job = self.client.job(resize.job_id)
        except UnknownJob:
            return self._end(resize, State.ENDED, "Slurm no longer knows the job")
        if job.ended:
            return self._end(resize, State.ENDED, f"the job is {job.state.value}")
        if State(resize.state) in _LET_GO and in_our_hold(job, resize):
            return self._to(resize, _LET_GO[State(resize.state)], "Slurm has forgotten that it was let go")
        return self._handle(resize, job)

    def _handle(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return _HANDLERS[State(resize.state)](self, resize, job)

    def _draining(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        assert resize.order_number is not None
        if job.pending or job.restart != resize.restart:
            return self._call_off(resize, job, "its run ended before it was drained")
        if not self.wanted(job):
            return self._call_off(resize, job, "resizing was switched off")
        if job.held:
            # Somebody else's, for its next start: once it is requeued it would pass for ours, and be lifted.
            return self._call_off(resize, job, _HELD)
        # After a restart of ours it may be there, or called off already.
        if self._due(resize, once=True) and last_number(job, self.spool) < resize.order_number:
            order = Order(resize.order_number, resize.restart, resize.new_batch, drain=True)
            try:
                self._order(job, order)
            except OrderError as error:
                return self._end(resize, State.ABANDONED, f"no order could be given: {error}")
        drained = self.reports.drained(job, resize.restart, resize.order_number)
        if drained is not None:
            # A job that has waited nearly its whole minute is about to train on: leave it to that.
            return self._to(resize, State.REQUEUING, deadline=drained + DRAIN_WAIT_S - ASK_AGAIN_S)
        if self._late(resize):
            return self._call_off(resize, job, "no checkpoint in time")
        return resize

    def _requeuing(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.completing:
            return resize
        if job.pending:
            if not job.held:
                return self._call_off(resize, job, "it was released before it could be reshaped")
            return self._to(resize, State.PARKING if target_of(resize) == PARKED else State.RESHAPING)
        if job.restart != resize.restart:
            return self._call_off(resize, job, "it was released and started before it could be reshaped")
        if self._late(resize) or self.reports.drained(job, resize.restart, resize.order_number or 0) is None:
            return self._call_off(resize, job, "it was not requeued in time and trains on")
        if last_number(job, self.spool) > (resize.order_number or 0):
            # A companion that died, or could not write it down, told the job to carry on.
            return self._end(resize, State.ABANDONED, "its drain was called off")
        if not self.wanted(job):
            return self._call_off(resize, job, "resizing was switched off")
        if job.held:
            return self._call_off(resize, job, _HELD)
        if job.running and self._due(resize):
            try:
                self.client.requeue_hold(job.job_id)
            except Refused as error:
                return self._call_off(resize, job, f"Slurm did not requeue it: {error}")
        return resize

    def _parking(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.held and job.admin_held:
            return self._settle(resize, job)
        if job.held:
            if not self.wanted(job):
                return self._to(resize, State.RELEASING_BACK, "resizing was switched off")
            if self._due(resize):
                try:
                    # In this order: a job that is let go first could start in between.
                    self.leases.grant(job)
                    self.client.release(job.job_id, start_now=False)
                except Refused as error:
                    return self._to(resize, State.RELEASING_BACK, f"Slurm did not defer it: {error}")
            return self._look_again(resize, job)
        if self.leases.ours(job):
            return self._end(resize, State.DONE, "it is parked")
        return self._to(resize, State.RELEASING_BACK, "it was released before it could be parked")

    def _holding(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if not job.pending:
            # A hold that came too late must not outlive this run: it would strike at its next requeue.
            return self._to(resize, State.RELEASING_BACK, "it started before it could be reshaped")
        if job.held:
            return self._to(resize, State.RESHAPING)
        if not self.wanted(job):
            return self._end(resize, State.ABANDONED, "resizing was switched off")
        return self._ask_to_hold(resize, job)

    def _reshaping(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if not self.wanted(job):
            return self._to(resize, State.RESHAPING_BACK, "resizing was switched off")
        try:
            self.client.reshape(job.job_id, target_of(resize))
        except Refused as error:
            return self._to(resize, State.RESHAPING_BACK, str(error))
        return self._to(resize, State.RELEASING)

    def _releasing(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        try:
            return self._release(resize, job, State.WAITING, State.STARTING)
        except UnknownJob:
            return resize
        except Refused as error:
            # Slurm may have taken a shape that it refused; a companion that died then left the job with it.
            return self._to(resize, State.RESHAPING_BACK, f"Slurm does not release it at this shape: {error}")

    def _waiting(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.running:
            return self._to(resize, State.STARTING, deadline=self.clock() + self.settings.start_timeout_s)
        if job.held:
            return self._give_back(resize, "held by its owner")
        if never_starts(job):
            return self._to(resize, State.HOLDING_BACK, f"Slurm never starts it at this shape: {job.reason}")
        late = self._late(resize)
        if resize.restart < 0:
            # Nothing of a job that waited is interrupted: it may wait on, once Slurm has had a look at its new shape.
            if job.eligible_time > self.clock() + _AT_ONCE_S or job.reason == "Dependency":
                return self._give_back(resize, "it waits for its earliest start, or for another job")
            if late or job.reason not in ("", "None", "BeginTime"):
                return self._settle(resize, job)
        if late:
            return self._to(resize, State.HOLDING_BACK, f"waited longer than {self.settings.max_wait_s:.0f} s")
        return resize

    def _starting(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._greet(resize, job)


_HANDLERS: dict[State, Callable[[Machine, ResizeRecord, Job], ResizeRecord]] = {
    State.DRAINING: Machine._draining,
    State.REQUEUING: Machine._requeuing,
    State.PARKING: Machine._parking,
    State.HOLDING: Machine._holding,
    State.RESHAPING: Machine._reshaping,
    State.RELEASING: Machine._releasing,
    State.WAITING: Machine._waiting,
    State.STARTING: Machine._starting,
    State.HOLDING_BACK: Machine._holding_back,
    State.RESHAPING_BACK: Machine._reshaping_back,
    State.RELEASING_BACK: Machine._releasing_back,
    State.WAITING_BACK: Machine._waiting_back,
    State.STARTING_BACK: Machine._starting_back,
}

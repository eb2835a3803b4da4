"""The resize: a durable state machine, and the only code that changes a job.

Each intent is in the database before it is acted on (states.py), and each action may be repeated: after a crash at
any point the machine looks at the job as Slurm holds it and goes on from there. What a job wrote is used for one
thing, to learn that its checkpoint is durable; lying about that harms the liar alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ones_db import ResizeRecord
from ones_wrapper.protocol import DRAIN_WAIT_S, Order
from slurm_ones.act.orders import OrderError, write_order
from slurm_ones.act.states import State
from slurm_ones.config import ResizeSettings
from slurm_ones.observe.reserve import target_of
from slurm_ones.slurm.client import SlurmClient, SlurmError, UnknownJob, Unreachable
from slurm_ones.slurm.model import Job, Shape
from slurm_ones.slurm.verify import has_shape

log = logging.getLogger(__name__)

ASK_AGAIN_S = 10.0
"""An action whose effect is not seen is repeated after this long."""


class Journal(Protocol):
    """What the machine needs of the database (`ones_db.Store` has it)."""

    def step_resize(
        self, resize_id: int, state: str, *, time: float, detail: str = "", deadline: float | None = None
    ) -> ResizeRecord: ...

    def end_resize(
        self, resize_id: int, state: str, outcome: str, time: float, pause_s: float | None = None
    ) -> ResizeRecord: ...


class Reports(Protocol):
    """What the machine needs to know of a job's reports."""

    def drained(self, job: Job, restart: int, order: int) -> float | None:
        """When the durable checkpoint that answers the drain order was reported, None while there is none."""

    def greeted(self, job: Job, after_restart: int) -> float | None:
        """Seconds that training stood still, once a run after `after_restart` said hello; None before."""


@dataclass
class Machine:
    """Carries resizes forward. `advance` may be called at any time, as often as one likes."""

    client: SlurmClient
    journal: Journal
    reports: Reports
    settings: ResizeSettings
    spool: Path | None
    clock: Callable[[], float]
    wanted: Callable[[Job], bool]
    """Whether a job is still to be resized: it has not opted out, and nobody stopped the companion's hand."""

    def __post_init__(self) -> None:
        self._asked: dict[tuple[int, State], float] = {}

    def advance(self, resize: ResizeRecord) -> ResizeRecord:
        """Take the resize as far as it goes now; returns how it stands. Raises `Unreachable`, no other `SlurmError`."""
        while not State(resize.state).final:
            before = resize.state
            try:
                resize = self._advance_once(resize)
            except Unreachable:
                raise
            except SlurmError as error:
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
        return _HANDLERS[State(resize.state)](self, resize, job)

    # -- going there ---------------------------------------------------------------------------------------------

    def _draining(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        assert resize.order_number is not None
        if job.pending or job.restart != resize.restart:
            return self._call_off(resize, job, "its run ended before it was drained")
        if not self.wanted(job):
            return self._call_off(resize, job, "resizing was switched off")
        if self._due(resize, once=True):
            order = Order(resize.order_number, resize.restart, resize.new_batch, drain=True)
            try:
                write_order(job, order, self.spool)
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
            return self._to(resize, State.RESHAPING)
        if job.restart != resize.restart:
            return self._call_off(resize, job, "it was released and started before it could be reshaped")
        if self._late(resize) or self.reports.drained(job, resize.restart, resize.order_number or 0) is None:
            return self._call_off(resize, job, "it was not requeued in time and trains on")
        if not self.wanted(job):
            return self._call_off(resize, job, "resizing was switched off")
        if job.running and self._due(resize):
            try:
                self.client.requeue_hold(job.job_id)
            except Unreachable:
                raise
            except SlurmError as error:
                return self._call_off(resize, job, f"Slurm did not requeue it: {error}")
        return resize

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
        except Unreachable:
            raise
        except SlurmError as error:
            return self._to(resize, State.RESHAPING_BACK, str(error))
        return self._to(resize, State.RELEASING)

    def _releasing(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        try:
            return self._release(resize, job, State.WAITING, State.STARTING)
        except (Unreachable, UnknownJob):
            raise
        except SlurmError as error:
            # Slurm may have taken a shape that it refused; a companion that died then left the job with it.
            return self._to(resize, State.RESHAPING_BACK, f"Slurm does not release it at this shape: {error}")

    def _waiting(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.running:
            return self._to(resize, State.STARTING, deadline=self.clock() + self.settings.start_timeout_s)
        if resize.restart < 0 or job.held:
            return self._settle(resize, job)
        if self._late(resize):
            return self._to(resize, State.HOLDING_BACK, f"waited longer than {self.settings.max_wait_s:.0f} s")
        return resize

    def _starting(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._greet(resize, job)

    # -- and back ------------------------------------------------------------------------------------------------

    def _holding_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if not job.pending:
            # It started at the new shape after all.
            return self._to(resize, State.RELEASING)
        if job.held:
            return self._to(resize, State.RESHAPING_BACK)
        return self._ask_to_hold(resize, job)

    def _reshaping_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        number = max(round(self.clock() * 1000), (resize.order_number or 0) + 1)
        if resize.restart >= 0:
            try:
                write_order(job, Order(number, resize.restart + 1, resize.old_batch), self.spool)
            except OrderError as error:
                log.warning("job %d: its batch could not be put back: %s", job.job_id, error)
        try:
            self.client.reshape(job.job_id, target_of(resize))
        except Unreachable:
            raise
        except SlurmError as error:
            # Not to be held for it: whatever shape Slurm has now is the owner's again.
            return self._to(resize, State.RELEASING_BACK, f"the old shape was refused: {error}")
        return self._to(resize, State.RELEASING_BACK)

    def _releasing_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._release(resize, job, State.WAITING_BACK, State.STARTING_BACK)

    def _waiting_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.running:
            deadline = self.clock() + self.settings.start_timeout_s
            return self._to(resize, State.STARTING_BACK, deadline=deadline)
        if resize.restart < 0 or job.held or self._late(resize):
            return self._settle(resize, job)
        return resize

    def _starting_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._greet(resize, job)

    # -- shared --------------------------------------------------------------------------------------------------

    def _ask_to_hold(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if self._due(resize):
            try:
                self.client.hold(job.job_id)
            except Unreachable:
                raise
            except SlurmError as error:
                return self._to(resize, State.RELEASING_BACK, f"Slurm did not hold it: {error}")
        return resize

    def _release(self, resize: ResizeRecord, job: Job, waiting: State, starting: State) -> ResizeRecord:
        if job.held and job.admin_held:
            return self._settle(resize, job)
        if job.held:
            # Also a running job: a hold that came too late would strike at its next requeue.
            if self._due(resize):
                self._let_go(resize, job)
            return self._look_again(resize, job)
        if job.pending:
            return self._to(resize, waiting, deadline=self.clock() + self.settings.max_wait_s)
        return self._to(resize, starting, deadline=self.clock() + self.settings.start_timeout_s)

    def _let_go(self, resize: ResizeRecord, job: Job) -> None:
        # Slurm delays what was requeued, nothing else: a waiting job's own --begin stays.
        start_now = self.settings.start_now and job.pending and resize.restart >= 0
        try:
            self.client.release(job.job_id, start_now=start_now)
        except Unreachable:
            raise
        except SlurmError:
            if not start_now:
                raise
            self.client.release(job.job_id, start_now=False)

    def _look_again(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        """After an action that takes effect at once: go on in this round if it did."""
        fresh = self.client.job(job.job_id)
        return resize if fresh.held else _HANDLERS[State(resize.state)](self, resize, fresh)

    def _greet(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if resize.restart < 0:
            return self._settle(resize, job)
        pause = self.reports.greeted(job, resize.restart)
        if pause is not None:
            return self._settle(resize, job, pause_s=pause)
        if not job.running:
            return self._settle(resize, job, "that run ended before it said hello")
        if self._late(resize):
            return self._settle(resize, job, "it has not said hello")
        return resize

    def _settle(
        self, resize: ResizeRecord, job: Job, remark: str = "", *, pause_s: float | None = None
    ) -> ResizeRecord:
        """Close the resize by the shape that Slurm holds, whichever was asked for last."""
        new = Shape(resize.new_nodes, resize.new_gpus_per_node)
        old = Shape(resize.old_nodes, resize.old_gpus_per_node)
        state = State.DONE if has_shape(job, new) else State.ROLLED_BACK
        at = "its new shape" if state is State.DONE else "its old shape" if has_shape(job, old) else "another shape"
        outcome = f"it {'waits' if job.pending else 'runs'} at {at}"
        if job.held:
            remark = f"held by {'an operator' if job.admin_held else 'its owner'}"
        return self._end(resize, state, f"{outcome}, {remark}" if remark else outcome, pause_s=pause_s)

    def _call_off(self, resize: ResizeRecord, job: Job, why: str) -> ResizeRecord:
        """Tell a job that was drained to carry on as it was, at once rather than after its minute."""
        number = max(round(self.clock() * 1000), (resize.order_number or 0) + 1)
        try:
            write_order(job, Order(number, resize.restart, resize.old_batch), self.spool)
        except OrderError as error:
            log.warning("job %d: the drain could not be called off: %s", job.job_id, error)
        return self._end(resize, State.ABANDONED, why)

    def _due(self, resize: ResizeRecord, *, once: bool = False) -> bool:
        """Whether the state's action is to be taken now: at first, after a restart of ours, and again if in vain."""
        key = (resize.id, State(resize.state))
        asked = self._asked.get(key)
        if asked is not None and (once or self.clock() < asked + ASK_AGAIN_S):
            return False
        self._asked[key] = self.clock()
        return True

    def _late(self, resize: ResizeRecord) -> bool:
        return resize.deadline is not None and self.clock() > resize.deadline

    def _to(
        self, resize: ResizeRecord, state: State, detail: str = "", *, deadline: float | None = None
    ) -> ResizeRecord:
        log.info("job %d: %s → %s %s", resize.job_id, resize.state, state.value, detail)
        self._asked.pop((resize.id, state), None)
        return self.journal.step_resize(resize.id, state.value, time=self.clock(), detail=detail, deadline=deadline)

    def _end(self, resize: ResizeRecord, state: State, outcome: str, *, pause_s: float | None = None) -> ResizeRecord:
        log.info("job %d: %s → %s: %s", resize.job_id, resize.state, state.value, outcome)
        self._asked = {key: at for key, at in self._asked.items() if key[0] != resize.id}
        return self.journal.end_resize(resize.id, state.value, outcome, self.clock(), pause_s)


_HANDLERS: dict[State, Callable[[Machine, ResizeRecord, Job], ResizeRecord]] = {
    State.DRAINING: Machine._draining,
    State.REQUEUING: Machine._requeuing,
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

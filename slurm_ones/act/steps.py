"""What the states of a resize share: asking Slurm, letting a job go, and writing down what is next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ones_db import NO_REASON, ReasonRecord, ResizeRecord
from ones_wrapper.protocol import DRAIN_WAIT_S, LOOK_SIGNAL, Order
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.orders import OrderError, next_number, write_order
from slurm_ones.act.states import State
from slurm_ones.config import ResizeSettings
from slurm_ones.rules.reserved import new_of
from slurm_ones.slurm.client import SlurmClient, SlurmError, Unreachable
from slurm_ones.slurm.model import PARKED, Job, Shape
from slurm_ones.slurm.reshape import has_shape

log = logging.getLogger(__name__)

ASK_AGAIN_S = 10.0
"""An action whose effect is not seen is repeated after this long."""


class Journal(Protocol):
    """What the machine needs of the database (`ones_db.Store` has it)."""

    def step_resize(
        self,
        resize_id: int,
        state: str,
        *,
        time: float,
        detail: ReasonRecord = NO_REASON,
        deadline: float | None = None,
    ) -> ResizeRecord: ...

    def end_resize(
        self, resize_id: int, state: str, outcome: ReasonRecord, time: float, pause_s: float | None = None
    ) -> ResizeRecord: ...


class Reports(Protocol):
    """What the machine needs to know of a job's reports."""

    def drained(self, job: Job, restart: int, order: int) -> float | None:
        """When the durable checkpoint that answers the drain order was reported, None while there is none."""

    def greeted(self, job: Job, after_restart: int) -> float | None:
        """Seconds that training stood still, once a run after `after_restart` said hello; None before."""


@dataclass
class Steps:
    """The machine without its states."""

    client: SlurmClient
    journal: Journal
    reports: Reports
    settings: ResizeSettings
    spool: Path | None
    clock: Callable[[], float]
    wanted: Callable[[Job], bool]
    """Whether a job is still to be resized: it has not opted out, and nobody stopped the companion's hand."""
    leases: Deferrals
    check: Callable[[], None] = lambda: None
    """Raises `NotLeader` where another companion acts; asked before an order is written, as the client asks it."""

    def __post_init__(self) -> None:
        self._asked: dict[tuple[int, State], float] = {}
        self._freed: dict[int, float] = {}
        """When the requeued job of each resize was first seen ready to be released."""

    def _handle(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        """What the resize's state asks for, of the job as it is."""
        raise NotImplementedError

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
            return self._give_back(resize, "held by an operator")
        if job.held:
            if self._unsettled(resize, job):
                return resize
            # Also a running job: a hold that came too late would strike at its next requeue.
            if self._due(resize):
                self._let_go(resize, job)
            return self._look_again(resize, job)
        if job.pending:
            self.leases.let_go(job)
            return self._to(resize, waiting, deadline=self.clock() + self.settings.max_wait_s)
        return self._to(resize, starting, deadline=self.clock() + self.settings.start_timeout_s)

    def _give_back(self, resize: ResizeRecord, why: str) -> ResizeRecord:
        """The old shape for a job that waits for something else than room: Slurm does not say of it whether it would
        ever start at the new one. Its hold, where it has one, is not ours and stays."""
        return self._to(resize, State.WAITING_BACK, why, deadline=self.clock() + self.settings.max_wait_s)

    def _unsettled(self, resize: ResizeRecord, job: Job) -> bool:
        """Whether its last run was killed a moment ago.

        Slurm ends a job's processes on a node by the job's id. Where a node did not answer when that run was to end,
        its daemon being started again say, Slurm tells it once more a second later, and a run that began meanwhile
        dies of it, and the job with it. Slurm's own delay after a requeue is there for that.
        """
        if not (self.settings.start_now and job.pending and resize.restart >= 0):
            return False
        now = self.clock()
        return 0.0 <= now - self._freed.setdefault(resize.id, now) < self.settings.settle_s

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
        return resize if fresh.held else self._handle(resize, fresh)

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
        new = new_of(resize)
        old = Shape(resize.old_nodes, resize.old_gpus_per_node)
        # A job that was to be parked keeps its shape: where it comes here, it was let go instead.
        state = State.DONE if new != PARKED and has_shape(job, new) else State.ROLLED_BACK
        at = "its new shape" if state is State.DONE else "its old shape" if has_shape(job, old) else "another shape"
        outcome = f"it {'waits' if job.pending else 'runs'} at {at}"
        if job.held:
            remark = f"held by {'an operator' if job.admin_held else 'its owner'}"
        return self._end(resize, state, f"{outcome}, {remark}" if remark else outcome, pause_s=pause_s)

    def _call_off(self, resize: ResizeRecord, job: Job, why: str) -> ResizeRecord:
        """Tell a job that was drained to carry on as it was, at once rather than after its minute."""
        try:
            self._order(job, Order(self._next_number(job), resize.restart, resize.old_batch))
        except OrderError as error:
            log.warning("job %d: the drain could not be called off: %s", job.job_id, error)
        return self._end(resize, State.ABANDONED, why)

    def _order(self, job: Job, order: Order) -> None:
        self.check()
        write_order(job, order, self.spool)
        with suppress(SlurmError):  # it would find the order by itself, a little later
            self.client.signal(job.job_id, LOOK_SIGNAL)

    def _next_number(self, job: Job) -> int:
        return next_number(job, self.spool, self.clock())

    def _due(self, resize: ResizeRecord, *, once: bool = False) -> bool:
        """Whether the state's action is to be taken now: at first, after a restart of ours, and again if in vain."""
        key = (resize.id, State(resize.state))
        asked = self._asked.get(key)
        # A clock that was set back must not put it off.
        if asked is not None and (once or 0.0 <= self.clock() - asked < ASK_AGAIN_S):
            return False
        self._asked[key] = self.clock()
        return True

    def _late(self, resize: ResizeRecord) -> bool:
        """Its state's deadline is past; or further ahead than any is set, because the clock was set back since."""
        if resize.deadline is None:
            return False
        times = self.settings
        longest = max(times.drain_timeout_s, times.max_wait_s, times.start_timeout_s, DRAIN_WAIT_S)
        return not 0.0 <= resize.deadline - self.clock() <= longest

    def _to(
        self, resize: ResizeRecord, state: State, detail: str = "", *, deadline: float | None = None
    ) -> ResizeRecord:
        log.info("job %d: %s → %s %s", resize.job_id, resize.state, state.value, detail)
        self._asked.pop((resize.id, state), None)
        return self.journal.step_resize(
            resize.id, state.value, time=self.clock(), detail=ReasonRecord(text=detail), deadline=deadline
        )

    def _end(self, resize: ResizeRecord, state: State, outcome: str, *, pause_s: float | None = None) -> ResizeRecord:
        log.info("job %d: %s → %s: %s", resize.job_id, resize.state, state.value, outcome)
        self._asked = {key: at for key, at in self._asked.items() if key[0] != resize.id}
        self._freed.pop(resize.id, None)
        return self.journal.end_resize(resize.id, state.value, ReasonRecord(text=outcome), self.clock(), pause_s)

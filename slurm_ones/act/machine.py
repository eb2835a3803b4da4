"""What every resize is made with: client, database, the job's reports, and the one place that stores a state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ones_db import MembershipRecord, ResizeRecord, ResizeStepRecord
from ones_db.reasons import NO_REASON, Reason, reason
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.orders import OrderWriter
from slurm_ones.act.timing import ActionTimes
from slurm_ones.act.transitions import State, check_transition
from slurm_ones.config import ResizeSettings
from slurm_ones.rules.job_rules import breaks
from slurm_ones.slurm.client import SHOWS_SWITCHES, SWITCH_WAIT_S, Refused, SlurmClient
from slurm_ones.slurm.model import Job

log = logging.getLogger(__name__)


class ResizeStore(Protocol):
    """What the machine needs of the database (`ones_db.Store` has it)."""

    def step_resize(
        self,
        resize_id: int,
        state: str,
        *,
        time: float,
        detail: Reason = NO_REASON,
        deadline: float | None = None,
    ) -> ResizeRecord: ...

    def end_resize(
        self, resize_id: int, state: str, outcome: Reason, time: float, pause_s: float | None = None
    ) -> ResizeRecord: ...

    def note_held(self, resize_id: int, tasks: Sequence[int]) -> ResizeRecord: ...

    def resize_steps(self, resize_id: int) -> Sequence[ResizeStepRecord]: ...


class ResizeReports(Protocol):
    """What the machine needs to know of a job's reports."""

    def drained(self, job: Job, restart: int, order: int) -> float | None:
        """When the durable checkpoint that answers the drain order was reported, None while there is none."""

    def restarted(self, job: Job, after_restart: int) -> float | None:
        """Seconds that training stood still, once a run after `after_restart` has reported its start; None before."""

    def membership(self, job: Job, order: int | None = None) -> MembershipRecord | None:
        """Which blocks of a job of blocks train together, by its newest report of that; with an order's number by the
        newest that names it."""


@dataclass
class Machine:
    """What the actions of a resize's states have to work with."""

    client: SlurmClient
    store: ResizeStore
    reports: ResizeReports
    settings: ResizeSettings
    orders: OrderWriter
    deferrals: Deferrals
    clock: Callable[[], float]
    wanted: Callable[[Job], bool]
    """Whether a job is still to be resized: it has not opted out, and the stop file is not there."""
    rival: Callable[[Job], int] = lambda job: 0
    """Number of the newest order that another companion gave the job; 0 for none."""
    switches: Callable[[Job, Shape], int] = lambda job, shape: 0
    """Fewest leaf switches that a shape of the job needs; 0 where none are to be asked for."""
    told: Callable[[Job], tuple[Spec | None, str]] = lambda job: (None, "")
    """What the job says now that it can do, and what of that could not be believed; neither where it says nothing."""

    def __post_init__(self) -> None:
        self.times = ActionTimes(self.settings, self.clock)
        self.new: set[int] = set()
        """Resizes that this companion has begun and not looked at since: what waited and is held now, others hold."""
        self.gains: dict[int, float] = {}
        """What the decision expected of resizes that this companion has begun (`Order.gain`). For the job's log alone,
        so that it need not outlive the companion."""

        self.ended: list[ResizeRecord] = []
        """Resizes that ended since somebody last asked (`take_ended`)."""

    def take_ended(self) -> list[ResizeRecord]:
        """The resizes that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def hindered(self, resize: ResizeRecord, job: Job) -> Reason | None:
        """Why the resize must not go on, of a job whose size is still the old one: it is no longer wanted, or the job's
        strategy cannot use the new size any more."""
        if not self.wanted(job):
            return reason("switched_off")
        spec, problem = self.told(job)
        if problem:
            return reason("strategy_unread", problem=problem)
        return breaks(spec, resize.new_shape, resize.old_batch, resize.new_batch)

    def ask_for_few_switches(self, job: Job, shape: Shape) -> None:
        """Have Slurm look for the shape below as few leaf switches as it needs: a wish that ends by itself, and whose
        refusal changes nothing. A wish of the owner's, for longer than ours, stays."""
        most = self.switches(job, shape)
        if not most:
            return
        try:
            if self.client.version() < SHOWS_SWITCHES:
                return  # a wish of the owner's could not be told from ours
            now = self.client.details([job.job_id]).get(job.job_id)
            if now is None or (now.switches and now.switch_wait_s != SWITCH_WAIT_S) or now.switches == most:
                return
            self.client.few_switches(job.key, most)
        except Refused as error:
            log.warning("job %d: few leaf switches could not be asked for: %s", job.job_id, error)

    def move(
        self,
        resize: ResizeRecord,
        state: State,
        why: Reason | None = None,
        *,
        deadline: float | None = None,
        pause_s: float | None = None,
    ) -> ResizeRecord:
        """Write down the state that comes next; no other code does. Raises `IllegalTransition`."""
        check_transition(State(resize.state), state)
        log.info("job %d: %s → %s%s", resize.job_id, resize.state, state.value, f": {why}" if why else "")
        detail = why or NO_REASON
        if not state.final:
            self.times.entered(resize, state)
            return self.store.step_resize(resize.id, state.value, time=self.clock(), detail=detail, deadline=deadline)
        self.times.forget(resize)
        self.gains.pop(resize.id, None)
        self.new.discard(resize.id)
        ended = self.store.end_resize(resize.id, state.value, detail, self.clock(), pause_s)
        self.ended.append(ended)
        return ended

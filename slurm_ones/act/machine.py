"""Base class of all resizes: client, database, the job's reports, and the only method that stores a state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ones_db import MembershipRecord, ResizeRecord, Store
from ones_db.reasons import NO_REASON, Reason, reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import DRAIN_WAIT_S, Spec
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.orders import OrderWriter
from slurm_ones.act.transitions import HOLDS_JOB, LASTS, Stage, State, check_transition
from slurm_ones.config import ResizeSettings
from slurm_ones.jobs.elastic import Guests, WholeJob
from slurm_ones.rules.blocks import REQUEUE
from slurm_ones.rules.job_rules import breaks, reserved_ahead
from slurm_ones.slurm.client import SHOWS_SWITCHES, SWITCH_WAIT_S, Refused, SlurmClient
from slurm_ones.slurm.model import JobKey, SlurmJob, Snapshot, fewest_switches, longest_run_s, partition_gpus
from slurm_ones.untrusted_files import NoAnswer

log = logging.getLogger(__name__)

ASK_AGAIN_S = 10.0
"""Seconds before an action without visible effect is repeated."""


class ResizeReports(Protocol):
    """Reports of a job that a resize waits for."""

    def drained(self, job: WholeJob, restart: int, order: int) -> float | None:
        """Return when the job reported the durable checkpoint that the drain order asked for, or None before that."""

    def restarted(self, job: WholeJob, after_restart: int) -> float | None:
        """Return the training pause, s, once a run after `after_restart` has reported its start; else None."""

    def membership(self, job: WholeJob, order: int | None = None) -> MembershipRecord | None:
        """Return the newest membership that the job reported, with `order` the newest that names its number."""


@dataclass
class Machine:
    """Tools and memory that the actions of all resizes share.

    Losing the memory in a crash does no harm: actions may be repeated, and deadlines are in the database.
    """

    client: SlurmClient
    store: Store
    reports: ResizeReports
    settings: ResizeSettings
    orders: OrderWriter
    deferrals: Deferrals
    clock: Callable[[], float]
    wanted: Callable[[WholeJob], bool]
    """Returns whether a job may still be resized: the owner has not opted out, and there is no stop file."""
    rival: Callable[[WholeJob], int] = lambda job: 0
    """Number of the newest order that another companion gave the job; 0 for none."""
    told: Callable[[WholeJob], tuple[Spec | None, str]] = lambda job: (None, "")
    """Returns the spec that the job reports, or None, and the problem in words if parts were not believed."""
    guests: Guests = field(default_factory=dict)
    """Queue of the guests, by partition."""
    whole_node_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs per node of partitions allocated by whole nodes (see `Settings.whole_node_gpus`)."""
    taper: float = 1.0
    seen: Snapshot | None = None
    """Snapshot of the last tick; None before the first."""
    new: set[int] = field(default_factory=set)
    """Ids of resizes that this companion began and has not advanced since. A task found held at the first look is held
    by others."""
    gains: dict[int, float] = field(default_factory=dict)
    """Expected gain (`Order.gain`) of each resize that this companion began, by resize id; only for the job's log."""
    _ended: list[ResizeRecord] = field(default_factory=list, init=False)
    _asked: dict[tuple[int, Stage], float] = field(default_factory=dict, init=False)
    """Time of the last action, by resize id and stage."""
    _requeued: dict[int, float] = field(default_factory=dict, init=False)
    """Time at which each resize's requeued job was first seen ready for release."""
    _undrained: dict[int, float] = field(default_factory=dict, init=False)
    """Time of the last look at which each resize's job had not drained yet."""

    def take_ended(self) -> list[ResizeRecord]:
        """Return the resizes that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # -- when an action is due, and when it is too late ----------------------------------------------------------------

    def due(self, resize: ResizeRecord, *, once: bool = False) -> bool:
        """Tell whether the state's action is due: at the first call, again after `ASK_AGAIN_S` unless `once`, and after
        a restart of the companion."""
        key = (resize.id, Stage.of(resize))
        asked = self._asked.get(key)
        # A clock that was set back must not put it off.
        if asked is not None and (once or 0.0 <= self.clock() - asked < ASK_AGAIN_S):
            return False
        self._asked[key] = self.clock()
        return True

    def late(self, resize: ResizeRecord) -> bool:
        """Tell whether the state's deadline is past, or impossibly far ahead because the clock was set back."""
        if resize.deadline is None:
            return False
        longest = max(DRAIN_WAIT_S, *map(self._lasts, LASTS))
        return not 0.0 <= resize.deadline - self.clock() <= longest

    def deadline(self, state: State) -> float | None:
        """Return the deadline of a state that begins now, as a Unix time; None if the state has no deadline."""
        return self.clock() + self._lasts(state) if state in LASTS else None

    def _lasts(self, state: State) -> float:
        return float(getattr(self.settings, LASTS[state]))

    def just_requeued(self, resize: ResizeRecord, job: WholeJob) -> bool:
        """Tell whether the requeued job was first seen ready less than `settle_s` ago, so that it must not start yet.

        Slurm ends a job's processes on a node by the job's id. If the node's daemon does not answer, as during its
        restart, Slurm repeats that a second later. A run of the same job that began meanwhile is killed too. Slurm's
        own delay after a requeue prevents this.
        """
        if not (self.settings.start_now and job.pending and resize.restart >= 0):
            return False
        now = self.clock()
        return 0.0 <= now - self._requeued.setdefault(resize.id, now) < self.settings.settle_s

    def drained(self, resize: ResizeRecord, job: WholeJob) -> float | None:
        """Return when the job reported the checkpoint of the resize's drain order, or None before that. A job's clock
        may be behind ours, so the time is at least that of the last look without the report."""
        found = self.reports.drained(job, resize.restart, resize.order_number or 0)
        if found is None:
            self._undrained[resize.id] = self.clock()
            return None
        return max(found, min(self._undrained.get(resize.id, found), self.clock()))

    # -- what both mechanisms do ---------------------------------------------------------------------------------------

    def is_another(self, job: WholeJob) -> bool:
        """Tell whether Slurm has given the job's id to a new job, as it does after it lost its state."""
        known = self.store.jobs([job.job_id]).get(job.job_id)
        # Of a requeue Slurm shows the new submission before it counts the restart.
        fresh = not any(block.restart or block.completing for block in job.blocks)
        return known is not None and fresh and job.submit_time > known.submit_time

    def hindered(self, resize: ResizeRecord, job: WholeJob) -> Reason | None:
        """Return why a resize of a job at its old size must stop, or None. Raises `NoAnswer` if the job's files cannot
        be read now and the deadline is ahead.

        The resize may be unwanted, the strategy unable to use the new size, or a reservation in the way of a new start.
        Nothing stops a resize on its way back.
        """
        if resize.back:
            return None
        if not self.wanted(job):
            return reason("switched_off")
        try:
            spec, problem = self.told(job)
        except NoAnswer as error:
            held = State(resize.state) in HOLDS_JOB
            if not held and resize.deadline is not None and not self.late(resize):
                raise
            # A job is not held for it, and its order was written: what it said when that was decided stands.
            spec, problem = None, "" if held else str(error)
        if problem:
            return reason("strategy_unread", problem=problem)
        shape = resize.new_shape
        against = breaks(spec, shape, resize.old_batch, resize.new_batch)
        if against is None and resize.mechanism == REQUEUE and job.running and shape != PARKED and self.seen:
            return reserved_ahead(job.first, shape, self.seen, self.whole_node_gpus, self.clock())
        return against

    def longest_s(self, partition: str, shape: Shape, reservation: str) -> float:
        """Return the longest time limit, s, with which the shape may start before another's reservation."""
        return longest_run_s(self._snapshot(), partition, shape, reservation)

    def gpus_of(self, block: SlurmJob) -> int:
        """Return the GPUs of a block: all GPUs of its nodes if Slurm allocates them whole."""
        seen = self._snapshot()
        partition = seen.partitions.get(block.partition)
        full, whole = partition_gpus(partition, seen, self.whole_node_gpus) if partition is not None else (0, False)
        return block.nodes * full if whole else block.gpus

    def _snapshot(self) -> Snapshot:
        if self.seen is None:
            self.seen = self.client.snapshot()
        return self.seen

    def release(self, key: JobKey, *, now: bool) -> None:
        """Release a job or task that we hold; with `now`, without Slurm's delay after a requeue. Raises `Refused`."""
        if now and self.settings.start_now:
            try:
                self.client.release(key, start_now=True)
                return
            except Refused as error:
                log.info("job %s: it is released to start after Slurm's own delay: %s", key, error)
        self.client.release(key, start_now=False)

    def ask_for_few_switches(self, job: WholeJob, shape: Shape) -> None:
        """Ask Slurm to prefer the fewest leaf switches for the shape; Slurm drops the preference after a while. A
        refusal is only logged, and an owner's own preference stays."""
        if self.taper <= 1 or self.seen is None:
            return
        most = fewest_switches(self.seen, job.home.partition, shape.nodes)
        if not most:
            return
        try:
            if self.client.version() < SHOWS_SWITCHES:
                return  # a preference of the owner's would look like ours
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
        back: bool | None = None,
        deadline: float | None = None,
        pause_s: float | None = None,
    ) -> ResizeRecord:
        """Store the resize's next state, by default with the same direction and the deadline of `LASTS`. No other
        method stores states. Raises `IllegalTransition`."""
        after = Stage(state, not state.final and (resize.back if back is None else back))
        check_transition(Stage.of(resize), after)
        log.info("job %d: %s → %s%s", resize.job_id, resize.stage, after, f": {why}" if why else "")
        detail, now = why or NO_REASON, self.clock()
        if not state.final:
            self._asked.pop((resize.id, after), None)
            deadline = deadline if deadline is not None else self.deadline(state)
            return self.store.step_resize(
                resize.id, state.value, time=now, back=after.back, detail=detail, deadline=deadline
            )
        self._asked = {key: at for key, at in self._asked.items() if key[0] != resize.id}
        self._requeued.pop(resize.id, None)
        self._undrained.pop(resize.id, None)
        self.gains.pop(resize.id, None)
        self.new.discard(resize.id)
        ended = self.store.end_resize(resize.id, state.value, detail, now, pause_s)
        self._ended.append(ended)
        return ended

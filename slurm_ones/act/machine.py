"""Base class of the resizes: Slurm's client, the database, the job's reports, and the one way to store a state."""

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
from slurm_ones.act.transitions import HOLDS_JOB, LASTS, TRANSITIONS, IllegalTransition, Stage, State
from slurm_ones.config import ResizeSettings
from slurm_ones.jobs.elastic import Guests, WholeJob
from slurm_ones.rules.blocks import REQUEUE
from slurm_ones.rules.job_rules import breaks, reserved_ahead
from slurm_ones.slurm.client import SHOWS_SWITCHES, SWITCH_WAIT_S, Refused, SlurmClient
from slurm_ones.slurm.model import JobKey, SlurmJob, Snapshot, fewest_switches, longest_run_s, partition_gpus
from slurm_ones.untrusted_files import NoAnswer

log = logging.getLogger(__name__)

ASK_AGAIN_S = 10.0
"""Seconds after which an action without a visible effect is repeated."""


class ResizeReports(Protocol):
    """Reports for which a resize waits."""

    def drained(self, job: WholeJob, restart: int, order: int) -> float | None:
        """Return the time at which the job reported the checkpoint for this drain order; None before that."""

    def gone(self, job: WholeJob, restart: int) -> bool:
        """Tell whether the drained run has reported the end of its processes."""

    def restarted(self, job: WholeJob, after_restart: int) -> float | None:
        """Return the pause of training, in seconds, that the first run after `after_restart` reported; None before its
        report."""

    def membership(self, job: WholeJob, order: int | None = None) -> MembershipRecord | None:
        """Return the job's newest reported membership, or with `order` the newest that names this order's number; None
        without one."""


@dataclass
class Machine:
    """Connections and memory that all resizes share. Losing the memory does no harm: actions can be repeated, and
    deadlines are stored."""

    client: SlurmClient
    store: Store
    reports: ResizeReports
    settings: ResizeSettings
    orders: OrderWriter
    deferrals: Deferrals
    clock: Callable[[], float]
    wanted: Callable[[WholeJob], bool]
    """Function that tells whether a job may still be resized: it still opts in, and there is no stop file."""
    other_order: Callable[[WholeJob], int] = lambda job: 0
    """Function that returns the number of the newest order that another companion gave a job; 0 for none."""
    read_spec: Callable[[WholeJob], tuple[Spec | None, str]] = lambda job: (None, "")
    """Function that returns the spec that a job reports (or None), and what is wrong with it ("" if nothing is)."""
    guests: Guests = field(default_factory=dict)
    """Guests' queue for each partition."""
    whole_node_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs per node in partitions for which Slurm shows none (see `Settings.whole_node_gpus`)."""
    taper: float = 1.0
    seen: Snapshot | None = None
    """Snapshot of the last tick; None before the first."""
    new: set[int] = field(default_factory=set)
    """Ids of the resizes that this companion began and has not advanced yet. A hold found at the first advance is
    somebody else's."""
    gains: dict[int, float] = field(default_factory=dict)
    """Expected gain (`Order.gain`) of each resize that this companion began, by resize id; the job logs it."""
    _ended: list[ResizeRecord] = field(default_factory=list, init=False)
    _asked: dict[tuple[int, Stage], float] = field(default_factory=dict, init=False)
    """Time of the last action, by resize id and stage."""
    _requeued: dict[int, float] = field(default_factory=dict, init=False)
    """Time at which the requeued job could first be released, by resize id."""

    def take_ended(self) -> list[ResizeRecord]:
        """Return the resizes that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # -- when an action is due, and when it is too late ----------------------------------------------------------------

    def due(self, resize: ResizeRecord, *, once: bool = False) -> bool:
        """Tell whether to do this state's action now: at the first call, and then every `ASK_AGAIN_S`; with `once`, at
        the first call only."""
        key = (resize.id, Stage.of(resize))
        asked = self._asked.get(key)
        # A clock that was set back must not delay the action.
        if asked is not None and (once or 0.0 <= self.clock() - asked < ASK_AGAIN_S):
            return False
        self._asked[key] = self.clock()
        return True

    def late(self, resize: ResizeRecord) -> bool:
        """Tell whether this state's deadline is past, or impossibly far ahead because the clock was set back."""
        if resize.deadline is None:
            return False
        longest = max(DRAIN_WAIT_S, *map(self._lasts, LASTS))
        return not 0.0 <= resize.deadline - self.clock() <= longest

    def deadline(self, state: State) -> float | None:
        """Return the deadline (Unix time) of a state that begins now; None if it has none."""
        return self.clock() + self._lasts(state) if state in LASTS else None

    def _lasts(self, state: State) -> float:
        return float(getattr(self.settings, LASTS[state]))

    def just_requeued(self, resize: ResizeRecord, job: WholeJob) -> bool:
        """Tell whether the requeued job could first be released less than `settle_s` ago, so that it must not start
        yet.

        Slurm kills a job's processes by the job's id, and repeats this while a node does not answer. A new run that
        starts too early would be killed too.
        """
        if not (self.settings.start_now and job.pending and resize.restart >= 0):
            return False
        now = self.clock()
        return 0.0 <= now - self._requeued.setdefault(resize.id, now) < self.settings.settle_s

    def drained(self, resize: ResizeRecord, job: WholeJob) -> float | None:
        """Return the time at which the job reported the checkpoint of the resize's drain order; None before that. It is
        never before the resize began, even if the job's clock is behind."""
        found = self.reports.drained(job, resize.restart, resize.order_number or 0)
        return None if found is None else max(found, min(resize.started, self.clock()))

    # -- what both mechanisms do ---------------------------------------------------------------------------------------

    def is_another(self, job: WholeJob) -> bool:
        """Tell whether Slurm lost its state and has given the job's id to a new job."""
        known = self.store.jobs([job.job_id]).get(job.job_id)
        # At a requeue Slurm shows the new submission time before it counts the restart.
        fresh = not any(block.restart or block.completing for block in job.blocks)
        return known is not None and fresh and job.submit_time > known.submit_time

    def hindered(self, resize: ResizeRecord, job: WholeJob) -> Reason | None:
        """Return the reason to stop this resize before the job has its new size, else None. A roll-back is never
        stopped.

        Reasons: the resize is no longer wanted, the strategy cannot use the new size, or a reservation prevents the
        restart. Raises `NoAnswer` if the job's files cannot be read now and the deadline is not past.
        """
        if resize.back:
            return None
        if not self.wanted(job):
            return reason("switched_off")
        try:
            spec, problem = self.read_spec(job)
        except NoAnswer as error:
            held = State(resize.state) in HOLDS_JOB
            if not held and resize.deadline is not None and not self.late(resize):
                raise
            # While the job is held, an unreadable spec does not stop the resize. The order was written by the spec of
            # that time.
            spec, problem = None, "" if held else str(error)
        if problem:
            return reason("strategy_unread", problem=problem)
        shape = resize.new_shape
        against = breaks(spec, shape, resize.old_batch, resize.new_batch)
        if against is None and resize.mechanism == REQUEUE and job.running and shape != PARKED and self.seen:
            return reserved_ahead(job.first, shape, self.seen, self.whole_node_gpus, self.clock())
        return against

    def longest_s(self, partition: str, shape: Shape, reservation: str) -> float:
        """Return the longest time limit, in seconds, with which this shape can still start before a reservation for
        others."""
        return longest_run_s(self._snapshot(), partition, shape, reservation)

    def gpus_of(self, block: SlurmJob) -> int:
        """Return the number of GPUs of a block; if Slurm allocates only whole nodes, all GPUs of its nodes."""
        seen = self._snapshot()
        partition = seen.partitions.get(block.partition)
        full, whole = partition_gpus(partition, seen, self.whole_node_gpus) if partition is not None else (0, False)
        return block.nodes * full if whole else block.gpus

    def _snapshot(self) -> Snapshot:
        if self.seen is None:
            self.seen = self.client.snapshot()
        return self.seen

    def release(self, key: JobKey, *, now: bool) -> None:
        """Release a job or task that the companion holds. With `now`, skip Slurm's delay after a requeue. Raises
        `Refused`."""
        if now and self.settings.start_now:
            try:
                self.client.release(key, start_now=True)
                return
            except Refused as error:
                log.info("job %s: it is released to start after Slurm's own delay: %s", key, error)
        self.client.release(key, start_now=False)

    def ask_for_few_switches(self, job: WholeJob, shape: Shape) -> None:
        """Ask Slurm to place this shape under as few leaf switches as possible, unless the owner set such a preference.
        A refusal is only logged."""
        if self.taper <= 1 or self.seen is None:
            return
        most = fewest_switches(self.seen, job.home.partition, shape.nodes)
        if not most:
            return
        try:
            if self.client.version() < SHOWS_SWITCHES:
                return  # an owner's own preference would look like the companion's
            now = self.client.details([job.job_id]).get(job.job_id)
            if now is None or (now.switches and now.switch_wait_s != SWITCH_WAIT_S) or now.switches == most:
                return
            self.client.few_switches(job.key, most)
        except Refused as error:
            log.warning("job %d: Slurm refused the preference for few leaf switches: %s", job.job_id, error)

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
        """Store the resize's next state and return its record. By default `back` stays as it is, and the deadline
        follows from `LASTS`. Raises `IllegalTransition`."""
        after = Stage(state, not state.final and (resize.back if back is None else back))
        if after not in TRANSITIONS.get(Stage.of(resize), ()):
            raise IllegalTransition(f"a resize does not go from {Stage.of(resize)} to {after}")
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
        self.gains.pop(resize.id, None)
        self.new.discard(resize.id)
        ended = self.store.end_resize(resize.id, state.value, detail, now, pause_s)
        self._ended.append(ended)
        return ended

"""Carrying schedules out: begins resizes, takes those under way further, and writes down what was decided."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field

from ones_db import AlternativeRecord, DecisionJobRecord, DecisionRecord, NotLeader, PromiseRecord, ResizeRecord, Store
from ones_db.reasons import NO_REASON, Reason, reason
from ones_db.shape import PARKED
from ones_wrapper.protocol import Order
from slurm_ones.act.advice import commands, waiting_commands
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.held_tasks import HeldTasks
from slurm_ones.act.orders import OrderError, OrderWriter
from slurm_ones.act.resize import ResizeMachine
from slurm_ones.act.transitions import State, first_state
from slurm_ones.config import Settings
from slurm_ones.jobs.eligibility import Observation
from slurm_ones.policy.contract import JobView, Schedule
from slurm_ones.policy.figures import expected_gain
from slurm_ones.rules.blocks import BLOCKS, REQUEUE, Moves
from slurm_ones.rules.gate import JobRules, Round, UnderWay
from slurm_ones.rules.plan import PlannedChange, ResizePlan, plan
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartitionSchedule:
    """A policy's answer for one partition, and what it took."""

    partition: str
    schedule: Schedule
    seconds: float
    views: Mapping[int, JobView] = field(default_factory=dict)
    """What the policy was shown of each job."""


class Actor:
    """The only room with side effects on jobs. In advise mode it has none: it says what it would do."""

    def __init__(
        self,
        machine: ResizeMachine,
        store: Store,
        settings: Settings,
        deferrals: Deferrals,
        orders: OrderWriter,
        *,
        held: HeldTasks | None = None,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = print,
    ) -> None:
        self._machine = machine
        self._deferrals = deferrals
        self._orders = orders
        self._held = held or HeldTasks(store)
        self._store = store
        self._settings = settings
        self._clock = clock
        self._say = say
        self._ordered: dict[int, int | None] = {}
        self._advised: dict[int, Hashable] = {}
        self._written: dict[str, tuple[object, ...]] = {}
        self.outcomes: dict[int, Reason] = {}
        """What became of what was decided for each job, at the last tick."""

    @property
    def acting(self) -> bool:
        return self._settings.mode == "act"

    def advance(self, *, only: Collection[State] = tuple(State)) -> int:
        """Take resizes under way further; returns how many are left. Raises `Unreachable` and `NotLeader`.

        In advise mode too: what an acting companion left half done must not stay so. `only` are the states whose
        resizes are looked at and counted: all.
        """
        left = 0
        for resize in self._store.open_resizes():
            if State(resize.state) not in only:
                continue
            try:
                state = State(self._advance(resize).state)
                left += state in only and not state.final
            except (Unreachable, NotLeader):
                raise
            except Exception:
                # One odd job must not leave somebody else's held.
                log.exception("job %d: its resize could not be taken further now", resize.job_id)
                left += 1
        return left

    def _advance(self, resize: ResizeRecord) -> ResizeRecord:
        try:
            resize = self._machine.advance(resize)
        except Exception:
            self._held.read_again(resize.job_id)
            raise
        self._held.note(resize)
        return resize

    def act(
        self, round_: Round, schedules: list[PartitionSchedule], *, kept: Collection[int] = ()
    ) -> list[PlannedChange]:
        """Begin what the schedules ask for and rules allow; returns the changes begun (or advised).

        Then the jobs that must wait, those `kept` among them, are kept from starting, and all others released. Raises
        `Unreachable`.
        """
        seen = round_.seen
        if self.acting and not self._settings.stop_file.exists():
            self._orders.mark()
        begun: list[PlannedChange] = []
        self.outcomes = {}
        deferred: set[int] = set()
        queued: set[int] = set()
        for one in schedules:
            rules = round_.partition(one.partition)
            made = plan(one.schedule, rules)
            if self._settings.stop_file.exists():
                stopped = reason("stop_file", path=str(self._settings.stop_file))
                made = ResizePlan((), dict.fromkeys(made.outcomes, stopped))
            else:
                self._promise(one)
            self.outcomes |= {**one.schedule.refused, **made.outcomes}
            # A job in the middle of a resize is not decided about.
            decision = self._write(one, [job for job in rules.jobs.values() if job.under_way is None], made)
            for change in made.begin:
                self._begin(change, decision, one.views.get(change.job_id))
            if self.acting:
                resized = [change for change in made.begin if change.resizes]
                round_ = round_.begun({one.job_id: UnderWay(one.new, one.new_kind, one.moves) for one in resized})
            begun += made.begin
            deferred |= made.deferred
            queued |= made.queued
        self._reconcile(deferred | {*kept}, queued, seen)
        self._forget(seen)
        return begun

    def _promise(self, one: PartitionSchedule) -> None:
        """Store what was said of deadlines, before anything is done for them. Where nothing may be done, in advise mode
        or for the stop file, nothing is promised."""
        if not (self.acting and one.schedule.promises):
            return
        now = self._clock()
        self._store.record_promises(
            PromiseRecord(job_id, deadline, now, said.given, said.reason)
            for job_id, said in one.schedule.promises.items()
            if (deadline := one.views[job_id].deadline) is not None
        )

    def _forget(self, seen: Observation) -> None:
        """Leave nothing behind of jobs that have ended. Their deferrals and resizes end by themselves."""
        alive = {id_ for job in seen.snapshot.jobs.values() if not job.ended for id_ in (job.job_id, job.array_id)}
        for remembered in (self._ordered, self._advised):
            for job_id in remembered.keys() - alive:
                del remembered[job_id]
        if self.acting:
            self._orders.clear(alive)

    def leave(self) -> None:
        """Release the jobs that are kept from starting. Raises `Unreachable`."""
        self._deferrals.release_all()
        if self.acting:
            self._orders.unmark()

    def _reconcile(self, deferred: set[int], queued: set[int], seen: Observation) -> None:
        if not self.acting:
            for job_id in sorted(deferred):
                job = seen.elastic[job_id].job
                lines = [
                    f"# job {job_id} ({job.user}): must wait",
                    *waiting_commands(job_id, self._settings.deferral_s),
                ]
                self._advise(job_id, "deferred", lines)
            deferred = queued = set()
        jobs = {**seen.snapshot.jobs, **{job_id: one.job for job_id, one in seen.elastic.items()}}
        deferred |= {job_id for job_id in queued if self._deferrals.ours(jobs[job_id])}
        # Also in advise mode: what an acting companion kept from starting must not wait for its deferral to end.
        self._deferrals.reconcile(deferred, jobs, {resize.job_id for resize in self._store.open_resizes()})

    def _advise(self, job_id: int, advice: Hashable, lines: list[str]) -> None:
        """Say the lines, once as long as the job is advised the same."""
        if self._advised.get(job_id) != advice:
            self._advised[job_id] = advice
            for line in lines:
                self._say(line)

    def _begin(self, change: PlannedChange, decision: int | None, view: JobView | None) -> None:
        job = change.elastic.job
        if not self.acting:
            lines = [f"# job {job.job_id} ({job.user}): {change}"]
            lines += commands(change, self._orders.next_number(job), self._settings.spool, self._settings.deferral_s)
            self._advise(job.job_id, hash(change), lines)
            return
        if not change.resizes:
            self._order_batch(change)
            return
        number = self._orders.next_number(job)
        moves = change.moves or Moves()
        if change.moves is None and change.elastic.blocks and isinstance(job.key, Task):
            # Of a job of blocks that waits it is one task that changes, where they have been taken apart.
            moves = Moves(((job.key.task, change.new),))
        record = ResizeRecord(
            job_id=job.job_id,
            restart=job.restart if job.running else -1,
            old_shape=change.old,
            old_batch=change.old_batch,
            new_shape=change.new,
            new_batch=change.new_batch,
            old_kind=change.old_kind,
            new_kind=change.new_kind,
            state=first_state(job.running, by_blocks=change.moves is not None).value,
            started=self._clock(),
            decision_id=decision,
            order_number=number,
            deadline=self._clock() + self._settings.resize.drain_timeout_s,
            mechanism=REQUEUE if change.moves is None else BLOCKS,
            added=moves.added,
            dropped=moves.dropped,
            held=change.to_hold,
        )
        record = self._store.begin_resize(record)
        self._machine.new.add(record.id)
        if (gain := expected_gain(view, change.new, change.new_batch, change.new_kind)) is not None:
            self._machine.gains[record.id] = gain
        self._advance(record)

    def _order_batch(self, change: PlannedChange) -> None:
        job, batch = change.elastic.job, change.new_batch
        if self._ordered.get(job.job_id) == batch:
            return
        try:
            order = Order(self._orders.next_number(job), job.restart, batch, blocks=change.blocks)
            self._orders.write(job, order)
            self._ordered[job.job_id] = batch
        except OrderError as error:
            log.warning("job %d: no batch could be ordered: %s", job.job_id, error)

    def _write(self, one: PartitionSchedule, jobs: list[JobRules], made: ResizePlan) -> int | None:
        """Store the decision, unless it says the same as the last one of its partition."""
        acted = made.deferred | {change.job_id for change in made.begin}
        records = tuple(_record(job, one.schedule, made, job.elastic.job.job_id in acted) for job in jobs)
        # Codes rather than sentences: these tell of seconds that pass. A limit that the site has changed is news.
        refused = {**one.schedule.refused, **made.refused}
        gist = tuple(
            (r.job_id, r.shape, r.batch, r.from_shape, r.acted, r.outcome.code, refused.get(r.job_id)) for r in records
        )
        if gist == self._written.get(one.partition) or not records:
            return None
        self._written[one.partition] = gist
        return self._store.add_decision(
            DecisionRecord(
                time=self._clock(),
                policy=self._settings.policy,
                mode=self._settings.mode,
                seconds=one.seconds,
                score=one.schedule.score,
                jobs=records,
            )
        )


def _record(job: JobRules, schedule: Schedule, made: ResizePlan, acted: bool) -> DecisionJobRecord:
    elastic = job.elastic
    job_id, running = elastic.job.job_id, elastic.job.running
    allocation = schedule.allocations.get(job_id)
    return DecisionJobRecord(
        job_id=job_id,
        shape=allocation.shape if allocation else None,
        batch=allocation.batch if allocation else None,
        reason=schedule.reasons.get(job_id) or elastic.refusal or NO_REASON,
        from_shape=elastic.shape if running else None,
        from_batch=job.history.batch if running and job.history else None,
        acted=acted,
        outcome=made.outcomes.get(job_id) or schedule.refused.get(job_id) or NO_REASON,
        alternatives=tuple(
            AlternativeRecord(one.shape, one.batch, worth) if one is not None else AlternativeRecord(PARKED, 0, worth)
            for one, worth in schedule.weighed.get(job_id, ())
        ),
    )

"""Begins planned resizes, advances open resizes and stores decisions. In advise mode it only prints commands."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path

from ones_db import AlternativeRecord, DecisionJobRecord, DecisionRecord, NotLeader, PromiseRecord, ResizeRecord
from ones_db.reasons import CAUSES, NO_REASON, SITE_LIMITS, Reason, reason
from ones_db.shape import PARKED
from ones_wrapper.protocol import Order, encode
from ones_wrapper.protocol.slurm_commands import (
    NO_LICENSES,
    again_command,
    defer_command,
    hold_command,
    release_commands,
    requeue_command,
    reshape_command,
    throttle_command,
)
from slurm_ones.act.blocks import guests_among
from slurm_ones.act.orders import OrderError, order_path
from slurm_ones.act.resize import ResizeMachine
from slurm_ones.act.transitions import State, first_state
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Observation, WholeJob, guests_of
from slurm_ones.policy.contract import JobView, Schedule
from slurm_ones.policy.tables import expected_gain
from slurm_ones.rules.blocks import Moves
from slurm_ones.rules.gate import JobRules
from slurm_ones.rules.plan import PartitionPlan, PartitionSchedule, PlannedChange, ResizePlan
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import Queue, SlurmJob, Task
from slurm_ones.text import plain
from slurm_ones.untrusted_files import NotBelieved

log = logging.getLogger(__name__)

NO_QUEUES: Mapping[int, Queue] = {}


class Actor:
    """Executor of plans. In advise mode it begins no change, and prints the commands for each instead."""

    def __init__(
        self,
        machine: ResizeMachine,
        settings: Settings,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        self._machine = machine
        self._deferrals, self._orders = machine.deferrals, machine.orders
        self._store, self._clock = machine.store, machine.clock
        self._settings = settings
        self._guest_queues = guests_of(settings)
        self._say = say
        self._ordered: dict[int, tuple[int | None, int]] = {}
        """Batch and number of each job's last order that changed only the batch, by job id."""
        self._advised: dict[int, Hashable] = {}
        self._written: dict[str, tuple[tuple[object, ...], float]] = {}
        """Key of each partition's last stored decision, and the Unix time from which an equal one is stored again."""
        self.outcomes: dict[int, Reason] = {}
        """Outcome of the last tick's decision for each job, by job id."""

    @property
    def acting(self) -> bool:
        return self._settings.mode == "act"

    def advance(self, *, only: Collection[State] = tuple(State)) -> int:
        """Advance each open resize that is in one of the states `only` as far as possible. Return how many of these are
        still open. Raises `Unreachable` and `NotLeader`.

        Advise mode does this too: a companion in act mode may have left resizes open.
        """
        left = 0
        for resize in self._store.open_resizes():
            if State(resize.state) not in only:
                continue
            try:
                state = State(self._machine.advance(resize).state)
                left += state in only and not state.final
            except (Unreachable, NotLeader):
                raise
            except Exception:
                # A job for which this fails must not keep other users' jobs held.
                log.exception("job %d: its resize could not be advanced in this tick", resize.job_id)
                left += 1
        return left

    def act(
        self, plans: Sequence[PartitionPlan], seen: Observation, *, kept: Collection[int] = ()
    ) -> list[PlannedChange]:
        """Begin the planned changes and return them. With a stop file none begins; in advise mode commands are only
        printed.

        Also defer the jobs that the plans park and the jobs `kept`, which carriers train. Release all other deferred
        jobs. Raises `Unreachable`.
        """
        if self.acting and not self._settings.stopped:
            self._orders.mark()
        begun: list[PlannedChange] = []
        self.outcomes = {}
        deferred, queued = {*kept}, set[int]()
        for one in plans:
            made = one.plan
            if self._settings.stopped:
                stopped = reason("stop_file", path=str(self._settings.stop_file))
                made = ResizePlan((), dict.fromkeys(made.outcomes, stopped))
            else:
                self._promise(one.decided)
            self.outcomes |= {**one.decided.schedule.refused, **made.outcomes}
            decision = self._write(one, made)
            for change in made.begin:
                self._begin(change, decision, one.decided.views.get(change.job_id))
            begun += made.begin
            deferred |= made.deferred
            queued |= made.queued
        self._reconcile(deferred, queued, seen)
        self._forget(seen)
        return begun

    def _promise(self, one: PartitionSchedule) -> None:
        if not (self.acting and one.schedule.promises):
            return
        now = self._clock()
        self._store.record_promises(
            PromiseRecord(job_id, deadline, now, said.given, said.reason)
            for job_id, said in one.schedule.promises.items()
            if (deadline := one.views[job_id].deadline) is not None
        )

    def _forget(self, seen: Observation) -> None:
        alive = {id_ for job in seen.snapshot.jobs.values() if not job.ended for id_ in (job.job_id, job.array_id)}
        for remembered in (self._ordered, self._advised):
            for job_id in remembered.keys() - alive:
                del remembered[job_id]
        if self.acting:
            self._orders.clear(alive)

    def leave(self) -> None:
        """End all deferrals, and remove the mark that the spool is in use. Raises `Unreachable`."""
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
        jobs: dict[int, SlurmJob | WholeJob] = {**seen.snapshot.jobs}
        jobs |= {job_id: one.job for job_id, one in seen.elastic.items()}
        deferred |= {job_id for job_id in queued if self._deferrals.ours(jobs[job_id])}
        # In advise mode too: jobs that a companion in act mode deferred must not wait until the deferral ends.
        self._deferrals.reconcile(deferred, jobs, {resize.job_id for resize in self._store.open_resizes()})

    def _advise(self, job_id: int, advice: Hashable, lines: list[str]) -> None:
        if self._advised.get(job_id) != advice:
            self._advised[job_id] = advice
            for line in lines:
                self._say(line)

    def _begin(self, change: PlannedChange, decision: int | None, view: JobView | None) -> None:
        job = change.elastic.job
        if not self.acting:
            lines = [f"# job {job.job_id} ({job.user}): {change}"]
            number, guests = self._orders.next_number(job), self._guests(change)
            queue = self._guest_queues.get(change.elastic.partition, Queue())._replace(licenses=NO_LICENSES)
            queues = dict.fromkeys(guests, queue)
            try:
                lines += commands(change, number, self._settings.spool, self._settings.deferral_s, queues=queues)
            except NotBelieved as error:
                log.warning("job %d: its commands cannot be printed: %s", job.job_id, error)
                return
            self._advise(job.job_id, hash(change), lines)
            return
        if not change.resizes:
            self._order_batch(change)
            return
        number = self._orders.next_number(job)
        moves = change.moves or Moves()
        if change.moves is None and job.by_blocks and isinstance(job.key, Task):
            # If the blocks of a waiting job were changed separately, only one task changes.
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
            state=first_state(change.mechanism, running=job.running).value,
            started=self._clock(),
            decision_id=decision,
            order_number=number,
            deadline=self._clock() + self._settings.resize.drain_timeout_s,
            mechanism=change.mechanism,
            added=moves.added,
            dropped=moves.dropped,
            held=change.to_hold,
            guests=self._guests(change),
        )
        record = self._store.begin_resize(record)
        self._machine.new.add(record.id)
        if (gain := expected_gain(view, change.new, change.new_batch, change.new_kind)) is not None:
            self._machine.gains[record.id] = gain
        self._machine.advance(record)

    def _guests(self, change: PlannedChange) -> tuple[int, ...]:
        if change.moves is None or change.elastic.partition not in self._guest_queues:
            return ()
        known = self._store.jobs([change.job_id])[change.job_id]
        return guests_among(change.elastic, change.moves, known.requested_shape.gpus)

    def _order_batch(self, change: PlannedChange) -> None:
        job, batch = change.elastic.job, change.new_batch
        # A later order, such as that of a resize taken back, may have asked for another batch.
        if self._ordered.get(job.job_id) == (batch, self._orders.last_number(job)):
            return
        try:
            tasks = job.base_first(change.blocks or ()) or None
            order = Order(self._orders.next_number(job), job.restart, batch, blocks=tasks)
            self._orders.write(job, order)
            self._ordered[job.job_id] = batch, order.number
        except OrderError as error:
            log.warning("job %d: no batch could be ordered: %s", job.job_id, error)

    def _write(self, one: PartitionPlan, made: ResizePlan) -> int | None:
        """Store the partition's decision, unless it equals the last one; return its id or None. An equal decision is
        stored again once a time in the last one's reasons has passed."""
        decided, acted = one.decided, made.deferred | {change.job_id for change in made.begin}
        records = tuple(_record(job, decided.schedule, made, job.elastic.job.job_id in acted) for job in one.jobs)
        # Reasons are compared by code, since figures in them change each tick. A changed limit of the site counts.
        limited = {id_: why for id_, why in made.outcomes.items() if why.code in SITE_LIMITS}
        refused = {**decided.schedule.refused, **limited}
        gist = tuple(
            (r.job_id, r.shape, r.batch, r.from_shape, r.acted, _keeps(r), r.outcome.code, refused.get(r.job_id))
            for r in records
        )
        now, (written, until) = self._clock(), self._written.get(decided.partition, ((), math.inf))
        if (gist == written and now < until) or not records:
            return None
        moments = (_until(why) for r in records for why in (r.reason, r.outcome))
        self._written[decided.partition] = gist, min((at for at in moments if at > now), default=math.inf)
        return self._store.add_decision(
            DecisionRecord(
                time=now,
                policy=self._settings.policy,
                mode=self._settings.mode,
                seconds=decided.seconds,
                score=decided.schedule.score,
                jobs=records,
            )
        )


def _keeps(record: DecisionJobRecord) -> str:
    return record.reason.code if record.reason.code in CAUSES else ""


def _until(why: Reason) -> float:
    return float(dict(why.arguments).get("until", math.inf))


def _record(job: JobRules, schedule: Schedule, made: ResizePlan, acted: bool) -> DecisionJobRecord:
    elastic = job.elastic
    job_id, running = elastic.job.job_id, elastic.job.running
    allocation = schedule.allocations.get(job_id)
    return DecisionJobRecord(
        job_id=job_id,
        shape=allocation.shape if allocation else None,
        batch=job.batch_of(allocation),
        reason=schedule.reasons.get(job_id) or elastic.refusal or NO_REASON,
        from_shape=elastic.shape if running else None,
        from_batch=job.history.batch if running and job.history else None,
        acted=acted,
        outcome=made.outcomes.get(job_id) or schedule.refused.get(job_id) or NO_REASON,
        alternatives=tuple(
            AlternativeRecord(one.shape if one is not None else PARKED, job.batch_of(one) or 0, worth)
            for one, worth in schedule.weighed.get(job_id, ())
        ),
    )


# -- the commands of a change, for people ------------------------------------------------------------------------------


def waiting_commands(job_id: int, defer_s: float) -> list[str]:
    """Return the shell lines that keep a waiting job from starting."""
    return [
        f"# it starts by itself after {defer_s:.0f} s, unless this is repeated:",
        shlex.join(defer_command(job_id, f"now+{defer_s:.0f}")),
    ]


def commands(
    change: PlannedChange,
    number: int,
    spool: Path | None,
    defer_s: float,
    *,
    queues: Mapping[int, Queue] = NO_QUEUES,
) -> list[str]:
    """Return the shell lines by which a person can carry out the change, with comments that say when to run each.
    `queues` has the queue of each joining guest block, by task number."""
    job, path = change.elastic.job, order_path(change.elastic.job, spool)

    def order(drain: bool) -> str:
        text = json.dumps(json.loads(encode(Order(number, job.restart, change.new_batch, drain, change.blocks))))
        quoted = shlex.quote(str(path))
        return f"printf '%s\\n' {shlex.quote(text)} > {quoted}.new && mv {quoted}.new {quoted}"

    if not change.resizes:
        return [order(drain=False)]
    if change.moves is not None:
        return _moves(change, change.moves, order(drain=False), queues)
    if change.parks:
        end = [*waiting_commands(job.job_id, defer_s), *map(shlex.join, release_commands(job.job_id))]
    else:
        whole, others = change.elastic.whole_nodes, job.first.other_gres
        reshape = reshape_command(job.job_id, change.new, whole_nodes=whole, kind=change.new_kind, others=others)
        start = "" if job.pending else "now"
        end = [shlex.join(reshape), *map(shlex.join, release_commands(job.job_id, start=start))]
    if job.pending:
        return [shlex.join(hold_command(job.job_id)), *end]
    return [
        order(drain=True),
        # The owner chose this name. A line break in it must not begin a command.
        f"# wait until {plain(str(path.parent))} reports the checkpoint, then within a minute:",
        shlex.join(requeue_command(job.job_id)),
        f"# wait until job {job.job_id} is PENDING and no longer COMPLETING, then:",
        *end,
    ]


def _moves(change: PlannedChange, moves: Moves, order: str, queues: Mapping[int, Queue]) -> list[str]:
    """Return the shell lines by which blocks join and leave, in the order in which to run them."""
    job_id = change.job_id
    lines = [shlex.join(hold_command(Task(job_id, task))) for task in change.to_hold]
    if moves.added and any(block.throttle for block in change.elastic.job.blocks):
        lines.append(shlex.join(throttle_command(job_id, 0)))
    tasks = change.elastic.job.tasks
    for task, shape in moves.added:
        if not tasks[task].pending:
            lines.append(shlex.join(again_command(Task(job_id, task), hold=True)))
        key, whole, queue = Task(job_id, task), change.elastic.whole_nodes, queues.get(task, Queue())
        queue, others = queue.other_than(tasks[task]), tasks[task].other_gres
        reshape = reshape_command(key, shape, whole_nodes=whole, kind=change.new_kind, queue=queue, others=others)
        lines.append(shlex.join(reshape))
    lines.append(order)
    for task, _ in moves.added:
        start = "" if tasks[task].pending and not tasks[task].restart else "now"
        lines += map(shlex.join, release_commands(Task(job_id, task), start=start))
    if moves.dropped:
        lines.append(
            f"# when tasks {','.join(map(str, moves.dropped))} have completed, so that they can be used again:"
        )
        lines += [shlex.join(again_command(Task(job_id, task), hold=True)) for task in moves.dropped]
    return lines

"""A simulated training job. Like a job with the wrapper, it launches, trains, reports, writes checkpoints and obeys
orders.

A job consists of one or more blocks. A plain job has one block, its run. In a job of blocks each block is a task of a
Slurm array, and blocks join and leave while the job trains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from ones_wrapper.protocol import DRAIN_WAIT_S, Order
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Event, Timeline
from slurm_ones.simulate.spec import NONE, Slowdown
from slurm_ones.simulate.training.application import Application, Hot, Position, Submission, TrainingCurve
from slurm_ones.simulate.training.reports import JobFiles, Reporter

ORDER_POLL_S = 0.1
"""Interval in seconds at which a drained job checks for a newer order."""
TERMINATED = 128 + 15
"""Exit code of a run that was ended by SIGTERM."""
PEER_LOST = 103
"""Exit code of a run that ended because another rank was lost."""
LOOK_S = 0.5
"""Seconds until a block exits because the current order does not name it, or because the job is over."""


class Phase(str, Enum):
    """Phase of a job's run, from launch to end."""

    GONE = "gone"
    LAUNCHING = "launching"
    TRAINING = "training"
    SAVING = "saving"
    DRAINED = "drained"
    SWITCHING = "switching"
    """Training pauses while blocks of the job join or leave."""
    RECOVERING = "recovering"
    """A block was lost, and training pauses until the remaining blocks form a new group."""


@dataclass
class Interval:
    """Training steps at one size and batch, from a position on."""

    begun: float
    at: Position
    batch: int
    rate: float
    """Throughput in samples/s."""

    def samples(self, now: float, most: int) -> int:
        """Return the samples used in whole steps up to `now`, at most `most`, the number left in the epoch."""
        steps = math.floor((now - self.begun) * self.rate / self.batch + 1e-6)
        return min(steps * self.batch, most)

    def boundary(self, time: float, most: int) -> int:
        """Return the samples used up to the first step boundary after `time`. The end of the epoch, after `most`
        samples, is the last boundary."""
        if (time - self.begun) * self.rate >= most:
            return most
        steps = max(math.ceil((time - self.begun) * self.rate / self.batch - 1e-6), 1)
        return min(steps * self.batch, most)


class Training:
    """Training of one job over all its runs. In a job of blocks, a run is a term.

    Without `files` the job behaves like a script without the wrapper: it writes no reports and no checkpoints, and
    obeys no orders.
    """

    def __init__(
        self,
        submission: Submission,
        application: Application,
        files: JobFiles | None,
        timeline: Timeline,
        settings: ClusterSettings,
        start_s: float,
        rng: np.random.Generator,
        hot: Hot | None = None,
    ) -> None:
        """Create the training. `start_s` is the duration of a start in seconds. `hot` has the costs of changes in a job
        of blocks; it is None for a plain job."""
        self.hot = hot
        self.submission = submission
        self.application = application
        self.files = files
        self.curve = TrainingCurve(application, submission.epochs)
        self.finished = False
        self.trained_s = 0.0
        """GPU-seconds spent training so far."""
        self.misplaced: list[str] = []
        """Description of each start on a number of GPUs that the job's strategy cannot use."""
        self.lost_samples = 0
        """Number of samples that were used but are not in a checkpoint, so that they were used again."""
        self.phase = Phase.GONE
        self.batch = 0
        """Global batch in use."""
        self.exited: Callable[[int, int], None] = lambda task, code: None
        """Called with task and exit code when a block ends by itself."""
        self.over: Callable[[], None] = lambda: None
        """Called when the training has ended, to cancel the job's waiting tasks."""
        self.on_switch: Callable[[float], None] = lambda pause_s: None
        """Called when training pauses for a change of membership, with the seconds of the pause."""
        self.generation = 0
        self.members: tuple[int, ...] = ()
        """Task numbers of the blocks that train together, in rank order. The first is the leader."""
        self._gone: tuple[int, frozenset[int]] = 0, frozenset()
        """Number of the current order, and the tasks that ended after it. The job waits for such a task only if it
        restarts."""
        self.speeds: Mapping[str, float] = {}
        """Relative speeds of the slow nodes, by name."""
        self.kinds: Mapping[str, str] = {}
        """Kind of GPU of each node; empty if all are equal."""
        self.on: Mapping[str, Application] = {"": application}
        """Application on each kind of GPU."""
        self.nodes: Mapping[str, int] = {}
        """GPUs on each node with which the job trains, or last trained."""
        self.changes: int | None = None
        """Number of changes of the job's GPUs; None if they are to be counted from Slurm's records."""
        self._timeline = timeline
        self._settings = settings
        self._start_s = start_s
        self._reporter = Reporter(self.curve, files, timeline, settings, rng, submission.declares)
        if hot is not None:
            self._reporter.spec = replace(self._reporter.spec, hot=not hot.terms)
        least = application.min_batch or application.base_batch
        self.requested_batch = min(max(submission.batch, least), application.max_batch)
        self.durable = Position(wanted=self.requested_batch)
        """Position stored in the newest checkpoint."""
        self._position = self.durable
        self.term = -1
        """Number of the present run or, in a job of blocks, of the present term; -1 before the first."""
        self.blocks: dict[int, SimulatedBlock] = {}
        """Running blocks, by task number."""
        self._leader = -1
        self._ordered_at = 0.0
        """Time at which the job first read its current order."""
        self._joining: tuple[int, ...] = ()
        """Members after the change that is under way; empty if none is."""
        self._placement: tuple[int, ...] = ()
        self._slowdown = NONE
        self._event: Event | None = None
        self._interval = Interval(0.0, self.durable, 1, 1.0)
        self._obeyed = 0
        self._checkpoint_at = math.inf
        self._order_due = False

    # -- what Slurm does with it ---------------------------------------------------------------------------------

    def program(self, task: int = 0) -> BlockProgram:
        """Return the program that Slurm runs for this task; for a plain job, task 0 is the whole job."""
        return BlockProgram(self, task)

    def block_starts(self, block: SimulatedBlock) -> None:
        """Start a block: a task of the array, or the run of a plain job."""
        self.blocks[block.task] = block
        self._gone = self._gone[0], self._gone[1] - {block.task}
        if self.finished:
            self._leave_soon(block)
        elif not self.members:
            self._found(block.task)
        else:
            # Whoever launches first leads, and the others look for it once they have launched.
            self._prepare(block)

    def block_stops(self, task: int, *, killed: bool) -> float:
        """Stop a block, and return the seconds until its processes end. With `killed`, the other blocks get no notice
        of it."""
        block = self.blocks.pop(task, None)
        if block is None:
            return self._settings.stop * self._start_s
        if block.event is not None:
            block.event.cancel()
        if task in self.members:
            self._lose(task, killed=killed)
        elif task in self._joining:
            self._drop_switch()
        return self._settings.stop * self._start_s

    def lose_store(self) -> None:
        """Make the blocks lose the store through which they communicate. They begin a new term from memory."""
        if self.phase not in (Phase.GONE, Phase.LAUNCHING, Phase.RECOVERING):
            self._count_until_now()
            self._recover()

    # -- founding ------------------------------------------------------------------------------------------------

    def _found(self, task: int) -> None:
        """Let this block begin a term from the last checkpoint, because there is no leader."""
        block = self.blocks[task]
        self.members, self._joining = (task,), ()
        self._position = self.durable
        self.phase = Phase.LAUNCHING
        self._set_placement()
        if self.hot is None:
            self._check_size()
        launch = 0.0 if block.launched else self._launch_s
        if block.event is not None:
            block.event.cancel()
        self._then(self._timeline.now + launch + self._load_s, self._founded)

    def _founded(self) -> None:
        block = self.blocks[self.members[0]]
        launched, block.launched = block.launched, True
        self._begin_term(0.0 if launched else self._launch_s, self._load_s, restored=True)
        if self.hot is not None:
            self._report_membership("first")
            self._look_soon()

    def _begin_term(self, launch_s: float, load_s: float, *, restored: bool) -> None:
        """Begin a term: the leader writes the first report, and training starts."""
        if self.hot is None:
            self.term = self.blocks[self.members[0]].restart
        else:
            self.term += 1
            self._reporter.spec = replace(self._reporter.spec, term=self.term)
            self.generation += 1
        self._leader = self.members[0]
        self._obeyed = 0
        self._read_orders()
        self._reporter.hello(
            self._position, self.batch, self._placement, launch_s, load_s, self.term, restored=restored
        )
        self._timeline.changed = True
        self._checkpoint_at = self._timeline.now + self._settings.checkpoint_s if self.files is not None else math.inf
        self._train()

    def _read_orders(self) -> None:
        """Read the current order at the start of a term. A new batch takes effect at once, a drain at the next step
        boundary."""
        self._order_due = False
        if self.files is not None:
            before = self.files.order
            self.files.reread_order()
            self._see_order(before)
        order = self._believed()
        if order is not None:
            if order.batch is not None and self._complete(order):
                self._position = replace(self._position, wanted=order.batch)
            self._order_due = order.drain and order.restart == self.term
            self._obeyed = order.number - (self._order_due or not self._complete(order))
        self.batch = self._in_force(self._position.wanted)

    # -- blocks that join and leave ------------------------------------------------------------------------------

    def _prepare(self, block: SimulatedBlock) -> None:
        """Launch a block, so that it can join once it is ready. It exits if the current order does not name it."""
        if self.phase is not Phase.LAUNCHING and not self._named(block.task):
            self._leave_soon(block)
            return

        def ready() -> None:
            block.launched, block.ready_at, block.event = True, self._timeline.now, None
            if self.phase is not Phase.LAUNCHING and self._named(block.task) is False:
                self._leave_soon(block)
                return
            self._timeline.after(PATIENCE_S, self._look_soon)
            self._look_soon()

        block.event = self._timeline.after(self._launch_s, ready)

    def _named(self, task: int) -> bool | None:
        """Return True if the current order names this block, False if only other blocks, None if no blocks."""
        order = self._believed()
        return None if order is None or order.blocks is None else task in order.blocks

    def _leave_soon(self, block: SimulatedBlock) -> None:
        """Let a block exit by itself in `LOOK_S` seconds, because no order names it or the job is over."""
        if block.leaves:
            return
        block.leaves = True
        if block.event is not None:
            block.event.cancel()
        block.event = self._timeline.after(LOOK_S, lambda: self._exit(block.task))

    def _exit(self, task: int) -> None:
        del self.blocks[task]
        self.exited(task, 0)

    def _look_soon(self) -> None:
        if self.phase is Phase.TRAINING:
            self._order_due = True
            self._schedule_boundary()

    def _believed(self) -> Order | None:
        """Return the current order; None if there is none, or if it is for a later term."""
        order = self.files.order if self.files is not None else None
        return order if order is not None and order.restart <= max(self.term, 0) else None

    def _complete(self, order: Order) -> bool:
        return order.blocks is None or set(order.blocks) == set(self.members)

    def _plan(self) -> tuple[int, ...] | None:
        order = self._believed()
        wanted = order.blocks if order is not None else None
        if order is not None and wanted is not None and order.number == self._gone[0]:
            wanted = tuple(task for task in wanted if task not in self._gone[1]) or wanted
        return next_members(wanted, self.members, self.blocks, self._timeline.now)

    def _switches(self) -> bool:
        """Begin the change of membership that is due, if there is one. Return True if training pauses for it."""
        for block in [b for b in self.blocks.values() if b.launched and b.task not in self.members]:
            if self._named(block.task) is False:
                self._leave_soon(block)
        plan = self._plan()
        if plan is None:
            return False
        self._reporter.throughput(self._position, self.batch)
        self._switch(plan, "order")
        return True

    def _switch(self, plan: tuple[int, ...], why: str) -> None:
        """Pause training for a change of membership to `plan`. `why` is the reason in the report."""
        self.phase, self._joining = Phase.SWITCHING, plan
        assert self.hot is not None
        new, hot = set(plan) - set(self.members), self.hot
        sent = hot.sent_bytes(self.application) if new else 0
        transfer_s = sent / hot.bytes_per_s
        pause_s = hot.pause_s + transfer_s if new else hot.shrink_pause_s
        self._then(
            self._timeline.now + pause_s,
            lambda: self._switched(why, pause_s, sent * len(new), transfer_s if new else 0.0),
        )
        self.on_switch(pause_s)

    def _switched(self, why: str, pause_s: float, sent: int, transfer_s: float) -> None:
        """Put the new membership in force, at the end of the pause."""
        before, self.members, self._joining = self.members, self._joining, ()
        ready_s = max((self.blocks[task].ready_at for task in self.members if task not in before), default=0.0)
        ready_s = max(ready_s - self._ordered_at, 0.0) if ready_s else 0.0
        order = self._believed() if why == "order" else None
        self._set_placement()
        if order is not None and order.batch is not None and self._complete(order):
            self._position = replace(self._position, wanted=order.batch)
        changed = self._in_force(self._position.wanted) != self.batch
        self.batch = self._in_force(self._position.wanted)
        if order is not None and self._complete(order) and not order.drain:
            self._obeyed = order.number
        if self._leader != self.members[0]:
            self._reporter.bye(self._position, "moved")
            self._begin_term(0.0, 0.0, restored=False)
        else:
            self.generation += 1
            if changed and order is not None:
                self._reporter.batch(self._position, self.batch, order.number)
        number = order.number if order is not None else None
        self._report_membership(why, pause_s, bytes=sent, transfer_s=transfer_s, ready_s=ready_s, order=number)
        for task in set(before) - set(self.members):
            if task in self.blocks:
                self._exit(task)
        self._timeline.changed = True
        self._train()
        self._look_soon()

    def _report_membership(self, why: str, pause_s: float = 0.0, **change: Any) -> None:
        restarts = tuple(self.blocks[task].restart for task in self.members)
        change |= {"generation": self.generation, "blocks": self.members, "restarts": restarts}
        self._reporter.membership(self._position, self.batch, self._placement, why=why, pause_s=pause_s, **change)

    def _set_placement(self) -> None:
        gpus: Counter[str] = Counter()
        for task in self.members:
            gpus.update(self.blocks[task].gpus)
        self._hold(gpus)

    # -- blocks that are lost ------------------------------------------------------------------------------------

    def _lose(self, task: int, *, killed: bool) -> None:
        """Handle the loss of a member; the remaining members, if any, continue from memory."""
        self._count_until_now()
        self.members = tuple(member for member in self.members if member != task)
        if not self.members:
            self._all_gone()
        elif killed or self.phase in (Phase.SWITCHING, Phase.RECOVERING):
            self._recover()
        else:
            self._reporter.throughput(self._position, self.batch)
            order = self._believed()
            if order is not None:
                before = self._gone[1] if order.number == self._gone[0] else frozenset()
                self._gone = order.number, before | {task}
            if order is not None and order.blocks is not None and self._leader != self.members[0]:
                self.members = tuple(led_first(self.members, order.blocks))
            self._switch(self.members, "leaving")

    def _drop_switch(self) -> None:
        self._joining = ()
        self._train()
        self._look_soon()

    def _all_gone(self) -> None:
        """Go back to the last checkpoint, because no member is left. If another block is starting, it begins a term
        from this checkpoint."""
        if self.phase is Phase.DRAINED:
            self._reporter.bye(self._position, "drained", TERMINATED)
        self.lost_samples += self.curve.used(self._position) - self.curve.used(self.durable)
        self.members, self._joining = (), ()
        self._ended()
        waiting = sorted(self.blocks.values(), key=lambda block: (not block.launched, block.task))
        if waiting:
            self._found(waiting[0].task)

    def _recover(self) -> None:
        """Write a checkpoint from memory, unless the disk fails. Then one block begins a term from the last checkpoint,
        and all others join it."""
        assert self.hot is not None and self.files is not None
        if self.phase is not Phase.RECOVERING:
            with suppress(OSError):
                name = self.files.checkpoint(self._position.step)
                self.durable = self._position
                if self._leader in self.members:
                    self._reporter.throughput(self._position, self.batch)
                    self._reporter.checkpoint(self._position, name, 0.0, None)
                    self._reporter.bye(self._position, "error", PEER_LOST)
        self.phase, self._joining = Phase.RECOVERING, ()
        self._then(self._timeline.now + self.hot.recover_s, self._recovered)

    def _recovered(self) -> None:
        self.lost_samples += self.curve.used(self._position) - self.curve.used(self.durable)
        self._position = self.durable
        now, (first, *others) = self._timeline.now, self.members
        for task in others:
            self.blocks[task].launched, self.blocks[task].ready_at = True, now
        self.members = (first,)
        self._set_placement()
        self._begin_term(0.0, 0.0, restored=True)
        self._report_membership("first", self.hot.recover_s if self.hot is not None else 0.0)
        self._timeline.after(PATIENCE_S, self._look_soon)
        self._look_soon()

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Present position, counting whole steps only."""
        if self.phase is not Phase.TRAINING:
            return self._position if self.phase is not Phase.GONE else self.durable
        return self._after(self._interval.samples(self._timeline.now, self._left))

    @property
    def drained_for(self) -> int | None:
        """Number of the drain order after which the job waits for its requeue; None if it is not drained."""
        return self._obeyed if self.phase is Phase.DRAINED else None

    @property
    def goodput(self) -> float:
        """Present goodput in progress/s; 0 if the job does not train."""
        if self.phase is not Phase.TRAINING:
            return 0.0
        app = self.application
        return self._interval.rate * float(app.efficiencies(self.batch)[app.epoch(self._position.progress)])

    @property
    def gpus(self) -> int:
        """Number of ranks that train."""
        return sum(self._placement)

    @property
    def _launch_s(self) -> float:
        return self._start_s if self.hot is not None else self._settings.launch * self._start_s

    @property
    def _load_s(self) -> float:
        return self._settings.load * self._start_s if self.durable.step else 0.0

    @property
    def _left(self) -> int:
        return self.curve.dataset - self._interval.at.cursor

    def _hold(self, gpus: Mapping[str, int]) -> None:
        self.nodes, self._placement = dict(gpus), tuple(gpus.values())
        slowest = min((self.speeds.get(name, 1.0) for name in gpus), default=1.0)
        self._slowdown = Slowdown(1.0 / slowest, self._slowdown.exchange)

    def _then(self, time: float, action: Callable[[], None]) -> None:
        if self._event is not None:
            self._event.cancel()
        self._event = self._timeline.at(time, action)

    def _ended(self) -> None:
        if self._event is not None:
            self._event.cancel()
        self.phase = Phase.GONE

    def _in_force(self, wanted: int) -> int:
        """Return the batch that the job uses for a requested batch `wanted`, computed as in the wrapper.

        It is rounded to a batch that the ranks can share. It does not change if the strategy has fixed the batch.
        """
        limits = self.application.limits(self._position.progress)
        if limits is not None and limits.batch_fixed and self.batch:
            return self.batch
        row = limits.at(self.gpus) if limits is not None else None
        batch = max(1, min(wanted, self.application.max_batch))
        return max(batch // row.quantum, 1) * row.quantum if row is not None else batch

    def _check_size(self) -> None:
        """Note a start on a number of GPUs that the strategy cannot use."""
        limits = self.application.limits(self.durable.progress)
        if limits is None:
            return
        row = limits.at(self.gpus)
        parted = row is not None and len(self._placement) > 1 and any(gpus % row.together for gpus in self._placement)
        if row is None or parted:
            self.misplaced.append(f"{limits.strategy} on {'+'.join(map(str, self._placement))} GPUs")

    # -- training ------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self.phase = Phase.TRAINING
        self._reporter.update_spec(self._position)
        # Of several kinds of GPU the slowest sets the pace.
        rate = min(self.speed_on(kind) for kind in {self.kinds.get(name, "") for name in self.nodes})
        self._interval = Interval(self._timeline.now, self._position, self.batch, rate)
        self._schedule_boundary()

    def _schedule_boundary(self) -> None:
        """Schedule the next step boundary at which something is due, such as a report, a checkpoint or an order."""
        interval, left = self._interval, self._left
        due = [self._reporter.due, self._checkpoint_at]
        if self._order_due:
            due.append(self._timeline.now)
        samples = interval.boundary(min(due), left)
        to_end = self.curve.samples_left(interval.at, self.batch)
        samples = min(samples, max(math.ceil(to_end / self.batch - 1e-9), 1) * self.batch, left)
        self._then(interval.begun + samples / interval.rate, lambda: self._boundary(samples))

    def _after(self, samples: int) -> Position:
        return self.curve.use(self._interval.at, samples, self.batch, math.ceil(samples / self.batch))

    def _count_training(self, samples: int) -> None:
        now = self._timeline.now
        self._position = self._after(samples)
        self.trained_s += (now - self._interval.begun) * self.gpus
        self._reporter.ran(now - self._interval.begun)
        self._interval = Interval(now, self._position, self.batch, self._interval.rate)

    def _boundary(self, samples: int) -> None:
        """Do what is due at this step boundary."""
        now = self._timeline.now
        self._count_training(samples)
        gives_up = False
        if self._position.cursor >= self.curve.dataset:
            gives_up = self._end_epoch()
        if gives_up or self.curve.finished(self._position):
            self._finish()
            return
        if self._order_due:
            self._order_due = False
            if self._obey():
                return
        if now >= self._checkpoint_at - 1e-6:
            self._save(self._settings.stall_s, None)
            return
        if now >= self._reporter.due - 1e-6:
            self._reporter.throughput(self._position, self.batch)
        self._train()

    def _end_epoch(self) -> bool:
        """Report the end of an epoch, and begin the next. Return True if early stopping ends the training."""
        ended = self._position
        self._position, gives_up = self.curve.next_pass(ended)
        self._reporter.epoch(ended, self.batch)
        return gives_up

    def _finish(self) -> None:
        self._reporter.throughput(self._position, self.batch)
        self._reporter.bye(self._position, "finished")
        self.durable = self._position
        self.finished = True
        self._ended()
        self.over()
        self.members = ()
        for task in [*self.blocks]:
            block = self.blocks[task]
            if block.event is not None:
                block.event.cancel()
            self._exit(task)

    # -- what an oracle does with it -----------------------------------------------------------------------------

    def speed_on(self, kind: str) -> float:
        """Return the samples/s that the job would have with all its GPUs of this kind."""
        app = self.on[kind].at(self._position.progress)
        return app.placed_speed(self._placement, float(self.batch or self._position.wanted), self._slowdown)

    def save_at_once(self, wanted: int) -> None:
        """Write a checkpoint in no time. The next run begins with the batch `wanted`."""
        self._count_until_now()
        self.durable = self._position = replace(self._position, wanted=wanted)

    def go_on(self, gpus: Mapping[str, int], batch: int, pause_s: float) -> None:
        """Pause for `pause_s` seconds, then train with these GPUs and this batch."""
        self._count_until_now()
        self._hold(gpus)
        self.phase = Phase.SWITCHING
        self._position = replace(self._position, wanted=batch)
        self.batch = self._in_force(batch)
        self._then(self._timeline.now + pause_s, self._train)

    def adjust(self, batch: int, exchange: float) -> None:
        """Train with this batch, and with gradient exchanges that take `exchange` times as long, from now on."""
        if (batch, exchange) == (self._position.wanted, self._slowdown.exchange):
            return
        self._count_until_now()
        self._slowdown = self._slowdown._replace(exchange=exchange)
        self._position = replace(self._position, wanted=batch)
        if self.phase is Phase.TRAINING:
            self.batch = self._in_force(batch)
            self._train()

    def _count_until_now(self) -> None:
        if self.phase is Phase.TRAINING:
            self._count_training(self._interval.samples(self._timeline.now, self._left))

    # -- orders and checkpoints ----------------------------------------------------------------------------------

    def check_orders(self) -> None:
        """Read a new order, if there is one. The world calls this before virtual time passes."""
        if self.files is None or self.phase in (Phase.GONE, Phase.LAUNCHING):
            return
        before = self.files.order
        if not self.files.newer_order():
            return
        self._see_order(before)
        if self.phase is Phase.TRAINING:
            self._look_soon()
        elif self.phase is Phase.DRAINED and self._new_order() is not None:
            self._then(self._timeline.now + ORDER_POLL_S, self._resume)

    def _see_order(self, before: Order | None) -> None:
        order = self.files.order if self.files is not None else None
        if order is not None and (before is None or order.number != before.number):
            self._ordered_at = self._timeline.now

    def _new_order(self) -> Order | None:
        order = self.files.order if self.files is not None else None
        is_new = order is not None and order.restart <= self.term and order.number > self._obeyed
        return order if is_new else None

    def _resume(self) -> None:
        """Let a drained job train again, because a newer order came or its wait is over."""
        self._order_due = self._new_order() is not None
        self._train()

    def _obey(self) -> bool:
        """Carry out the current order. Return True if training pauses for it."""
        if self.hot is not None and self._switches():
            return True
        order = self._new_order()
        if order is None or not self._complete(order):
            return False
        self._obeyed = order.number
        if order.batch is not None:
            self._change_batch(order.batch, order.number)
        if order.drain and order.restart == self.term:
            self._save(self._settings.save * self._start_s, order.number)
            return True
        return False

    def _change_batch(self, wanted: int, number: int) -> None:
        self._reporter.throughput(self._position, self.batch)
        self._position = replace(self._position, wanted=wanted)
        self.batch = self._in_force(wanted)
        self._reporter.batch(self._position, self.batch, number)

    def _save(self, seconds: float, order: int | None) -> None:
        self._reporter.throughput(self._position, self.batch)
        self.phase = Phase.SAVING
        self._then(self._timeline.now + seconds, lambda: self._saved(seconds, order))

    def _saved(self, seconds: float, order: int | None) -> None:
        assert self.files is not None
        now, at = self._timeline.now, self._position
        try:
            name = self.files.checkpoint(at.step)
        except OSError:
            # As the wrapper does where its disk is full: it says nothing and trains on.
            self._checkpoint_at = now + self._settings.checkpoint_s
            self._resume()
            return
        self.durable = at
        self._reporter.checkpoint(at, name, seconds, order)
        self._checkpoint_at = now + self._settings.checkpoint_s
        if order is None:
            self._resume()
            return
        self._timeline.changed = True
        self.phase = Phase.DRAINED
        self._then(now + (DRAIN_WAIT_S if self._new_order() is None else ORDER_POLL_S), self._resume)


PATIENCE_S = 3.0
"""Longest time, in seconds, that a ready block waits for other new blocks before it joins."""


@dataclass
class SimulatedBlock:
    """A block: one start of a task of the array, or one run of a plain job."""

    task: int
    restart: int
    gpus: Mapping[str, int]
    launched: bool = False
    """True once the block has built its model, so that it can join others or begin a term."""
    ready_at: float = 0.0
    leaves: bool = False
    """True if the block is about to exit because it is not needed."""
    event: Event | None = None
    """Next scheduled event of the block."""


class BlockProgram:
    """Program that Slurm runs for one task of the array, or for a plain job."""

    def __init__(self, training: Training, task: int) -> None:
        self._training = training
        self._task = task

    @property
    def batch(self) -> int:
        return self._training.batch

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        self._training.block_starts(SimulatedBlock(self._task, restart, dict(gpus)))

    def stop(self, *, killed: bool = False) -> float:
        return self._training.block_stops(self._task, killed=killed)


def led_first(members: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return the members with their new leader first, after the old leader has left. The new leader is the first member
    that the order names."""
    first = min(members, key=[*wanted, *members].index)
    return [first, *(task for task in members if task != first)]


def next_members(
    wanted: Sequence[int] | None, members: Sequence[int], blocks: Mapping[int, SimulatedBlock], now: float
) -> tuple[int, ...] | None:
    """Return the members after the next change, in rank order; None if no change is due yet.

    Members that stay come first, then blocks that join. The change waits until all `wanted` blocks are ready, but at
    most `PATIENCE_S` seconds after the first one is. If no order names blocks, all ready blocks join.
    """
    if wanted is None:
        wanted = sorted({*blocks, *members})
    ready = [
        blocks[task]
        for task in wanted
        if task in blocks and task not in members and blocks[task].launched and not blocks[task].leaves
    ]
    missing = len(ready) < len(set(wanted) - set(members))
    if missing and not (ready and now >= min(block.ready_at for block in ready) + PATIENCE_S - 1e-6):
        return None
    stay = [task for task in members if missing or task in wanted]
    if stay and stay[0] != members[0]:
        stay = led_first(stay, wanted)
    plan = (*stay, *sorted(block.task for block in ready))
    return plan if plan and set(plan) != set(members) else None

"""A simulated training job of blocks: the tasks of its array join and leave while it trains, as the wrapper has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ones_wrapper.protocol import Order
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.training.blocks import PATIENCE_S, Block, BlockProgram, next_members
from slurm_ones.simulate.training.job_reports import JobFiles
from slurm_ones.simulate.training.mechanism import Hot
from slurm_ones.simulate.training.training import TERMINATED, Phase, Training

PEER_LOST = 103
"""Exit code of ranks whose peers are lost."""
LOOK_S = 0.5
"""From a block's start until it has seen that it is not wanted."""


class BlockTraining(Training):
    """One job over all its terms. A term is to it what a run is to another job: `_restart` counts them."""

    files: JobFiles

    def __init__(
        self,
        submission: Submission,
        application: Application,
        files: JobFiles,
        timeline: Timeline,
        settings: ClusterSettings,
        resize_s: float,
        rng: np.random.Generator,
        hot: Hot,
    ) -> None:
        super().__init__(submission, application, files, timeline, settings, resize_s, rng)
        self._reporter.spec = replace(self._reporter.spec, hot=True)
        self._hot = hot
        self.exit_block: Callable[[int, int], None] = lambda task, code: None
        """Called with task and exit code when a block ends by itself."""
        self.over: Callable[[], None] = lambda: None
        """Called at the end of the job: its tasks that wait are to be cancelled."""
        self.on_switch: Callable[[float], None] = lambda pause_s: None
        """Called when training begins to stand still for another membership, with the seconds that it will."""
        self.generation = 0
        self.members: tuple[int, ...] = ()
        """Tasks of the blocks that train together, in rank order; the first leads."""
        self.memberships = 0
        """Memberships that took effect."""
        self._blocks: dict[int, Block] = {}
        self._leader = -1
        self._restart = -1
        self._ordered_at = 0.0
        """When the order in force was first seen."""
        self._joining: tuple[int, ...] = ()
        """The next membership, while it is being switched to."""

    @property
    def term(self) -> int:
        """Of the leader; -1 before the first."""
        return self._restart

    @property
    def blocks(self) -> Mapping[int, Block]:
        """The blocks that run, by their tasks."""
        return self._blocks

    def program(self, task: int) -> BlockProgram:
        """What Slurm runs as that task."""
        return BlockProgram(self, task)

    @property
    def switching(self) -> bool:
        """Whether training stands still for another membership."""
        return self.phase is Phase.SWITCHING

    @property
    def _launch_s(self) -> float:
        """Seconds until a block is ready: of a job of blocks, that is what a resize means."""
        return self._resize_s

    # -- what Slurm does with its blocks -------------------------------------------------------------------------

    def block_starts(self, block: Block) -> None:
        """A task of the array runs."""
        self._blocks[block.task] = block
        if self.finished:
            self._leave_soon(block)
        elif not self.members:
            self._found(block.task)
        else:
            # Whoever launches first leads, and the others look for it once they have launched.
            self._prepare(block)

    def block_stops(self, task: int, *, killed: bool) -> float:
        """Its processes end; returns the seconds until the last is gone. One that is not `killed` says so to the
        others."""
        block = self._blocks.pop(task, None)
        if block is None:
            return self._settings.stop * self._resize_s
        if block.event is not None:
            block.event.cancel()
        if task in self.members:
            self._lose(task, killed=killed)
        elif task in self._joining:
            self._drop_switch()
        return self._settings.stop * self._resize_s

    def lose_store(self) -> None:
        """What the blocks found each other by is gone: they begin a new term from memory."""
        if self.phase not in (Phase.GONE, Phase.LAUNCHING, Phase.RECOVERING):
            self._count_until_now()
            self._recover()

    # -- founding ------------------------------------------------------------------------------------------------

    def _found(self, task: int) -> None:
        """Nobody leads: this block begins the next term from the last checkpoint, once it has launched."""
        block = self._blocks[task]
        self.members, self._joining = (task,), ()
        self._position = self.durable
        self.phase = Phase.LAUNCHING
        self._set_placement()
        launch = 0.0 if block.launched else self._launch_s
        if block.event is not None:
            block.event.cancel()
        self._then(self._timeline.now + launch + self._load_s, self._founded)

    def _founded(self) -> None:
        block = self._blocks[self.members[0]]
        launched, block.launched = block.launched, True
        self._begin_term(0.0 if launched else self._launch_s, self._load_s, restored=True)
        self._report_membership("first")
        self._look_soon()

    def _begin_term(self, launch_s: float, load_s: float, *, restored: bool) -> None:
        """The next leader says what the job is now, and trains on."""
        self._restart += 1
        self._reporter.spec = replace(self._reporter.spec, term=self._restart)
        self.generation += 1
        self._leader = self.members[0]
        self._obeyed = 0
        self._read_orders()
        self._reporter.hello(
            self._position, self.batch, self._placement, launch_s, load_s, self._restart, restored=restored
        )
        self._timeline.changed = True
        self._checkpoint_at = self._timeline.now + self._settings.checkpoint_s
        self._train()

    def _read_orders(self) -> None:
        """What an order says that is in force when a term begins: a batch counts at once, a drain at a boundary."""
        self._order_due = False
        before = self.files.order
        self.files.reread_order()
        self._see_order(before)
        order = self._believed()
        if order is not None:
            if order.batch is not None and self._complete(order):
                self._position = replace(self._position, wanted=order.batch)
            self._order_due = order.drain and order.restart == self._restart
            self._obeyed = order.number - (self._order_due or not self._complete(order))
        self.batch = self._in_force(self._position.wanted)

    # -- blocks that join and leave ------------------------------------------------------------------------------

    def _prepare(self, block: Block) -> None:
        """A block looks whether it is wanted; one that is launches, and says when it is ready."""
        if self.phase is not Phase.LAUNCHING and not self._wants(block.task):
            self._leave_soon(block)
            return

        def ready() -> None:
            block.launched, block.ready_at, block.event = True, self._timeline.now, None
            if self.phase is not Phase.LAUNCHING and self._turned_away(block.task):
                self._leave_soon(block)
                return
            self._timeline.after(PATIENCE_S, self._look_soon)
            self._look_soon()

        block.event = self._timeline.after(self._launch_s, ready)

    def _wants(self, task: int) -> bool:
        """Whether a block that starts while others train has something to do: an order names it."""
        order = self._believed()
        return order is not None and order.blocks is not None and task in order.blocks

    def _turned_away(self, task: int) -> bool:
        """Whether a block that is ready is told to end: the order in force names others."""
        order = self._believed()
        return order is not None and order.blocks is not None and task not in order.blocks

    def _leave_soon(self, block: Block) -> None:
        """It ends by itself: it is not wanted, or the job is over."""
        if block.leaves:
            return
        block.leaves = True
        if block.event is not None:
            block.event.cancel()
        block.event = self._timeline.after(LOOK_S, lambda: self._exit(block.task))

    def _exit(self, task: int) -> None:
        del self._blocks[task]
        self.exit_block(task, 0)

    def _look_soon(self) -> None:
        """At the next boundary, look who is to train."""
        if self.phase is Phase.TRAINING:
            self._order_due = True
            self._schedule_boundary()

    def _believed(self) -> Order | None:
        """The order in force, if it is not of a term to come."""
        order = self.files.order
        return order if order is not None and order.restart <= max(self._restart, 0) else None

    def _complete(self, order: Order) -> bool:
        """Whether those train that the order wants."""
        return order.blocks is None or set(order.blocks) == set(self.members)

    def _plan(self) -> tuple[int, ...] | None:
        """Who is to train next, None where all stays as it is."""
        order = self._believed()
        wanted = order.blocks if order is not None else None
        return next_members(wanted, self.members, self._blocks, self._timeline.now)

    def _obey(self) -> bool:
        for block in [b for b in self._blocks.values() if b.launched and b.task not in self.members]:
            if self._turned_away(block.task):
                self._leave_soon(block)
        plan = self._plan()
        if plan is not None:
            self._reporter.throughput(self._position, self.batch)
            self._switch(plan, "order")
            return True
        order = self._new_order()
        if order is None or not self._complete(order):
            return False
        return super()._obey()

    def _switch(self, plan: tuple[int, ...], why: str) -> None:
        """Training stands still until the next membership is in force."""
        self.phase, self._joining = Phase.SWITCHING, plan
        new, hot = set(plan) - set(self.members), self._hot
        sent = hot.sent_bytes(self.application) if new else 0
        transfer_s = sent / hot.bytes_per_s
        pause_s = hot.pause_s + transfer_s if new else hot.shrink_pause_s
        self._then(
            self._timeline.now + pause_s,
            lambda: self._switched(why, pause_s, sent * len(new), transfer_s if new else 0.0),
        )
        self.on_switch(pause_s)

    def _switched(self, why: str, pause_s: float, sent: int, transfer_s: float) -> None:
        """All have committed."""
        before, self.members, self._joining = self.members, self._joining, ()
        ready_s = max((self._blocks[task].ready_at for task in self.members if task not in before), default=0.0)
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
        self._report_membership(why, pause_s, sent, transfer_s, ready_s, order)
        for task in set(before) - set(self.members):
            if task in self._blocks:
                self._exit(task)
        self._timeline.changed = True
        self._train()
        self._look_soon()

    def _report_membership(
        self,
        why: str,
        pause_s: float = 0.0,
        sent: int = 0,
        transfer_s: float = 0.0,
        ready_s: float = 0.0,
        order: Order | None = None,
    ) -> None:
        self.memberships += 1
        restarts = tuple(self._blocks[task].restart for task in self.members)
        number = order.number if order is not None else None
        self._reporter.membership(
            self._position,
            self.batch,
            self._placement,
            generation=self.generation,
            blocks=self.members,
            restarts=restarts,
            why=why,
            pause_s=pause_s,
            bytes=sent,
            transfer_s=transfer_s,
            ready_s=ready_s,
            order=number,
        )

    def _set_placement(self) -> None:
        gpus: Counter[str] = Counter()
        for task in self.members:
            gpus.update(self._blocks[task].gpus)
        self._hold(gpus)

    # -- blocks that are lost ------------------------------------------------------------------------------------

    def _lose(self, task: int, *, killed: bool) -> None:
        """A block that trains is gone: the others go on from memory, or nobody is left."""
        self._count_until_now()
        self.members = tuple(member for member in self.members if member != task)
        if not self.members:
            self._all_gone()
        elif killed or self.phase in (Phase.SWITCHING, Phase.RECOVERING):
            self._recover()
        else:
            self._reporter.throughput(self._position, self.batch)
            self._switch(self.members, "leaving")

    def _drop_switch(self) -> None:
        """One that was to join is lost before the commit: those that train go on in the membership that they have."""
        self._joining = ()
        self._train()
        self._look_soon()

    def _all_gone(self) -> None:
        """As with a plain job: what no checkpoint holds is lost. A block that is still starting goes on."""
        if self.phase is Phase.DRAINED:
            self._reporter.bye(self._position, "drained", TERMINATED)
        self.lost_samples += self.curve.used(self._position) - self.curve.used(self.durable)
        self.members, self._joining = (), ()
        self._ended()
        waiting = sorted(self._blocks.values(), key=lambda block: (not block.launched, block.task))
        if waiting:
            self._found(waiting[0].task)

    def _recover(self) -> None:
        """A checkpoint from memory, where the disk takes it; some seconds later one founds a new term, and the others
        join it."""
        if self.phase is not Phase.RECOVERING:
            with suppress(OSError):
                name = self.files.checkpoint(self._position.step)
                self.durable = self._position
                if self._leader in self.members:
                    self._reporter.throughput(self._position, self.batch)
                    self._reporter.checkpoint(self._position, name, 0.0, None)
                    self._reporter.bye(self._position, "error", PEER_LOST)
        self.phase, self._joining = Phase.RECOVERING, ()
        self._then(self._timeline.now + self._hot.recover_s, self._recovered)

    def _recovered(self) -> None:
        self.lost_samples += self.curve.used(self._position) - self.curve.used(self.durable)
        self._position = self.durable
        now, (first, *others) = self._timeline.now, self.members
        for task in others:
            self._blocks[task].launched, self._blocks[task].ready_at = True, now
        self.members = (first,)
        self._set_placement()
        self._begin_term(0.0, 0.0, restored=True)
        self._report_membership("first", self._hot.recover_s)
        self._timeline.after(PATIENCE_S, self._look_soon)
        self._look_soon()

    # -- orders and the end --------------------------------------------------------------------------------------

    def _see_order(self, before: Order | None) -> None:
        order = self.files.order
        if order is not None and (before is None or order.number != before.number):
            self._ordered_at = self._timeline.now

    def check_orders(self) -> None:
        """See `Training.check_orders`."""
        before = self.files.order
        if self.phase in (Phase.GONE, Phase.LAUNCHING) or not self.files.newer_order():
            return
        self._see_order(before)
        if self.phase is Phase.TRAINING:
            self._look_soon()
        elif self.phase is Phase.DRAINED and self._new_order() is not None:
            self._then(self._timeline.now + 0.1, self._resume)

    def _finish(self) -> None:
        self._reporter.throughput(self._position, self.batch)
        self._reporter.bye(self._position, "finished")
        self.durable = self._position
        self.finished = True
        self._ended()
        self.over()
        self.members = ()
        for task in [*self._blocks]:
            block = self._blocks[task]
            if block.event is not None:
                block.event.cancel()
            self._exit(task)

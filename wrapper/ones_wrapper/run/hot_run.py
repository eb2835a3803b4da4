"""A run whose ranks change while it trains: one of a job of blocks."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from ones_wrapper.checkpoint import State
from ones_wrapper.checkpoint.state import Content, PlainValues, collect, pack, restore, unpack
from ones_wrapper.data.progress import Progress
from ones_wrapper.devices import streams
from ones_wrapper.files.job_io import OwnerRequests, ReportWriter, last_generation, write_spec
from ones_wrapper.group import RankError, TorchGroup
from ones_wrapper.membership import connections, rescue
from ones_wrapper.membership.blocks import Blocks, Change
from ones_wrapper.membership.meeting import NotWantedError, PeersLostError, is_peer_lost
from ones_wrapper.process.ending import flush_files, leave
from ones_wrapper.process.exit_codes import DONT_RESTART, NEXT_TERM, PEER_LOST
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log
from ones_wrapper.protocol import Batch, Membership, Spec
from ones_wrapper.run import replicas, warm_up
from ones_wrapper.run.boundary import Agreement
from ones_wrapper.run.resize_log import shape_name
from ones_wrapper.run.run import Run
from ones_wrapper.run.settings import Identity, Settings


class HotRun(Run):
    """One process's part. It founds the job's next term, or joins the blocks that train."""

    def __init__(
        self, group: TorchGroup, spec: Spec, settings: Settings, started: float, identity: Identity, blocks: Blocks
    ) -> None:
        self._blocks = blocks
        self._torch = group
        self._at_boundary = False
        self._epoch_ends: int | None = None
        """The epoch that is being reported, and not counted yet."""
        self._leaving_now = False
        self._ending = rescue.Ending(group.device, self._rescue, lambda: self.meter.forget())
        self._shape = ""
        self._shapes: warm_up.Shapes | None = None
        super().__init__(group, spec, settings, started, identity)
        blocks.may_leave = lambda: not self.saver.writing
        blocks.fits = lambda world: spec.limits is None or spec.limits.at(world) is not None
        blocks.trains(self.spec.max_local_batch)
        blocks.abandon = self._abandon

    @property
    def rank(self) -> int:
        # What a script does on rank 0 alone is not for a block that has not joined.
        return self.group.rank + 1 if self._newcomer else self.group.rank

    @property
    def world(self) -> int:
        return self.group.world + 1 if self._newcomer else self.group.world

    @property
    def _newcomer(self) -> bool:
        return not self._identity.leads and self._blocks.waiting

    def load(self, state: State) -> None:
        if not self._newcomer:
            super().load(state)
            return
        collect(state)  # what cannot be saved cannot be sent: better now
        self._carry(state)

    def begin(self) -> None:
        if self._begun:
            return
        strategy, blocks = self.settings.strategy, self._blocks
        # A term that several blocks began goes on by terms, whatever the script could do.
        hot = blocks.hot and self.loop.exchanges.hot and (strategy is None or strategy.hot)
        if self._newcomer:
            if not hot:
                what = "the model's gradient exchange" if strategy is None else strategy.name
                self._end_block(f"{what} cannot take up ranks while it trains")
            self._join()
            return
        self.spec = replace(self.spec, term=self._restart, hot=hot)
        self._boundary.members = blocks  # first: an order's batch waits for all that it names, also as a term begins
        super().begin()
        together = not blocks.waiting
        generation = self.group.on_first(lambda: last_generation(self.directory, self._restart)) + 1
        plan = blocks.lead_first(generation, hot)
        if together:
            self._report_membership(Change(plan, False, False, 0, 0.0, blocks.stood_still_at, {}))
            return
        if hot:
            self._shapes = warm_up.Shapes(self.loop.exchanges)
        again = self._previous is not None and self._previous.failed
        plan = replace(plan, why="lost" if again else "first")
        self._report_membership(Change(plan, False, False, 0, 0.0, time.time(), {}), first=True)

    def _end_block(self, why: str) -> None:
        if self._blocks.local_rank == 0:
            log(f"block {self._blocks.block.task} ends: {why}")
        self._leaving_now = FLAGS.leaving = True
        self._blocks.close()
        raise SystemExit(0)

    # -- joining ------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        samples = self._check_complete()
        state = self.state
        assert state is not None
        self._warm_up()
        content = collect(state, template=True)

        def take_over(rest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
            progress = Progress(**rest["progress"])
            if progress.dataset != samples:
                raise ValueError(f"those who train have {progress.dataset} samples an epoch, this block {samples}")
            restore(state, rest["content"], tensors)
            self.progress = progress

        try:
            change = self._blocks.join(content.tensors, take_over)
        except NotWantedError as why:
            self._end_block(str(why))
            raise AssertionError from None
        self.spec = replace(self.spec, dataset=samples, hot=True)
        self._boundary.members = self._blocks
        self._ranks_changed(change, 0)
        self._shapes = warm_up.Shapes(self.loop.exchanges)
        self._boundary.start_agreement(0.0, False, False)

    def _warm_up(self) -> None:
        """A forward and a backward pass on nothing, so that the first step is no slower than others."""
        exchanges, text = self.loop.exchanges, ""
        with suppress(RankError):  # where the board is lost, that shows soon
            text = self.group.on_first(self._blocks.shapes)
        if not text:
            return
        try:
            warm_up.run(exchanges, text, self.group.device)
        except Exception as error:  # the first step is slower, and no worse
            if self.group.rank == 0:
                log(f"no dummy step was taken ({type(error).__name__}: {error})"[:300])

    # -- the change ---------------------------------------------------------------------------------------------------

    def uses(self, last: bool) -> None:
        # Written beforehand: a rank that dies in the step may have given its part, and the others go on after it.
        if last and self.trace:
            self.trace.step(self.progress.epoch, self.progress.step, self.loop.used)

    def _trace_committed(self) -> None:
        pass

    def act(self) -> None:
        if self._shapes is not None and self._shapes.text and self.group.rank == 0:
            self._blocks.tell_shapes(self._shapes.text)
        # It stays so where others turn out to be lost: this is a moment to write a checkpoint of.
        self._at_boundary = True
        super().act()
        self._at_boundary = False

    def end_epoch(self, loss: float | None, accuracy: float | None) -> None:
        self._epoch_ends = self.progress.epoch
        try:
            super().end_epoch(loss, accuracy)
        except Exception:
            self._count_epoch()
            raise
        finally:
            self._epoch_ends = None

    def _count_epoch(self) -> None:
        """Others were lost in what all tell of the epoch: it is trained all the same."""
        if self._epoch_ends == self.progress.epoch and not self._at_boundary:
            self.progress.epoch, self.progress.cursor = self.progress.epoch + 1, 0
            self._at_boundary = True

    def _carry_out(self, agreed: Agreement) -> None:
        super()._carry_out(agreed)
        if self._boundary.members is not None and self._blocks.obey(agreed.plan, agreed.change):
            self._change() if self._blocks.hot else self._end_term()

    def _end_term(self) -> None:
        """Write a checkpoint, from which the next term begins with the blocks of the plan, and end these ranks. Their
        launchers start those of blocks that stay again. Returns where the checkpoint cannot be written."""
        self._reporter.flush()
        blocks, began = self._blocks, time.time()
        plan, why = blocks.coming, ""
        flush_files()
        if not self.save(f"for term {plan.term}"):
            why = "its checkpoint could not be written"
        why = why or self.group.on_first(lambda: blocks.announce(began))
        if why:
            blocks.stay(why)
            return
        names = ", ".join(map(str, plan.tasks))
        if self.group.rank == 0:
            log(f"term {plan.term} begins at step {self.progress.step}, with blocks {names}")
        self._reporter.bye("moved", self.progress.step, 0, f"the next term begins with blocks {names}")
        self._leaving_now = FLAGS.leaving = True
        streams.wait(self.group.device)  # a rank that is gone never ends a sum
        self.group.maximum([0])  # nor may any end before rank 0 has spoken
        blocks.close()
        self.saver.let_go()
        raise SystemExit(0 if blocks.leaves else NEXT_TERM)

    def _change(self) -> None:
        self._reporter.flush()
        before, state, began = self.group.rank, self.state, time.time()
        assert state is not None
        self.loop.exchanges.settle()
        if self._blocks.moving:  # ranks may differ in these, and those of rank 0 count
            self._torch.share(list(state.model.buffers()))
            for extra in state.extras.values():
                if isinstance(extra, PlainValues):
                    values = self.group.on_first(lambda extra=extra: pack(extra.state_dict(), "extra"))  # type: ignore[misc]
                    extra.load_state_dict(unpack(values, {}))
        change = self._blocks.change(self._collected, began)
        if change is None:
            return
        if change.moves and before == 0:
            self._reporter.bye("moved", self.progress.step, 0, f"block {change.plan.members[0].task} leads")
            self._reporter.lead(None)
        if change.leaves:
            self._leave_membership()
        self._ranks_changed(change, before)

    def _collected(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The state as it is sent: tensors, and the rest."""
        assert self.state is not None
        content: Content = collect(self.state)
        rest = {
            "content": content.rest,
            "progress": asdict(self.progress),
            "orders": [self._boundary.applied, self._boundary.answered],
        }
        return content.tensors, rest

    def _leave_membership(self) -> None:
        """The others train on without this block."""
        self._leaving_now = FLAGS.leaving = True
        self.saver.let_go()
        connections.destroy()  # the others do, too, which on a node waits for all (NCCL, ncclCommDestroy)
        self._blocks.leave()
        if self._blocks.local_rank == 0:
            log(f"block {self._blocks.block.task} left at step {self.progress.step}; the others train on")
        raise SystemExit(0)

    def _ranks_changed(self, change: Change, before: int) -> None:
        """Everything that depends on the ranks goes on with the new ones. Not collective."""
        plan, progress, group = change.plan, self.progress, self.group
        rate = self.loop.rate
        assert rate is not None
        applied, answered = change.rest.get("orders") or (self._boundary.applied, self._boundary.answered)
        progress.resizes += int(progress.world != group.world)
        progress.world = group.world
        largest, self.spec = self.spec.max_local_batch, replace(self.spec, max_local_batch=plan.max_local)
        self.division = replicas.divide(self.spec, group.world, group.rank)
        if (strategy := self.settings.strategy) is not None:
            strategy.bind(group)
        if plan.batch:
            applied = plan.order or applied
            if not self._keeps_batch(plan.batch, plan.order):
                progress.batch = plan.batch
        batch, self.batch = self.batch, self._in_force(progress.batch)
        rate.resume(progress, self.rated_batch)
        rate.remember(progress)
        self.loop.exchanges.ranks_changed()
        if self.uneven is not None:
            self.uneven.ranks_changed()
        if self.noise is not None:
            self.noise.ranks_changed(progress.noise)
        connections.keep(self.saver.ranks_changed(plan.term))
        self.meter.ranks_changed()
        self._boundary.ranks_changed(applied, answered)
        self.generation = plan.generation
        self.loop.exchanges.begun = self._begun_before = 0
        self._watch_others()
        if self.trace:
            self.trace.ranks_changed(plan.term, group.rank, group.world, plan.generation)
        self._lead_or_follow(change, largest)
        self._report_membership(change)
        if not change.rest and self.batch != batch:
            self._log_batch(batch)
            steps = self.division.passes(self.batch)
            number = plan.order if plan.batch else None
            self._reporter.send(Batch(progress.step, self.batch, rate.target, number, steps, self.settings.lr_ramp))

    def _lead_or_follow(self, change: Change, largest: int) -> None:
        """Rank 0 keeps the job's files. `largest` is the largest pass so far."""
        plan, first = change.plan, self.group.rank == 0
        self._restart = plan.term
        if not change.moves:
            if first and largest != plan.max_local:
                write_spec(self.directory, self.spec)
            return
        self.spec = replace(self.spec, term=plan.term)
        self._requests = OwnerRequests(self.directory) if first else None
        self._boundary.lead(self._orders(plan.term) if first else None, self._requests, plan.term)
        if not first:
            return
        self._reporter.lead(ReportWriter(self.directory, plan.term))
        write_spec(self.directory, self.spec)
        hello = self._start_report.hello(self.group, self.spec, self.progress, self.batch, self.lr_factor, 0.0, "", "")
        self._reporter.send(replace(hello, queue_s=0.0, launch_s=0.0, import_s=0.0, group_s=0.0, attempt=0))
        self._first = False

    def _report_membership(self, change: Change, first: bool = False) -> None:
        plan, step = change.plan, self.progress.step
        pause_s = 0.0 if first else max(0.0, time.time() - change.began)
        old, self._shape = self._shape, shape_name(plan.nodes, plan.ranks_per_node, plan.world)
        if not first and old not in ("", self._shape):
            order = self._boundary.order
            gain = order.gain if order is not None and order.number == plan.order else None
            self.resizes.switched(old, self._shape, step, pause_s, gain, speaks=self.group.rank == 0)
        self._reporter.send(
            Membership(
                plan.generation,
                plan.tasks,
                tuple(member.restart for member in plan.members),
                plan.nodes,
                plan.ranks_per_node,
                plan.world,
                step,
                self.batch,
                pause_s,
                change.bytes,
                change.transfer_s,
                plan.ready_s,
                plan.order,
                plan.why,
            )
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        super().finish()
        self._blocks.close()
        if self.group.rank == 0:
            self._blocks.folder.end()

    def _leave(self, reason: str, code: int) -> None:
        self._blocks.close()
        if code == DONT_RESTART and self.group.rank == 0:
            self._blocks.folder.end()
        super()._leave(reason, code)

    def _ended(self, code: int, note: str) -> None:
        if code == 0 and self.group.rank == 0 and not (self._newcomer or self._leaving_now):
            self._blocks.folder.end()  # first: who loses the board shall know why
        self._blocks.close()
        if self._leaving_now:
            FLAGS.armed = False
            return
        super()._ended(code, note)

    def _failed(self, error: BaseException) -> tuple[int, str] | None:
        verdict = super()._failed(error)
        if verdict is not None or not is_peer_lost(error):
            return verdict
        if self._blocks.alone and not isinstance(error, PeersLostError):
            return None
        why = str(error).splitlines()[0][:300]

        def say() -> None:
            log(f"block {self._blocks.block.task}: others are lost ({why}); it joins anew")
            self._blocks.give_up(why)

        self._ending.by_script(say)
        return PEER_LOST, why

    def _abandon(self, why: str) -> None:
        """The watch found that others are lost, and the script's thread waits for them."""

        def say() -> None:
            log(f"block {self._blocks.block.task}: {why}; it joins anew")
            self._count_epoch()

        def end() -> None:
            with suppress(Exception):
                self._reporter.bye("error", self.progress.step, PEER_LOST, why)
            leave(PEER_LOST)

        self._ending.by_watch(say, end)

    def commit(self, total: int) -> None:
        super().commit(total)
        self._ending.marks.step()

    def _rescue(self) -> None:
        """Write a checkpoint where this rank's model is whole and nobody else does."""
        state, step = self.state, self.progress.step
        if state is None or self._newcomer or not self._whole():
            return
        folder, term = self._blocks.folder, self._restart
        if not rescue.claim(folder.path, term):
            return
        main = threading.current_thread() is threading.main_thread()

        def refuse() -> str:
            newest = folder.newest()
            if newest is not None and newest.term > term:
                return "another block leads by now"
            if not main and (self.progress.step != step or not self._whole()):
                return "training went on meanwhile"
            return ""

        try:
            self.saver.rescue(state, self.progress, refuse)
        finally:
            rescue.done(folder.path, term)

    def _whole(self) -> bool:
        """Whether model, optimizer and progress are those of one moment, and of all ranks: in a pass before the
        optimizer's step, or at a boundary."""
        return (
            self._begun
            and self._blocks.hot
            and self.loop.exchanges.steps_together
            and (self._at_boundary or (self.loop.within and not self.loop.mid_step))
        )

"""The ranks of a job of blocks, which change during training. New ranks get the state from other ranks' memory, or all
ranks load a checkpoint in a new term."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch

from ones_wrapper.checkpoint.state import Content, PlainValues, collect, pack, restore, unpack
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.devices import streams
from ones_wrapper.files.job_io import last_generation
from ones_wrapper.files.node_memory import COPY_STEPS, copy_steps
from ones_wrapper.group import RankError, TorchGroup
from ones_wrapper.membership import connections, rescue
from ones_wrapper.membership.blocks import Blocks, Change
from ones_wrapper.membership.coming import LOST
from ones_wrapper.membership.entered import Entered
from ones_wrapper.membership.machine import LAST, BlockState, Carrier
from ones_wrapper.membership.meeting import NotWantedError, PeersLostError, is_peer_lost
from ones_wrapper.membership.too_few import wait_for_others
from ones_wrapper.network.transfer import packed, unpacked
from ones_wrapper.process.ending import flush_files, leave
from ones_wrapper.process.exit_codes import DEVICE_FAILED, DONT_RESTART, NEXT_TERM, OUT_OF_MEMORY, PEER_LOST
from ones_wrapper.process.log import log
from ones_wrapper.protocol import Spec
from ones_wrapper.run import mistakes, replicas, warm_up
from ones_wrapper.run.boundary import Agreement
from ones_wrapper.run.fixed import FixedRanks
from ones_wrapper.run.run import Run
from ones_wrapper.run.settings import Identity, RunSettings
from ones_wrapper.script.stuck import Watch


def start(
    entered: Entered,
    settings: RunSettings,
    started: float,
    spec_of: Callable[[], Spec],
    fits: Callable[[int], bool] = lambda world: True,
) -> Run:
    """Return the run of a job of blocks, after its ranks have met (`entered`). Collective. `spec_of` returns the spec;
    `fits(N)` is True if the strategy can use N ranks. Blocks that begin a later term wait for others until `fits`
    returns True. Ends the process if its ranks must start again."""
    group, blocks, leads = entered.group, entered.blocks, entered.leads
    assert isinstance(group, TorchGroup) and blocks is not None
    block, term = blocks.block, blocks.leader.term
    identity = Identity(block.array, term, leads, f"{block.task}.{block.restart}.{blocks.local_rank}")
    with entered.losing():
        blocks.fits = fits
        if leads and term > 0 and not fits(group.world):
            wait_for_others(group, blocks)
        spec = spec_of()
        run = Run(group, spec, settings, started, identity)
        run.ranks = ChangingRanks(run, group, blocks)
        blocks.fits = lambda world: spec.limits is None or spec.limits.at(world) is not None
    entered.begun = True
    return run


class ChangingRanks(FixedRanks):
    """Hooks of a rank in a job of blocks. Its block begins a term, or joins the blocks that train."""

    def __init__(self, run: Run, group: TorchGroup, blocks: Blocks) -> None:
        self._run, self._group, self._blocks, self._machine = run, group, blocks, blocks.machine
        self._term = run.identity.restart
        self._shapes: warm_up.Shapes | None = None
        self._ending = rescue.Ending(group.device, self._rescue, lambda: run.records.meter.forget())
        blocks.may_leave = lambda: not run.keeping.writing
        sizes = run.sizes
        blocks.trains(sizes.local_batch.own if sizes.spec.limits is None else sizes.spec.max_local_batch)
        blocks.link.abandon = self._abandon

    @property
    def joining(self) -> bool:
        return self._blocks.machine.settled is BlockState.ADMITTED

    # -- joining ------------------------------------------------------------------------------------------------------

    def join(self) -> bool:
        run, blocks = self._run, self._blocks
        strategy, exchanges = run.settings.strategy, run.loop.exchanges
        # If several blocks began a term before the script, later changes begin terms, too, whatever the script can do.
        hot = blocks.hot and exchanges.hot and (strategy is None or strategy.hot)
        if not self.joining:
            run.sizes.spec = replace(run.sizes.spec, term=self._term, hot=hot)
            # First: an order's batch waits for all blocks that the order names, also as a term begins.
            run.control.boundary.members = blocks
            return False
        if not hot:
            what = "the model's gradient exchange" if strategy is None else strategy.name
            self._end_block(f"{what} cannot take up ranks while it trains")
        samples, state = run.complete(), run.keeping.state
        assert state is not None
        self._warm_up()
        run.same_data("", "")  # read now, while nobody waits for it
        with exchanges.thawed():
            content = collect(state, template=True)

        def take_over(rest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
            progress = TrainingProgress(**rest["progress"])
            if progress.dataset != samples:
                raise ValueError(f"those who train have {progress.dataset} samples an epoch, this block {samples}")
            run.same_data(progress.items, "for those who train")
            with exchanges.thawed():
                restore(state, rest["content"], tensors)
            run.progress.take_over(progress)

        try:
            change = blocks.join(content.tensors, take_over)
        except NotWantedError as why:
            self._end_block(str(why))
        run.sizes.spec = replace(run.sizes.spec, hot=True)
        run.control.boundary.members = blocks
        self._ranks_changed(change)
        self._shapes = warm_up.Shapes(exchanges, self._samples)
        run.control.boundary.start_agreement(0.0, False, False)
        return True

    def _end_block(self, why: str) -> NoReturn:
        if self._blocks.local_rank == 0:
            log(f"block {self._blocks.block.task} ends: {why}")
        self._machine.go(BlockState.PARTING)
        self._blocks.close()
        raise SystemExit(0)

    def _warm_up(self) -> None:
        """Make a forward and a backward pass on zeros before joining, so that the first step is not slow."""
        text = ""
        with suppress(RankError):  # a board that is lost shows soon
            text = self._group.on_first(self._blocks.shapes)
        if not text:
            return
        try:
            warm_up.run(self._run.loop.exchanges, text, self._group.device, self._coming_samples)
        except Exception as error:  # the first step is only slower
            self._group.say(f"no dummy step was taken ({type(error).__name__}: {error})"[:300])

    def _samples(self) -> int:
        return self._run.loop.part.samples

    def _coming_samples(self, batch: int, world: int) -> int:
        """Return the expected number of samples in this rank's first pass after joining. It follows from the newest
        order, or else from `batch` and `world`, the number of ranks that train now. Collective over the block."""
        wanted, blocks = self._group.on_first(self._blocks.ordered)
        batch, world = wanted or batch, (blocks * self._group.world) or (world + self._group.world)
        division = replicas.divide(self._run.sizes.spec, world, 0)
        return -(-batch // (division.replicas * division.passes(batch)))

    def began(self) -> None:
        run, blocks = self._run, self._blocks
        together, hot = blocks.present is not None, run.sizes.spec.hot
        steps, members = copy_steps(os.environ), blocks.present.members if blocks.present is not None else ()
        if steps and not hot and len(members) > 1:
            run.keeping.copy_steps = steps if all(member.memory for member in members) else 0
            if not run.keeping.copy_steps:
                run.records.note(f"no copies are made ({COPY_STEPS}): a node has no memory for them")
        generation = self._group.on_first(lambda: last_generation(run.directory, self._term)) + 1
        plan, pause_s = blocks.lead_first(generation, Carrier.MEMORY if hot else Carrier.CHECKPOINT), 0.0
        if together:
            pause_s = max(0.0, time.time() - blocks.stood_still_at)
        else:
            plan = replace(plan, why=LOST if run.records.failed_before else "first")
        if hot:
            self._shapes = warm_up.Shapes(run.loop.exchanges, self._samples)
        run.records.membership(plan, pause_s, 0, 0.0, run.control.boundary.order)

    # -- the change ---------------------------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        for note in self._blocks.noted():
            self._run.records.note(note)
        if self._shapes is not None and self._shapes.text and self._group.rank == 0:
            self._blocks.tell_shapes(self._shapes.told(self._run.sizes.batch, self._group.world))

    def agreed(self, agreed: Agreement) -> None:
        run = self._run
        if run.control.boundary.members is None or not self._blocks.obey(agreed.plan, agreed.change):
            return
        if not self._blocks.hot:
            self._end_term()
        elif not run.loop.ahead:
            self._change()
        else:
            run.loop.first_steps.say(mistakes.HOLDS_NEXT)

    def _end_term(self) -> None:
        """Write the checkpoint for the next term, and end these ranks; launchers of blocks that stay start them again.
        Returns only if the checkpoint cannot be written."""
        run, blocks, began = self._run, self._blocks, time.time()
        run.records.flush()
        plan, why = blocks.coming, ""
        flush_files()
        if not run.keeping.save(f"for term {plan.term}", memory=blocks.memory):
            why = "its checkpoint could not be written"
        why = why or self._group.on_first(lambda: blocks.announce(began))
        if why:
            blocks.stay(why)
            return
        names = ", ".join(map(str, plan.tasks))
        self._group.say(f"term {plan.term} begins at step {run.progress.step}, with blocks {names}")
        run.records.bye("moved", 0, f"the next term begins with blocks {names}")
        self._machine.go(BlockState.PARTING)
        streams.wait(self._group.device)  # a sum with a rank that is gone never ends
        self._group.maximum([0])  # no rank may end before rank 0 has spoken
        blocks.close()
        run.keeping.let_go()
        raise SystemExit(0 if blocks.leaves else NEXT_TERM)

    def _change(self) -> None:
        run, before, state = self._run, self._group.rank, self._run.keeping.state
        assert state is not None
        run.records.flush()
        began = time.time()  # what the device still owed was training
        run.loop.exchanges.settle()
        if self._blocks.coming.moves:  # ranks may differ in these, and rank 0's count
            self._group.share(list(state.model.buffers()))
            for extra in state.extras.values():
                if isinstance(extra, PlainValues):
                    values = self._group.on_first(lambda extra=extra: packed(pack(extra.state_dict(), "extra")))  # type: ignore[misc]
                    extra.load_state_dict(unpack(unpacked(values), {}))
        change = self._blocks.change(self._collected, began)
        if change is None:
            return
        if change.plan.moves and before == 0:
            run.records.stop_leading(f"block {change.plan.members[0].task} leads")
        if change.leaves:
            self._leave_membership()
        self._ranks_changed(change)

    def _collected(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        run, boundary = self._run, self._run.control.boundary
        assert run.keeping.state is not None
        content: Content = collect(run.keeping.state)
        rest = {
            "content": content.rest,
            "progress": asdict(run.progress),
            "orders": [boundary.applied, boundary.answered],
        }
        return content.tensors, rest

    def _leave_membership(self) -> None:
        self._machine.go(BlockState.PARTING)
        self._run.keeping.let_go()
        connections.destroy()  # the others do, too, which on a node waits for all (NCCL, ncclCommDestroy)
        self._blocks.leave()
        if self._blocks.local_rank == 0:
            log(f"block {self._blocks.block.task} left at step {self._run.progress.step}; the others train on")
        raise SystemExit(0)

    def _ranks_changed(self, change: Change) -> None:
        run, plan, world = self._run, change.plan, self._group.world
        progress, sizes, records, boundary = run.progress, run.sizes, run.records, run.control.boundary
        applied, answered = change.rest.get("orders") or (boundary.applied, boundary.answered)
        if plan.batch:
            applied = plan.order or applied
        largest, batch = sizes.spec.max_local_batch, sizes.batch
        progress.resizes += int(progress.world != world)
        progress.world = world
        sizes.ranks_changed(plan.generation, plan.max_local, plan.batch, plan.order)
        run.loop.ranks_changed(progress.noise, progress.noise_low)
        connections.keep(run.keeping.ranks_changed(plan.term))
        records.ranks_changed(plan)
        boundary.ranks_changed(applied, answered)
        run.watch_others()
        self._term = plan.term
        if change.plan.moves:
            sizes.spec = replace(sizes.spec, term=plan.term)
            run.control.lead(plan.term)
            if self._group.rank == 0:
                records.lead(plan.term)
        elif largest != plan.max_local:
            sizes.write_spec()
        pause_s = max(0.0, time.time() - change.began)
        records.membership(plan, pause_s, change.bytes, change.transfer_s, boundary.order)
        if not change.rest and sizes.batch != batch:
            records.batch_changed(batch, plan.order if plan.batch else None)

    def watch(self, others: Watch) -> None:
        self._blocks.link.watch = others

    # -- the end ------------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        self._ending.marks.step()

    def over(self) -> None:
        self._machine.go(BlockState.OVER)
        self._blocks.close()
        self._end_job()

    def _end_job(self) -> None:
        if self._group.rank == 0:
            self._blocks.folder.end()

    def leave(self, code: int) -> None:
        self._blocks.close()
        if code == DONT_RESTART:
            self._end_job()

    def ended(self, code: int) -> bool:
        state = self._machine.state
        if code == 0 and not self.joining and state not in (BlockState.PARTING, BlockState.LOST):
            self._end_job()  # first: who loses the board shall know why
        if code not in (0, OUT_OF_MEMORY, DEVICE_FAILED) and state not in LAST:
            self._blocks.post_failure()
        self._blocks.close()
        return state is not BlockState.PARTING

    def failed(self, error: BaseException) -> tuple[int, str] | None:
        if not is_peer_lost(error) or not (isinstance(error, PeersLostError) or self._blocks.lost_ranks()):
            return None
        why = str(error).splitlines()[0][:300]
        self._ending.by_script(lambda: self._give_up(why, f"others are lost ({why})"))
        return PEER_LOST, why

    def _give_up(self, why: str, text: str) -> None:
        log(f"block {self._blocks.block.task}: {text}; it joins again")
        self._machine.go(BlockState.LOST)
        self._blocks.give_up(why)

    def _abandon(self, why: str) -> None:
        """End this process from the thread that found other ranks lost, while the script's thread waits for them."""

        def end() -> None:
            with suppress(Exception):
                self._run.records.bye("error", PEER_LOST, why)
            leave(PEER_LOST)

        self._ending.by_watch(lambda: self._give_up(why, why), end)

    def _rescue(self) -> None:
        """Write a checkpoint if this rank has a consistent state, unless another rank writes one."""
        run, folder, term = self._run, self._blocks.folder, self._term
        state, step = run.keeping.state, run.progress.step
        if state is None or self.joining or not self._whole or not rescue.claim(folder.path, term):
            return
        main = threading.current_thread() is threading.main_thread()

        def refuse() -> str:
            newest = folder.newest()
            if newest is not None and newest.term > term:
                return "another block leads by now"
            if not main and (run.progress.step != step or not self._whole):
                return "training went on meanwhile"
            return ""

        try:
            run.keeping.rescue(state, refuse)
        finally:
            rescue.done(folder.path, term)

    @property
    def _whole(self) -> bool:
        return self._run.begun and self._blocks.hot and self._run.loop.whole

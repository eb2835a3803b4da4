"""One run, from its first report (`Hello`) to its last (`Bye`): its parts, and when each is called."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ones_wrapper.checkpoint import Checkpoints, SavedState
from ones_wrapper.checkpoint.state import collect
from ones_wrapper.data import fingerprint
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files.claim import Claim, ClaimedError
from ones_wrapper.files.places import find_job_directory, find_spool
from ones_wrapper.files.resume import prepare_job_directory
from ones_wrapper.files.run_id import SEED, run_id
from ones_wrapper.gradients.accumulation import CLOSURE
from ones_wrapper.gradients.learning_rate import Rate
from ones_wrapper.group import Group
from ones_wrapper.process import hang_detector
from ones_wrapper.process.ending import leave
from ones_wrapper.process.exit_codes import DONT_RESTART, STOP_CODE, USAGE_ERROR
from ones_wrapper.process.hooks import FLAGS, on_error, on_exit, requeue_conflict
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import idle_gpus
from ones_wrapper.protocol import Spec
from ones_wrapper.run import mistakes
from ones_wrapper.run.control import Control
from ones_wrapper.run.fixed import FixedRanks, Unknown
from ones_wrapper.run.keeping import Keeping
from ones_wrapper.run.loop_state import Loop
from ones_wrapper.run.meter import Losses
from ones_wrapper.run.records import Records
from ones_wrapper.run.settings import Common, Identity, RunSettings
from ones_wrapper.run.sizes import StepSizes
from ones_wrapper.script import calls, stuck
from ones_wrapper.script.first_steps import FirstSteps
from ones_wrapper.script.optimizers import stepper


class Run:
    """One run and its parts. Methods are collective unless they say otherwise."""

    def __init__(
        self, group: Group, spec: Spec, settings: RunSettings, started: float, identity: Identity | None = None
    ) -> None:
        """`started` is the Unix time at which the script called `init`."""
        env = os.environ
        self.identity = identity = identity or Identity.of(env)
        self.group, self.settings = group, settings
        self.directory = directory = find_job_directory(env, Path.cwd())
        first = group.rank == 0 and identity.leads
        prepare = partial(prepare_job_directory, directory, env, Path.cwd())
        self._claim = _claimed(group, prepare if first else lambda: None)
        self.progress, self.loop = TrainingProgress(), Loop()
        self.ranks = FixedRanks()
        common = Common(group, identity, settings, directory, find_spool(env), self.progress, self.loop)
        self.sizes = StepSizes(common, spec)
        self.records = Records(common, self.sizes, started)
        checkpoints = Checkpoints(directory, group, identity.job_id, identity.restart, holds=identity.leads)
        if identity.leads:
            checkpoints.check_ahead()
        self.keeping = Keeping(common, checkpoints, self.records, lambda: self.rank == 0)
        self.control = Control(common, self.sizes, self.records, self.keeping, lambda code: self.ranks.leave(code))
        self._idle = idle_gpus(env, group.world) if first else ""
        if self._idle:
            log(self._idle)
        self._run_id = group.on_first(lambda: run_id(directory, env, identity.job_id))
        self.begun = False
        self.left = 0
        """1 after the script has left the loop over epochs on any rank, 2 if it left after a signal, else 0."""
        self._signalled = -1
        """Epoch that began after the call of the script's own signal handler; -1 for none."""
        self.ended = False
        self._watch: stuck.Watch | None = None
        self._reason = "stopped"
        """Reason for the last report, if the script ends now without a signal or an error."""
        FLAGS.install()
        FLAGS.armed = True
        on_exit(self._ended)
        on_error(self.failed)

    def known(self, number: int) -> int:
        """Return a rank or world size as the script sees it: `Unknown` before this block has joined. Not collective."""
        return Unknown(number + 1) if self.ranks.joining else number

    @property
    def rank(self) -> int:
        """Rank of this process as the script sees it. Not collective."""
        return self.known(self.group.rank)

    @property
    def run_id(self) -> str:
        """Id for experiment loggers, the same in all runs of the job. Not collective."""
        return self.progress.run_id or self._run_id

    def load(self, state: SavedState) -> None:
        """Register the training's state, and load the newest good checkpoint into it."""
        if self.ranks.joining:
            collect(state)  # state that cannot be saved cannot be sent: better now
        else:
            with self.loop.exchanges.thawed():
                self.keeping.load(state)
            progress, world = self.progress, self.group.world
            progress.resizes += int(progress.world not in (0, world))
            progress.world, progress.run_id = world, self.run_id
            progress.failures += self.group.maximum([int(self.records.failed_before)])[0]
            if self.loop.noise is not None:
                self.loop.noise.known, self.loop.noise.known_low = progress.noise, progress.noise_low
        self._carry(state)

    def _carry(self, state: SavedState) -> None:
        """Register the training's state, hooks on its optimizers, and its learning rate. Not collective."""
        self.keeping.state = state
        optimizers = [stepper(optimizer) for optimizer in state.optimizers.values()]
        self.loop.rate = Rate(self.sizes.spec.base_batch, *optimizers, follows=self.settings.scale_lr)
        groups = {optimizer: len(optimizer.param_groups) for optimizer in optimizers}

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if len(optimizer.param_groups) != groups[optimizer]:
                raise RuntimeError(mistakes.GROUPS_ADDED.format(name=type(optimizer).__name__))
            try:
                self.loop.exchanges.finish(optimizer)
            except RuntimeError as error:
                closure = any(map(callable, (*args, *kwargs.values())))
                raise RuntimeError(CLOSURE if closure else str(error)) from None

        for optimizer in optimizers:
            optimizer.register_step_pre_hook(before_step)
        its = list(state.optimizers.values())
        self.loop.first_steps = FirstSteps(self.group.rank == 0, state.model, its, state.extras.values())
        gathers = self.settings.strategy is None and not self.settings.equal
        calls.watch(self.loop.first_steps, self.batch_shares, gathers)

    def begin(self) -> None:
        """Begin training: check the data, and send the hello. Called before the first step; further calls do
        nothing."""
        if self.begun or self.ranks.join():
            return
        samples, progress, boundary = self.complete(), self.progress, self.control.boundary
        loads = self.loop.first_steps.loads
        if self.group.maximum([len(loads)])[0]:
            self.keeping.load_again()
            self.group.say(*loads)
        if progress.dataset not in (0, samples):
            raise ValueError(
                f"checkpoint {self.keeping.loaded} was taken with {progress.dataset} samples an epoch, the dataset now "
                f"has {samples}; use the same dataset, or another job directory (ONES_JOB_DIR) without --resume-from"
            )
        progress.dataset = samples
        progress.items = self.same_data(progress.items, f"at checkpoint {self.keeping.loaded}")
        first = self.group.on_first(lambda: progress.items)
        self.group.here(lambda: self.same_data(first, "on rank 0"))
        agreed = boundary.first_agreement()
        if agreed.wanted:
            progress.batch, boundary.applied = agreed.wanted, agreed.number
        self.sizes.put_in_force()
        self.loop.rate.resume(progress)
        self.sizes.admit()
        if self.records.trace:
            self.records.trace.write(begin=progress.step)
        new = self.sizes.use_batch()
        self.sizes.write_spec()
        note = "; ".join(filter(None, (self.keeping.note, self._idle, new)))
        loaded = self.keeping.loaded if self.keeping.durable else ""
        self.records.begin(self.keeping.load_s, loaded, note, boundary.order)
        if self.group.rank == 0:
            mistakes.look_at(self.sizes.spec)
            if self.group.world > 1 and not FLAGS.tested and not {SEED, "PYTHONHASHSEED"} & set(os.environ):
                log(mistakes.UNSEEDED)
        self.watch_others()
        self.ranks.began()

    def complete(self) -> int:
        """Check that model, optimizer and data were given; return the number of samples in an epoch. Not collective.
        Raises RuntimeError if something is missing."""
        if self.keeping.state is None or self.loop.feed is None:
            missing = "model and optimizer" if self.keeping.state is None else "data"
            raise RuntimeError(
                f"training starts without {missing}: before the first epoch call `model, optimizer, loader = "
                "job.prepare(model, optimizer, data)`, or job.register(...) and job.loader(...)"
            )
        FLAGS.keep()
        if why := requeue_conflict():
            raise RuntimeError(why)
        self.loop.first_steps.close_setup()
        self.begun = True
        self.sizes.complete(self.loop.feed.samples)
        return self.loop.feed.samples

    def same_data(self, before: str, where: str) -> str:
        """Return `before`, a fingerprint of the dataset, or the present fingerprint if `before` is empty. Raises
        ValueError if they differ; the message names `where` as the origin of `before`. Not collective."""
        assert self.loop.feed is not None
        mine = self.loop.feed.fingerprint()
        fingerprint.check(mine, before, where)
        return before or mine

    def batch_shares(self) -> calls.BatchShares | None:
        """Return the number of samples in the present pass; None outside of training. Not collective."""
        loop, state = self.loop, self.keeping.state
        if not loop.within or state is None or not getattr(state.model, "module", state.model).training:
            return None
        alike = loop.part.share.total % self.sizes.division.replicas == 0 and self.sizes.shares is None
        return calls.BatchShares(loop.part.samples, alike)

    def watch_others(self) -> None:
        """Begin to find ranks with fewer backward passes than others (`stuck.Watch`). Not collective."""
        if self._watch is not None:
            self._watch.close()
        if self.group.world == 1:
            return

        def counts() -> stuck.Counts:
            return self.progress.step, self.loop.exchanges.begun, self.loop.begun_before, self.records.meter.step_s

        def end(why: str, code: int) -> None:
            log(why)
            self.records.bye("error", code, why[:300])
            leave(code)

        meeting = stuck.meeting(os.environ, self.sizes.generation)
        self._watch = stuck.Watch(self.directory, self.group.rank, self.group.world, meeting, counts, end)
        self.ranks.watch(self._watch)

    def commit(self, total: int) -> None:
        """Count a step of `total` samples. Not collective."""
        useful = self.sizes.count(total)
        self.loop.stepped(self.progress, total)
        if self.loop.still == mistakes.NO_STEPS:
            self.group.say(mistakes.NOT_STEPPED.format(step=self.progress.step))
        self.records.step(total, useful)
        self.ranks.stepped()

    def act(self) -> None:
        """Act on requests of orders, signals and the job's owner at a step boundary."""
        self.ranks.at_boundary()
        self.loop.at_boundary = True
        agreed = self.control.agree()
        if agreed is not None:
            self.control.carry_out(agreed)
            self.ranks.agreed(agreed)
            if agreed.checkpoint:
                FLAGS.call_waiting()
        self.control.propose()
        self.loop.at_boundary = False

    def end_epoch(self, loss: float | None, accuracy: float | None) -> None:
        """Report the epoch, and begin the next one. This is a step boundary, except after the last epoch."""
        self._end_epoch(loss, accuracy)
        if FLAGS.called:  # a handler's note may end the loop within another epoch, and not much later
            FLAGS.called, self._signalled = False, self.progress.epoch
        if not self.left and not 0 < self.sizes.spec.epochs <= self.progress.epoch:
            self.act()

    def _end_epoch(self, loss: float | None, accuracy: float | None, leaves: int = 0) -> None:
        """End the epoch. `leaves` is 1 if the script on this rank has left the loop over epochs, 2 if it may continue
        at the next start, else 0. All ranks leave if one does."""
        self.begin()
        loop, progress = self.loop, self.progress
        loop.end_open()
        at = progress.epoch, progress.step, progress.cursor
        # First: if other ranks are lost in the sums over losses, the epoch is trained all the same.
        loop.within = False
        progress.epoch, progress.cursor = progress.epoch + 1, 0
        loop.at_boundary = True
        mine = self.records.meter.take_epoch()
        total, samples = self.group.total([float(mine.total), float(mine.samples)])
        nonfinite, left = self.group.maximum([int(mine.nonfinite), leaves])
        if left and not leaves:
            log(mistakes.OTHERS_LEFT)
        self.left = left
        self.records.epoch(at, Losses(total, samples, nonfinite), loss, accuracy)

    @property
    def finished_before(self) -> bool:
        """True if training was finished when the loaded checkpoint was written. Not collective."""
        epochs, progress = self.sizes.spec.epochs, self.progress
        over = 0 < epochs <= progress.epoch or progress.left == epochs
        return not self.begun and bool(self.keeping.loaded) and over

    @property
    def over(self) -> bool:
        """True after training has finished. Not collective."""
        return self._reason == "finished"

    def leave_epochs(self, loss: float | None, accuracy: float | None) -> None:
        """Finish training after the script has left the loop over epochs early, on all ranks. The epoch counts if all
        its samples were used."""
        self.loop.end_open()
        # A handler may have the script leave, to go on at the next start.
        signalled = FLAGS.stop or FLAGS.called or self._signalled == self.progress.epoch
        self.left = 2 if signalled else 1
        if self.loop.passed == self.progress.epoch:
            # No request is obeyed: a block that joined now would find no rank in the next epoch.
            self._end_epoch(loss, accuracy, self.left)
        self.finish()

    def finish(self) -> None:
        """Write the last checkpoint, because training has finished. From now on a signal ends the script at once."""
        if self.finished_before:
            text = mistakes.finished(self.progress.epoch, self.sizes.spec.epochs, self.progress.left >= 0)
            self.group.say(text)
            # No hello: nothing begins.
            self.records.bye("finished", 0, text)
        else:
            if self.left == 1:
                self.progress.left = self.sizes.spec.epochs
            elif self.left and self.rank == 0:
                log(mistakes.SIGNALLED)
            self.control.boundary.finish_agreement()  # its requests come too late
            self.loop.exchanges.settle()
            self.keeping.save("at the end")
        self.keeping.close()
        if self._watch is not None:
            self._watch.close()
        self._reason = "finished"
        FLAGS.armed = False
        hang_detector.pause()
        self.ranks.over()

    def failed(self, error: BaseException) -> tuple[int, str] | None:
        """Return (exit code, note) for an error due to lack of memory or lost ranks; None for any other error. Not
        collective."""
        if self.group.rank == 0 and (hint := mistakes.no_cuda(error, self.group.device.type)):
            log(hint)
        local_batch = self.sizes.local_batch
        samples = self.loop.part.samples if self.loop.within else local_batch.trying
        # An evaluation that needs too much memory says nothing about the batch.
        classified = local_batch.classify_error(error, samples) if self.loop.within or samples else None
        if classified is None:
            return self.ranks.failed(error)
        log(classified[1])
        return classified

    def _ended(self, code: int, note: str) -> None:
        """End the run, because the script has ended. Not collective, as other ranks may be lost."""
        FLAGS.armed = False
        if not self.ranks.ended(code):
            return
        self.ended = True
        hang_detector.pause()
        if self._watch is not None:
            self._watch.close()
        reason = self._reason
        if not (code or FLAGS.tested) and reason != "finished" and self.loop.in_epochs and self.rank == 0:
            log(mistakes.LEFT)
        if code == DONT_RESTART:
            reason = "stopped"
        elif code:
            reason = "signal" if code == STOP_CODE and FLAGS.stop else "error"
        self.records.bye(reason, code, note)
        if self._claim is not None:
            self._claim.release()
        self.group.close(code)


def _claimed(group: Group, take: Callable[[], Claim | None]) -> Claim | None:
    """Return the claim that `take` returns on this rank. Collective: all ranks end if `take` raises `ClaimedError` on
    any rank."""
    claim, refused = None, 0
    try:
        claim = take()
    except ClaimedError as error:
        refused = 1
        log(str(error))
    if group.maximum([refused])[0]:
        raise SystemExit(USAGE_ERROR)
    return claim

"""One run from its hello to its bye: what happens at its step boundaries."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ones_wrapper.checkpoint import Checkpoints, State
from ones_wrapper.checkpoint.saver import Saver
from ones_wrapper.data.progress import Progress
from ones_wrapper.data.uneven import Uneven
from ones_wrapper.devices import streams
from ones_wrapper.files.claim import claim_for_ranks
from ones_wrapper.files.job_io import STOP, OrderReader, OwnerRequests, ReportWriter, previous, write_spec
from ones_wrapper.files.kept_files import KeptFiles
from ones_wrapper.files.places import find_job_directory, find_spool
from ones_wrapper.files.resume import prepare_job_directory
from ones_wrapper.files.run_id import SEED, run_id
from ones_wrapper.gradients.learning_rate import Rate
from ones_wrapper.gradients.noise import NoiseScale, efficiency
from ones_wrapper.gradients.schedule import counted
from ones_wrapper.group import Group
from ones_wrapper.process import hang_detector
from ones_wrapper.process.ending import flush_files, leave
from ones_wrapper.process.exit_codes import DONT_RESTART, STOP_CODE
from ones_wrapper.process.hooks import FLAGS, on_error, on_exit, requeue_conflict
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import idle_gpus
from ones_wrapper.protocol import Batch, Epoch, First, Spec
from ones_wrapper.run import mistakes, replicas, resize_log
from ones_wrapper.run.boundary import BY_OWNER, Agreement, Boundary, wait_for_requeue
from ones_wrapper.run.local_batch import LocalBatch
from ones_wrapper.run.loop_state import Loop
from ones_wrapper.run.reporter import Meter, Reporter, StartReport, Trace
from ones_wrapper.run.settings import Identity, Settings
from ones_wrapper.run.sizes import Sized
from ones_wrapper.script import stuck
from ones_wrapper.script.first_steps import FirstSteps
from ones_wrapper.script.optimizers import stepper


class Run(Sized):
    """State of one run. Methods are collective unless said otherwise."""

    def __init__(
        self, group: Group, spec: Spec, settings: Settings, started: float, identity: Identity | None = None
    ) -> None:
        """`started` is the Unix time of the script's first call."""
        env = os.environ
        self._identity = identity = identity or Identity.of(env)
        first = group.rank == 0 and identity.leads
        self.group = group
        self.generation = 0
        self.settings = settings
        self.progress = Progress()
        self.state: State | None = None
        self.loop = Loop()
        self.noise: NoiseScale | None = None
        self._report_every_s = float(env.get("ONES_REPORT_EVERY_S") or 2.0)
        self.meter = Meter(self._report_every_s, wait=partial(streams.wait, group.device))
        self._measured_at = time.monotonic()
        self._job_id, self._restart = identity.job_id, identity.restart
        self.directory = find_job_directory(env, Path.cwd())
        self._spool = find_spool(env)
        prepare = partial(prepare_job_directory, self.directory, env, Path.cwd())
        self._claim = claim_for_ranks(group, prepare if first else lambda: None)
        self.local_batch = LocalBatch(self.directory, spec, group)
        self.spec = self.local_batch.applied(spec)
        self.division = replicas.divide(self.spec, group.world, group.rank)
        if group.rank == 0 and (note := replicas.look_at(self.spec, group.world)):
            log(note)
        self.uneven = Uneven(group.device, self.local_batch.own) if settings.uneven else None
        self._before = resize_log.before(self.directory, self._restart) if first else None
        self.resizes = resize_log.ResizeLog()
        self._previous = previous(self.directory, self._restart) if first else None
        self._reporter = Reporter(ReportWriter(self.directory, self._restart) if first else None, self.meter)
        orders = self._orders(self._restart) if first else None
        self._requests = OwnerRequests(self.directory) if first else None
        self._boundary = Boundary(group, orders, self._requests, self._restart, FLAGS)
        self._boundary.exchanges = lambda: self.loop.exchanges.begun
        if self.uneven is not None:
            self._boundary.measured, self.meter.watch = self.uneven.proposal, self.uneven.watch
        checkpoints = Checkpoints(self.directory, group, self._job_id, self._restart, holds=identity.leads)
        self.saver = Saver(group, checkpoints, settings.checkpoint_every_s, settings.write_behind, self._reporter.send)
        self._start_report = StartReport(started, self._previous, self.directory, self._spool)
        if idle := idle_gpus(env, group.world) if first else "":
            log(idle)
        self._idle, self._loaded, self._note = idle, "", ""
        self._first = False
        self._still = 0  # steps in a row that the optimizer has not made
        self._unused = False  # the last step ended without one of an optimizer
        self._begun_before = 0  # exchanges of gradients in the steps that were completed
        self._watch: stuck.Watch | None = None
        self.ended = False  # the script has
        self.trace = Trace.of(env, self._restart, group.rank, group.world, identity.name)
        self.files = KeptFiles(lambda: self.rank == 0)
        self._run_id = group.on_first(lambda: run_id(self.directory, env, self._job_id))
        self._begun = False
        self.reason = "stopped"
        """What the bye will say if the script ends now by itself."""
        self.batch = self._in_force(0)
        FLAGS.install()
        FLAGS.armed = True
        on_exit(self._ended)
        on_error(self._failed)

    @property
    def rank(self) -> int:
        """This process's number, as the script sees it. Not collective."""
        return self.group.rank

    @property
    def world(self) -> int:
        """World size, as the script sees it. Not collective."""
        return self.group.world

    def _orders(self, restart: int) -> OrderReader:
        """Reads the orders of a run."""
        return OrderReader(self.directory, restart, self._spool, self._job_id)

    @property
    def run_id(self) -> str:
        """The job's name for loggers. Not collective."""
        return self.progress.run_id or self._run_id

    @property
    def lr_factor(self) -> float:
        """Learning rate in force over the one that the script set. Not collective."""
        return (
            self.loop.rate.factor
            if self.loop.rate
            else self.settings.rule.factor(self.rated_batch, self.progress.noise or None)
        )

    def load(self, state: State) -> None:
        """Take over what training carries, and load the newest good checkpoint into it."""
        loaded = self.saver.load(state)
        self._loaded, self._note = loaded.name, loaded.note
        self.progress = progress = loaded.progress
        world, failed = self.group.world, self._previous is not None and self._previous.failed
        progress.resizes += int(progress.world not in (0, world))
        progress.world, progress.run_id = world, progress.run_id or self._run_id
        progress.failures += self.group.maximum([int(failed)])[0]
        if self.noise is not None:
            self.noise.known = progress.noise
        self._carry(state)

    def _carry(self, state: State) -> None:
        """Take over what training carries, as it is. Not collective."""
        self.state = state
        optimizers = [stepper(optimizer) for optimizer in state.optimizers.values()]
        self.loop.rate = Rate(self.settings.rule, self.settings.lr_ramp, *optimizers)
        groups = {optimizer: len(optimizer.param_groups) for optimizer in optimizers}

        def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if len(optimizer.param_groups) != groups[optimizer]:
                raise RuntimeError(mistakes.groups_added(type(optimizer).__name__))
            self.loop.exchanges.finish(optimizer)

        for optimizer in optimizers:
            optimizer.register_step_pre_hook(before_step)
        its = list(state.optimizers.values())
        self.loop.first_steps = FirstSteps(self.group.rank == 0, its, state.extras.values())

    def begin(self) -> None:
        """Before the first step: everything is known, so say hello. Later calls do nothing."""
        if self._begun:
            return
        samples, progress = self._check_complete(), self.progress
        if progress.dataset not in (0, samples):
            raise ValueError(
                f"checkpoint {self._loaded} was taken with {progress.dataset} samples an epoch, the dataset now "
                f"has {samples}; use the same dataset, or another job directory (ONES_JOB_DIR) without --resume-from"
            )
        progress.dataset = samples
        self.spec = replace(self.spec, dataset=samples)
        first = self._boundary.first_agreement()
        if first.wanted:
            progress.batch, self._boundary.applied = first.wanted, first.number
        self.batch = self._in_force(progress.batch)
        assert self.loop.rate is not None
        self.loop.rate.resume(progress, self.rated_batch)
        if self.trace:
            self.trace.begin(progress.step)
        new = self.use_batch()
        if self.group.rank == 0:
            write_spec(self.directory, self.spec)
        note = "; ".join(filter(None, (self._note, self._idle, new)))
        start = (self.batch, self.lr_factor, self.saver.load_s, self._loaded, note)
        self._reporter.send(self._start_report.hello(self.group, self.spec, progress, *start))
        self._log_start()
        if self.group.rank == 0:
            mistakes.look_at(self.spec)
            if self.group.world > 1 and not FLAGS.tested and not {SEED, "PYTHONHASHSEED"} & set(os.environ):
                log(mistakes.UNSEEDED)
        self._watch_others()

    def _watch_others(self) -> None:
        """Look for ranks that made fewer backward passes than others. Not collective."""
        if self._watch is not None:
            self._watch.close()
        if self.group.world == 1:
            return

        def counts() -> stuck.Counts:
            return self.progress.step, self.loop.exchanges.begun, self._begun_before, self.meter.step_s

        def end(why: str) -> None:
            log(why)
            self._reporter.bye("error", self.progress.step, 1, why[:300])
            leave(1)

        where = stuck.meeting(os.environ, self.generation)
        self._watch = stuck.Watch(self.directory, self.group.rank, where, counts, end)

    def _log_start(self) -> None:
        """What changed since the start before. Not collective."""
        earlier, order, group = self._before, self._boundary.order, self.group
        if earlier is None or group.rank != 0:
            return
        ordered = order is not None and order.drain and order.restart == self._restart - 1
        shape = resize_log.shape_name(group.nodes, group.gpus_per_node, group.world)
        self.resizes.started(earlier, shape, order.gain if order is not None and ordered else None)
        self._log_batch(earlier.batch)

    def _check_complete(self) -> int:
        """The samples of an epoch. Raises RuntimeError where the script left something out. Not collective."""
        if self.state is None or self.loop.feed is None:
            missing = "job.register(...)" if self.state is None else "job.loader(...)"
            raise RuntimeError(f"training starts without {missing}; call it before the first epoch")
        FLAGS.keep()
        if why := requeue_conflict():
            raise RuntimeError(why)
        self._begun = True
        limits = replicas.limits_again(self.settings.strategy, self.spec, self.group)
        # Strategies have formulas of their own for what they send.
        averaged = self.loop.exchanges.gradient_bytes if limits is None else 0
        again = replace(self.spec, limits=limits, gradient_bytes=averaged)
        self.spec = replicas.as_found(again, self.group.world, self.local_batch.found)
        self.division = replicas.divide(self.spec, self.group.world, self.group.rank)
        return self.loop.feed.samples

    def commit(self, total: int) -> None:
        """A step of `total` samples was completed. Not collective."""
        progress = self.progress
        self._trace_committed()
        progress.padding += counted(progress, total, self.batch, self.spec.base_batch) - total
        progress.cursor += total
        progress.samples += total
        useful = total * efficiency(self.batch, self.spec.base_batch, progress.noise or None)
        progress.useful += useful
        if self.noise is not None:
            self.noise.step(total)
        if self.uneven is not None:
            self.uneven.step(self.loop.part.share.samples)
        self._begun_before = self.loop.exchanges.begun
        if rate := self.loop.rate:
            self._unused = not rate.stepped
            if self.loop.first_steps is not None:
                self.loop.first_steps.end(rate.stepped)
            self._still = 0 if rate.stepped else self._still + 1
            if self._still == mistakes.NO_STEPS and self.group.rank == 0:
                log(mistakes.no_steps(progress.step + 1))
            rate.remember(progress)
            rate.expect()
        progress.step += 1
        interval = self.meter.stop(progress, total, self.batch, self.lr_factor)
        progress.trained_s += self.meter.last_s
        self.resizes.stepped(progress.step, useful, self.meter.last_s)
        if not self._first:
            self._first = True
            self._reporter.send(First(progress.step, self._start_report.since_hello_s()))
        self._reporter.send_interval(interval)
        hang_detector.beat()

    def uses(self, last: bool) -> None:
        """A pass begins with the samples in `loop.used`, or with those and more; `last` where these are all of the
        step. Called where there is a trace. Not collective.
        """

    def _trace_committed(self) -> None:
        if self.trace:
            self.trace.step(self.progress.epoch, self.progress.step, self.loop.used)

    def act(self) -> None:
        """Do what orders, signals and the job's owner ask for: all ranks the same, at the same step boundary."""
        self.saver.report_finished()
        self._batch_fixed()
        FLAGS.keep()
        agreed = self._boundary.finish_agreement(self._unused)
        if agreed is not None:
            self._carry_out(agreed)
        due = self.group.rank == 0 and self.saver.due(self.progress)
        measure = self.noise is not None and time.monotonic() - self._measured_at >= self._report_every_s
        self._boundary.start_agreement(self.meter.step_s, due, measure)

    def _carry_out(self, agreed: Agreement) -> None:
        if agreed.measure and self.noise is not None:
            self.meter.settle()
            self.noise.exchange()
            self.progress.noise = self.noise.samples or 0.0
            self._measured_at = time.monotonic()
            if self.loop.rate:
                self.loop.rate.follow(self.progress, self.rated_batch)
        if agreed.wanted and agreed.number != self._boundary.applied:
            self._boundary.applied = agreed.number
            self._change_batch(agreed.wanted, agreed.number)
        if self.uneven is not None and agreed.measured:
            self._divide(self.uneven, agreed.measured)
        if agreed.stop == BY_OWNER:
            self._stop_for_good()
        elif agreed.stop:
            flush_files()  # the checkpoint may take longer than Slurm waits
            self.save("before the stop that a signal asked for")
            self._leave("signal", STOP_CODE)
        elif agreed.drain:
            self._drain(agreed.number)
        elif agreed.checkpoint and agreed.behind and self.state is not None:
            self._reporter.flush()
            with self.loop.exchanges.published():
                self.saver.begin(self.state, self.progress)
        elif agreed.checkpoint:
            self.save("in passing")

    def end_epoch(self, loss: float | None, accuracy: float | None) -> None:
        """Report the epoch and go on to the next, at a step boundary."""
        self.begin()
        self.loop.end_open()
        progress, losses = self.progress, self.meter.take_epoch()
        sums = [float(losses.total), float(losses.samples)]
        total, samples = self.group.total(sums)
        nonfinite = self.group.maximum([int(losses.nonfinite)])[0]
        if loss is None and samples:
            loss = total / samples
        self._reporter.send(Epoch(progress.epoch, progress.step, progress.cursor, loss, accuracy, nonfinite))
        progress.epoch += 1
        progress.cursor = 0
        self.loop.within = False
        self.act()

    @property
    def finished_before(self) -> bool:
        """Whether the checkpoint that was loaded is of a training that had come to its end. Not collective."""
        epochs, progress = self.spec.epochs, self.progress
        over = 0 < epochs <= progress.epoch or progress.left == epochs
        return not self._begun and bool(self._loaded) and over

    def leave_epochs(self) -> None:
        """The script leaves the loop over epochs before its end, on all ranks: the last checkpoint."""
        self.loop.end_open()
        self.progress.left = self.spec.epochs
        self.finish()

    def finish(self) -> None:
        """All epochs are trained: the last checkpoint. From here on a signal ends the script at once."""
        if self.finished_before:
            text = mistakes.finished(self.progress.epoch, self.spec.epochs, self.progress.left >= 0)
            if self.group.rank == 0:
                log(text)
            # No hello: nothing begins.
            self._reporter.bye("finished", self.progress.step, 0, text)
        else:
            self._boundary.finish_agreement()  # what it says comes too late
            self.loop.exchanges.settle()
            self.save("at the end")
        self.saver.close()
        if self._watch is not None:
            self._watch.close()
        self.reason = "finished"
        FLAGS.armed = False
        hang_detector.pause()

    def _change_batch(self, wanted: int, number: int) -> None:
        self._reporter.flush()
        progress, rate = self.progress, self.loop.rate
        assert rate is not None
        if self._keeps_batch(wanted, number):
            return
        progress.batch = wanted
        old, self.batch = self.batch, self._in_force(wanted)
        rate.change(progress, self.rated_batch)
        self._log_batch(old)
        steps = self.division.passes(self.batch)
        self._reporter.send(Batch(progress.step, self.batch, rate.target, number, steps, self.settings.lr_ramp))

    def _log_batch(self, old: int) -> None:
        """The batch in force was `old` until now. Not collective."""
        if self.batch == old or self.loop.rate is None:
            return
        self.resizes.batch_changed()
        if self.group.rank == 0:
            resize_log.log_batch(old, self.batch, self.progress.step, self.loop.rate.target, self.settings.lr_ramp)

    def save(self, why: str, order: int | None = None) -> bool:
        """Write a checkpoint that is durable on return, and report it; False where that failed, which is logged."""
        self._reporter.flush()
        hang_detector.beat()
        with self.loop.exchanges.published():
            saved = self.saver.save(self.state, self.progress, why, order)
        hang_detector.beat()
        return saved

    def _drain(self, number: int) -> None:
        """Checkpoint, report it, wait for the requeue; carry on when it is called off or does not come."""
        # First: once the checkpoint is reported, the companion may requeue, and the ranks are hardly left a moment.
        flush_files()
        if not self.save(f"for order {number}", number):
            return
        goodbye = partial(self._reporter.bye, "drained", self.progress.step, STOP_CODE, "")
        why = wait_for_requeue(self._boundary, number, goodbye)
        if not why:
            self._leave("drained", STOP_CODE)
        if self.group.rank == 0:
            log(f"carrying on after order {number}: {why}")

    def _stop_for_good(self) -> None:
        """The owner touched the stop file."""
        saved = self.save(f"for {STOP}")
        if self._requests is not None:
            self._requests.remove(STOP)
            log(
                f"{STOP}: {'stopped for good' if saved else 'training goes on, since it would be lost; touch it again'}"
            )
        if saved:
            self._leave("stopped", DONT_RESTART)

    def _leave(self, reason: str, code: int) -> None:
        self._reporter.bye(reason, self.progress.step, code, "")
        # Where a rank ends with an error Slurm kills the others: none may before rank 0 has spoken.
        self.group.maximum([0])
        raise SystemExit(code)

    def _failed(self, error: BaseException) -> tuple[int, str] | None:
        """What an error of the script means for the job. Not collective."""
        if self.group.rank == 0 and (hint := mistakes.no_cuda(error, self.group.device.type)):
            log(hint)
        samples = self.loop.part.samples if self.loop.within else self.local_batch.trying
        if not self.loop.within and not samples:
            return None  # an evaluation that needs too much memory says nothing of the batch
        classified = self.local_batch.classify_error(error, samples)
        if classified is not None:
            log(classified[1])
        return classified

    def _ended(self, code: int, note: str) -> None:
        """The script ended. Not collective: other ranks may be gone."""
        FLAGS.armed, self.ended = False, True
        hang_detector.pause()
        if self._watch is not None:
            self._watch.close()
        reason = self.reason
        if code == DONT_RESTART:
            reason = "stopped"
        elif code:
            reason = "signal" if code == STOP_CODE and FLAGS.stop else "error"
        self._reporter.bye(reason, self.progress.step, code, note)
        if self._claim is not None:
            self._claim.release()
        self.group.close(code)

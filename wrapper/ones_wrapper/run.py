"""One run from its hello to its bye: what happens at its step boundaries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ones_wrapper.batch import LrScale, clamp_batch
from ones_wrapper.boundary import Boundary
from ones_wrapper.checkpoint import Checkpoints, Progress, State
from ones_wrapper.data import Feed, Share
from ones_wrapper.ending import at_end
from ones_wrapper.group import Group, RankError
from ones_wrapper.launch import job_directory, make_job_directory
from ones_wrapper.mailbox import Inbox, Outbox, say, write_spec
from ones_wrapper.meter import Meter
from ones_wrapper.noise import NoiseScale, efficiency
from ones_wrapper.protocol import (
    DRAIN_WAIT_S,
    MAX_TEXT,
    Batch,
    Bye,
    Checkpoint,
    Epoch,
    Hello,
    Report,
    Spec,
)
from ones_wrapper.signals import FLAGS, STOP_CODE
from ones_wrapper.trace import Trace

DRAIN_POLL_S = 0.1
"""A drained job looks this often for a signal, for a newer order, or for the end of its patience."""


class Run:
    """State of one run. Methods are collective unless said otherwise."""

    def __init__(
        self, group: Group, spec: Spec, factor: Callable[[int], float], checkpoint_every_s: float, started: float
    ) -> None:
        """`factor` gives the learning rate's factor for a global batch; `started` is the Unix time of the
        script's first call."""
        env, first = os.environ, group.rank == 0
        self.group = group
        self.spec = spec
        self.progress = Progress()
        self.state: State | None = None
        self.feed: Feed | None = None
        self.scale: LrScale | None = None
        self.noise: NoiseScale | None = None
        self._report_every_s = float(env.get("ONES_REPORT_EVERY_S") or 2.0)
        self.meter = Meter(self._report_every_s)
        self._measured_at = time.monotonic()
        self._factor = factor
        self._restart = int(env.get("SLURM_RESTART_COUNT") or 0)
        job_id = int(env.get("SLURM_JOB_ID") or 0)
        self._directory = job_directory(env, Path.cwd())
        if first:
            make_job_directory(self._directory)
        spool = Path(env["ONES_SPOOL"]) if env.get("ONES_SPOOL") else None
        self._outbox = Outbox(self._directory, self._restart) if first else None
        inbox = Inbox(self._directory, self._restart, spool, job_id) if first else None
        self._boundary = Boundary(group, inbox, self._restart, FLAGS)
        self._checkpoints = Checkpoints(self._directory, group, job_id, self._restart)
        self._checkpoint_every_s = checkpoint_every_s
        self._saved_at = time.monotonic()
        self._saved: Progress | None = None
        self._launch_s = max(0.0, started - float(env.get("ONES_LAUNCHED") or started))
        self._group_s = time.time() - started
        self._load_s = 0.0
        self._loaded = self._note = ""
        self.trace = Trace.of(env, self._restart, group.rank, group.world)
        self._begun = False
        self._said_bye = False
        self.reason = "stopped"
        """What the bye will say if the script ends now by itself."""
        self.batch = self._in_force(0)
        FLAGS.install()
        FLAGS.armed = True
        at_end(self._ended)

    @property
    def lr_factor(self) -> float:
        """Learning rate in force over the one that the script set. Not collective."""
        return self._factor(self.batch)

    def load(self, state: State) -> None:
        """Take over what training carries, and load the newest good checkpoint into it."""
        self.state = state
        started = time.monotonic()
        loaded = self._checkpoints.load(state)
        self._load_s = time.monotonic() - started
        self._loaded, self._note, self.progress = loaded.name, loaded.note, loaded.progress
        self._saved = replace(loaded.progress) if loaded.name else None
        if self.noise is not None:
            self.noise.known = loaded.progress.noise
        self.scale = LrScale(state.optimizer)

    def begin(self) -> None:
        """Before the first step: everything is known, so say hello. Later calls do nothing."""
        if self._begun:
            return
        if self.state is None or self.feed is None:
            missing = "job.register(...)" if self.state is None else "job.loader(...)"
            raise RuntimeError(f"training starts without {missing}; call it before the first epoch")
        self._begun = True
        samples, progress = self.feed.samples, self.progress
        if progress.dataset not in (0, samples):
            raise ValueError(
                f"checkpoint {self._loaded} was taken with {progress.dataset} samples an epoch, the dataset now "
                f"has {samples}; use the same dataset, or another job directory (ONES_JOB_DIR)"
            )
        progress.dataset = samples
        self.spec = replace(self.spec, dataset=samples)
        first = self._boundary.first()
        if first.wanted:
            progress.batch, self._boundary.applied = first.wanted, first.number
        self._set_batch(progress.batch)
        if self.trace:
            self.trace.begin(progress.step)
        if self.group.rank == 0:
            write_spec(self._directory, self.spec)
        self._send(self._hello())

    def _hello(self) -> Hello:
        group, spec, progress = self.group, self.spec, self.progress
        return Hello(
            nodes=group.nodes,
            gpus_per_node=group.gpus_per_node,
            world=group.world,
            batch=self.batch,
            lr_factor=self.lr_factor,
            base_batch=spec.base_batch,
            max_batch=spec.max_batch,
            dataset=spec.dataset,
            epochs=spec.epochs,
            epoch=progress.epoch,
            cursor=progress.cursor,
            step=progress.step,
            checkpoint=self._loaded,
            note=self._note[:MAX_TEXT],
            launch_s=self._launch_s,
            group_s=self._group_s,
            load_s=self._load_s,
            noise=progress.noise or None,
            progress=progress.useful,
        )

    def commit(self, share: Share, used: list[int]) -> None:
        """A step was completed, this rank having used the dataset indices `used`. Not collective."""
        progress = self.progress
        if self.trace:
            self.trace.step(progress.epoch, progress.step, used)
        progress.cursor += share.total
        progress.samples += share.total
        progress.useful += share.total * efficiency(self.batch, self.spec.base_batch, progress.noise or None)
        if self.noise is not None:
            self.noise.step(share.total)
        progress.step += 1
        self._send(self.meter.stop(progress, share.total, self.batch, self.lr_factor))

    def act(self) -> None:
        """Do what orders and signals ask for: all ranks the same, at the same step boundary."""
        due = time.monotonic() - self._saved_at >= self._checkpoint_every_s
        measure = self.noise is not None and time.monotonic() - self._measured_at >= self._report_every_s
        agreed = self._boundary.meet(self.meter.step_s, due, measure)
        if agreed is None:
            return
        if agreed.measure and self.noise is not None:
            self.noise.exchange()
            self.progress.noise = self.noise.samples or 0.0
            self._measured_at = time.monotonic()
        if agreed.wanted and agreed.number != self._boundary.applied:
            self._boundary.applied = agreed.number
            self._change_batch(agreed.wanted, agreed.number)
        if agreed.stop:
            self.save("before the stop that a signal asked for")
            self._leave("signal")
        elif agreed.drain:
            self._drain(agreed.number)
        elif agreed.checkpoint:
            self.save("in passing")

    def end_epoch(self, loss: float | None, accuracy: float | None) -> None:
        """Report the epoch and go on to the next, at a step boundary."""
        self.begin()
        progress = self.progress
        total, samples = self.group.total(self.meter.take_epoch())
        if loss is None and samples:
            loss = total / samples
        self._send(Epoch(progress.epoch, progress.step, progress.cursor, loss, accuracy))
        progress.epoch += 1
        progress.cursor = 0
        self.act()

    def finish(self) -> None:
        """All epochs are trained: the last checkpoint. From here on a signal ends the script at once."""
        self.save("at the end")
        self.reason = "finished"
        FLAGS.armed = False

    def _in_force(self, wanted: int) -> int:
        spec = self.spec
        return clamp_batch(wanted or spec.base_batch, self.group.world, spec.max_batch, spec.max_local_batch)

    def _set_batch(self, wanted: int) -> None:
        self.batch = self._in_force(wanted)
        if self.scale:
            self.scale.factor = self.lr_factor

    def _change_batch(self, wanted: int, number: int) -> None:
        self._send(self.meter.flush())
        self.progress.batch = wanted
        self._set_batch(wanted)
        self._send(Batch(self.progress.step, self.batch, self.lr_factor, number))

    def save(self, why: str, order: int | None = None) -> bool:
        """Checkpoint and report it; False where it could not be written, which is said.

        Without an order, nothing is written where nothing has changed since the last one.
        """
        state, progress = self.state, self.progress
        if state is None or (order is None and self._saved == progress):
            return state is not None
        self._send(self.meter.flush())
        started = time.monotonic()
        try:
            saved = self._checkpoints.save(state, progress)
        except RankError as error:
            if self.group.rank == 0:
                say(f"the checkpoint {why} could not be written ({error}); the last one stays")
            return False
        finally:
            self._saved_at = time.monotonic()
            FLAGS.checkpoint_taken()
        self._saved = replace(progress)
        seconds = self._saved_at - started
        position = (progress.epoch, progress.cursor, progress.step)
        self._send(Checkpoint(saved.name, *position, saved.bytes, seconds, order))
        return True

    def _drain(self, number: int) -> None:
        """Checkpoint, report it, wait for the requeue; carry on when it is called off or does not come."""
        if not self.save(f"for order {number}", number):
            return
        wait_s = float(os.environ.get("ONES_DRAIN_WAIT_S") or DRAIN_WAIT_S)
        started = time.monotonic()
        while True:
            over = time.monotonic() - started > wait_s
            stop, carry_on = self._boundary.wait(number, over)
            if stop:
                self._leave("drained")
            if carry_on:
                break
            self._doze()
        if self.group.rank == 0:
            say(f"carrying on after order {number}: {'no requeue came' if over else 'a newer order came'}")

    def _doze(self) -> None:
        """Wait a little. At a requeue `srun` leaves us hardly a moment, so rank 0 says goodbye by itself."""
        until = time.monotonic() + DRAIN_POLL_S
        while time.monotonic() < until:
            if FLAGS.stop:
                self._bye("drained", STOP_CODE, "")
                return
            time.sleep(0.005)

    def _leave(self, reason: str) -> None:
        self._bye(reason, STOP_CODE, "")
        # Where a rank ends with an error Slurm kills the others: none may before rank 0 has spoken.
        self.group.maximum([0])
        raise SystemExit(STOP_CODE)

    def _send(self, report: Report | None) -> None:
        if report is not None and self._outbox is not None:
            self._outbox.send(report)

    def _bye(self, reason: str, code: int, note: str) -> None:
        if not self._said_bye:
            self._said_bye = True
            self._send(self.meter.flush())
            self._send(Bye(reason, self.progress.step, code, note))

    def _ended(self, code: int, note: str) -> None:
        """The script ended. Not collective: other ranks may be gone."""
        FLAGS.armed = False
        reason = self.reason
        if code:
            reason = "signal" if code == STOP_CODE and FLAGS.stop else "error"
        self._bye(reason, code, note)
        if code == 0:
            self.group.close()

"""Records of a run: reports to the companion, lines about resizes in the job's log, and a trace of the samples used."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ones_wrapper.devices import streams
from ones_wrapper.devices.use import DeviceUse
from ones_wrapper.files.job_io import ReportWriter, previous
from ones_wrapper.membership.plan import Plan
from ones_wrapper.process import hang_detector
from ones_wrapper.process.log import log
from ones_wrapper.protocol import MAX_TEXT, Batch, Bye, Epoch, First, Hello, Membership, Note, Order, Report, Throughput
from ones_wrapper.run import resize_log
from ones_wrapper.run.meter import Losses, Meter
from ones_wrapper.run.resize_log import ResizeLog, shape_name
from ones_wrapper.run.series import Series
from ones_wrapper.run.settings import Common
from ones_wrapper.run.sizes import StepSizes


class Records:
    """The records of one rank; only rank 0 writes reports. Methods are not collective."""

    def __init__(self, common: Common, sizes: StepSizes, started: float) -> None:
        """`started` is the Unix time at which the script called `init`."""
        env, group, identity, directory = os.environ, common.group, common.identity, common.directory
        self._group, self._settings, self._directory = group, common.settings, directory
        self._progress, self._loop, self._sizes = common.progress, common.loop, sizes
        self._restart = identity.restart
        first = group.rank == 0 and identity.leads
        self.every_s = float(env.get("ONES_REPORT_EVERY_S") or 2.0)
        use = DeviceUse(group.device) if first else None
        self.meter = Meter(self.every_s, wait=partial(streams.wait, group.device), use=use)
        self._series = self._new_series() if first else Series(None, str, directory)
        self._resizes = ResizeLog(tell=lambda *resize: self._series.resized(*resize))
        self._shape = ""
        self._change: tuple[str, Membership, float | None] | None = None
        """(old shape, report, expected gain) of the last change of ranks, until the first step after it ends."""
        self._after: list[Report] = []
        self._sample_s = 0.0
        """Seconds per sample on a rank in the last interval; 0 before the first interval."""
        self._earlier = resize_log.before(directory, identity.restart) if first else None
        before, self.failed_before = previous(directory, identity.restart) if first else (0.0, False)
        """Unix time of the previous start's last report, and True if that start ended without a bye or with an error;
        on rank 0."""
        launched = float(env.get("ONES_LAUNCHED") or started)
        self._hello = partial(
            Hello,
            queue_s=max(0.0, launched - before) if before else 0.0,
            launch_s=max(0.0, started - launched),
            import_s=float(env.get("ONES_IMPORT_S") or 0.0),
            group_s=time.time() - started,
            attempt=int(env.get("ONES_ATTEMPT") or 0),
            directory=str(directory)[:MAX_TEXT],
            spool=str(common.spool or "")[:MAX_TEXT],
        )
        """Function that makes the hello from the fields that are known later."""
        self._hello_at = 0.0
        self._writer = ReportWriter(directory, identity.restart) if first else None
        self._warned = self._left = self._first = False
        self._told = False
        self.trace = TraceWriter.of(env, identity.restart, group.rank, group.world, identity.name)

    # -- reports ------------------------------------------------------------------------------------------------------

    def send(self, report: Report | None) -> None:
        """Send a report; do nothing for None. Reports wait while a change of ranks is not reported."""
        if report is None or self._writer is None:
            return
        if self._change is not None:
            self._after.append(report)
            return
        self._writer.send(report)
        self._series.report(report)

    def _new_series(self) -> Series:
        return Series(self._settings.series, lambda: self._progress.run_id, self._directory)

    def _send_interval(self, report: Throughput | None) -> None:
        """Send the report of an interval. Log once the speed in tokens, and once that a loss is not finite."""
        self.send(report)
        if report is not None:
            self._sample_s = report.seconds * self._group.world / report.samples
        if report is not None and report.tokens and not self._told and self._writer is not None:
            self._told = True
            speeds = f"{report.samples / report.seconds:.4g} samples/s, {report.tokens / report.seconds:.4g} tokens/s"
            log(f"{shape_name(self._group.nodes, self._group.gpus_per_node, self._group.world)}: {speeds}")
        if report is not None and report.nonfinite and not self._warned and self._writer is not None:
            self._warned = True
            log(f"the loss is not a finite number (by step {report.step}); training goes on, and it is reported")

    def flush(self) -> None:
        """Send the report of the present interval early, because steps stop or the batch changes."""
        self._send_interval(self.meter.flush())

    def note(self, note: str) -> None:
        """Log and report a note for people."""
        log(note)
        self.send(Note(note, self._progress.step))

    def bye(self, reason: str, code: int, note: str = "") -> None:
        """Send the last report. Further calls do nothing."""
        if not self._left:
            self._left = True
            self._changed(0.0)
            self.flush()
            self.send(Bye(reason, self._progress.step, code, note))

    def begin(self, load_s: float, loaded: str, note: str, order: Order | None) -> None:
        """Send the first report of a run (`Hello`). `order` is the newest order, which caused this start if it drained
        the previous run."""
        self._say_hello(load_s=load_s, checkpoint=loaded, note=note[:MAX_TEXT])
        earlier, group = self._earlier, self._group
        if earlier is None or group.rank != 0:
            return
        ordered = order is not None and order.drain and order.restart == self._restart - 1
        shape = shape_name(group.nodes, group.gpus_per_node, group.world)
        self._resizes.started(earlier, shape, order.gain if order is not None and ordered else None)
        self._say_batch(earlier.batch)

    def _say_hello(self, **known: Any) -> None:
        group, sizes, progress = self._group, self._sizes, self._progress
        self._hello_at = time.monotonic()
        self.send(
            self._hello(
                nodes=group.nodes,
                gpus_per_node=group.gpus_per_node,
                world=group.world,
                batch=sizes.batch,
                lr_factor=sizes.lr_factor,
                base_batch=sizes.spec.base_batch,
                max_batch=sizes.spec.max_batch,
                dataset=sizes.spec.dataset,
                epochs=sizes.spec.epochs,
                epoch=progress.epoch,
                cursor=progress.cursor,
                step=progress.step,
                noise=progress.noise or None,
                progress=progress.useful,
                resizes=progress.resizes,
                **known,
            )
        )

    def step(self, total: int, useful: float) -> None:
        """Record a step of `total` samples, which count as `useful` samples of the base batch."""
        progress, meter = self._progress, self.meter
        if self.trace and not self.trace.beforehand:
            self.trace.write(epoch=progress.epoch, step=progress.step - 1, samples=self._loop.used)
        held = self._loop.part.tokens
        interval = meter.stop(
            progress, total, self._sizes.batch, self._sizes.lr_factor, 0 if held is None else held.total
        )
        progress.trained_s += meter.last_s
        # Of the first step only the time beyond a usual step counts: a usual step of a minute is no pause.
        self._changed(max(0.0, meter.last_s - self._sample_s * total / self._group.world))
        self._resizes.stepped(progress.step, useful, meter.last_s)
        if not self._first:
            self._first = True
            self.send(First(progress.step, time.monotonic() - self._hello_at))
        self._send_interval(interval)
        hang_detector.beat()

    def uses(self, last: bool) -> None:
        """Record the beginning of a pass; `last` is True for a step's last pass. `loop.used` has the samples of the
        step so far."""
        if last and self.trace and self.trace.beforehand:
            self.trace.write(epoch=self._progress.epoch, step=self._progress.step, samples=self._loop.used)

    def epoch(self, at: tuple[int, int, int], losses: Losses, loss: float | None, accuracy: float | None) -> None:
        """Report the end of an epoch at `at`, (epoch, step, cursor). `losses` has the losses of all ranks; `loss`, if
        given, is reported instead of their mean."""
        self.send(Epoch(*at, losses.mean if loss is None else loss, accuracy, int(losses.nonfinite)))

    def batch_changed(self, old: int | None, number: int | None) -> None:
        """Report the present batch after a change by order `number`, or without an order. `old` is the previous batch;
        None if only the learning rate changed."""
        self._say_batch(old)
        sizes, rate = self._sizes, self._loop.rate
        passes, power = sizes.division.passes(sizes.batch), rate.power(self._progress, sizes.rated(sizes.batch))
        self.send(Batch(self._progress.step, sizes.batch, sizes.lr_factor, number, passes, power))

    def _say_batch(self, old: int | None) -> None:
        new = self._sizes.batch
        if new == old:
            return
        if old is not None:
            self._resizes.batch_changed()
        if self._group.rank == 0:
            words = self._loop.rate.words(self._progress, self._sizes.rated(new))
            log(f"batch {f'{old} → ' if old else ''}{new} at step {self._progress.step}; {words}")

    # -- ranks that change --------------------------------------------------------------------------------------------

    def ranks_changed(self, plan: Plan) -> None:
        """Continue with the ranks of `plan`."""
        self.meter.ranks_changed()
        self._told = False
        if self.trace:
            self.trace.ranks_changed(plan.term, self._group.rank, self._group.world, plan.generation)

    def stop_leading(self, note: str) -> None:
        """Send the last report of this rank, because another rank reports from now on."""
        self.bye("moved", 0, note)
        self._writer = None
        self._series.close()

    def lead(self, term: int) -> None:
        """Begin to report from this rank, in a new term that a change of ranks began."""
        self._writer, self._left, self._first = ReportWriter(self._directory, term), False, False
        self._series = self._new_series()
        self._sizes.write_spec()
        at_once = dict.fromkeys(("queue_s", "launch_s", "import_s", "group_s"), 0.0)
        self._say_hello(checkpoint="", attempt=0, **at_once)

    def membership(self, plan: Plan, pause_s: float, size: int, transfer_s: float, order: Order | None) -> None:
        """Record that the blocks of `plan` train from now on. `size` bytes of state were sent to new blocks in
        `transfer_s` seconds. `order` is the newest order. The report is sent after the first step, whose extra time is
        added to `pause_s`."""
        at = self._progress.step
        restarts = tuple(member.restart for member in plan.members)
        shape = (plan.nodes, plan.ranks_per_node, plan.world)
        old, self._shape = self._shape, shape_name(*shape)
        gain = order.gain if order is not None and order.number == plan.order else None
        asked = (plan.ready_s, plan.order, plan.why)
        batch = self._sizes.batch
        report = Membership(plan.generation, plan.tasks, restarts, *shape, at, batch, pause_s, size, transfer_s, *asked)
        self._change = old, report, gain
        if not pause_s:
            self._changed(0.0)

    def _changed(self, longer_s: float) -> None:
        """Report the last change of ranks. Its first step took `longer_s` seconds more than a usual step."""
        if self._change is None:
            return
        (old, report, gain), self._change = self._change, None
        pause_s = report.pause_s + longer_s
        if old not in ("", self._shape):
            self._resizes.switched(old, self._shape, report.step, pause_s, gain, speaks=self._group.rank == 0)
        for each in (replace(report, pause_s=pause_s), *self._after):
            self.send(each)
        self._after.clear()


class TraceWriter:
    """Writer of a file with the samples of each step, for tests. At its start a run writes `{"restart", "attempt",
    "rank", "world", "begin": step}`, and for each step `{…, "epoch", "step", "samples"}`. In a job of blocks each
    change of ranks writes `{…, "generation"}`."""

    def __init__(self, path: Path, common: dict[str, int], beforehand: bool) -> None:
        self._path, self._common = path, common
        self.beforehand = beforehand
        """True if a step's line is written when its last pass begins, since this rank may die after others have used
        its gradients."""

    @classmethod
    def of(cls, env: Mapping[str, str], restart: int, rank: int, world: int, name: str = "") -> TraceWriter | None:
        """Return a writer to the file that ONES_TRACE names; None without that variable."""
        pattern = env.get("ONES_TRACE")
        if not pattern:
            return None
        path = pattern.replace("{restart}", str(restart)).replace("{rank}", name or str(rank))
        attempt = 0 if name else int(env.get("ONES_ATTEMPT") or 0)
        return cls(Path(path), {"restart": restart, "attempt": attempt, "rank": rank, "world": world}, bool(name))

    def ranks_changed(self, restart: int, rank: int, world: int, generation: int) -> None:
        """Write a line with the new generation, and use the new ranks in all further lines."""
        self._common |= {"restart": restart, "rank": rank, "world": world}
        self.write(generation=generation)

    def write(self, **line: Any) -> None:
        """Write a line. `samples` are the dataset indices that this rank used in a step. `begin` is the step from which
        this run continues: later steps of earlier runs do not count."""
        with self._path.open("a") as file:
            file.write(json.dumps({**self._common, **line}) + "\n")

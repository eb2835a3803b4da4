"""Files of a simulated job, in the wrapper's format. Reported values are the true ones plus noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ones_wrapper import protocol
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.simulate.training.application import Position, TrainingCurve
from slurm_ones.simulate.training.strategies import FP32

KEPT = 2
"""Number of checkpoints kept: the newest, and the one before."""


class JobFiles:
    """A job's directory. Reports are buffered until `flush`, which must be called before they are read."""

    def __init__(self, work_dir: Path, job_id: int) -> None:
        self.directory = work_dir / protocol.directory_name(job_id)
        self._orders = self.directory / protocol.ORDERS
        self._restart = 0
        self._number = 0
        self._lines: list[bytes] = []
        self._seen: tuple[int, int] | None = None
        self._checkpoints: list[str] = []
        self.order: protocol.Order | None = None
        """Order with the highest number that this run has read."""

    def open(self, restart: int, spec: protocol.Spec) -> None:
        """Prepare the job's directory for a run, and write its spec."""
        self.flush()
        if not self.directory.exists():
            self.directory.mkdir()
            (self.directory / protocol.CHECKPOINTS).mkdir()
        self.write_spec(spec)
        self._restart, self._number = restart, 0

    def write_spec(self, spec: protocol.Spec) -> None:
        """Write the job's spec."""
        (self.directory / protocol.SPEC).write_bytes(protocol.encode(spec))

    def report(self, time: float, report: protocol.Report) -> None:
        """Buffer a report of the run."""
        self._number += 1
        self._lines.append(protocol.encode_report(self._number, time, report))

    def flush(self) -> None:
        """Write the buffered reports."""
        if self._lines:
            with (self.directory / protocol.reports_name(self._restart)).open("ab", buffering=0) as file:
                file.write(b"".join(self._lines))
            self._lines.clear()

    def checkpoint(self, step: int) -> str:
        """Write a complete checkpoint, remove old checkpoints, and return the name of the new one."""
        name = f"step-{step:09d}"
        folder = self.directory / protocol.CHECKPOINTS
        if name not in self._checkpoints:
            (folder / name).mkdir()
            (folder / name / protocol.MANIFEST).write_bytes(b"{}\n")
            self._checkpoints.append(name)
        while len(self._checkpoints) > KEPT:
            old = folder / self._checkpoints.pop(0)
            (old / protocol.MANIFEST).unlink()
            old.rmdir()
        return name

    def newer_order(self) -> bool:
        """Return True if the file of orders has changed since the last call, and update `order`."""
        try:
            info = self._orders.stat()
        except FileNotFoundError:
            return False
        seen = (info.st_ino, info.st_mtime_ns)
        if seen == self._seen:
            return False
        self._seen = seen
        order = protocol.decode_order(self._orders.read_bytes())
        if self.order is None or order.number > self.order.number:
            self.order = order
        return True

    def reread_order(self) -> None:
        """Read the current order again, as a new run does."""
        self._seen = self.order = None
        self.newer_order()


GROUP, IMPORTS = 0.2, 0.6
"""Shares of the launch time: to create the process group, and to import torch and the user's script."""


class Reporter:
    """Writer of one job's reports. Without `files` it writes nothing."""

    def __init__(
        self,
        curve: TrainingCurve,
        files: JobFiles | None,
        timeline: Timeline,
        settings: ClusterSettings,
        rng: np.random.Generator,
        declares: float = 1.0,
    ) -> None:
        """Create a writer. It reports `declares` times the job's number of epochs, or no number if `declares` is 0."""
        app = curve.application
        epochs = max(round(curve.epochs * declares), 1) if declares > 0 else 0
        # Gradients are accumulated where a batch does not fit at once, so one GPU takes all of it.
        self.spec = protocol.Spec(app.base_batch, app.max_batch, app.max_batch, curve.dataset, epochs)
        if app.by is None:
            self.spec = replace(self.spec, gradient_bytes=int(app.parameters * FP32))
        else:
            passes = math.ceil(app.max_batch / app.max_local_batch)
            limits = app.limits(0.0)
            self.spec = replace(self.spec, max_local_batch=app.max_local_batch, max_passes=passes, limits=limits)
        self.due = math.inf
        """Time at which the next throughput report is due."""
        self._curve = curve
        self._files = files
        self._timeline = timeline
        self._settings = settings
        self._rng = rng
        self._from = 0
        self._seconds = 0.0
        self._first: tuple[float, int] | None = None
        """Time and step at the run's start, until its first step is reported; then None."""
        self._last: tuple[float, int] | None = None
        """Time of the last report, and number of ranks at that time; None before the first report."""
        self._resizes = 0

    def update_spec(self, at: Position) -> None:
        """Write the spec again if the limits of the job's strategy have changed since it was written."""
        by = self._curve.application.by
        if self._files is None or by is None or self.spec.limits is None:
            return
        if by.frozen(at.progress / self._curve.application.total) != self.spec.limits.batch_fixed:
            self.spec = replace(self.spec, limits=self._curve.application.limits(at.progress))
            self._files.write_spec(self.spec)

    def hello(
        self,
        at: Position,
        batch: int,
        placement: Sequence[int],
        launch_s: float,
        load_s: float,
        restart: int,
        *,
        restored: bool = True,
    ) -> None:
        """Report the start of a run, from a checkpoint if `restored`. The next throughput report counts from this
        moment."""
        if self._files is None:
            return
        spec, world, now = self.spec, sum(placement), self._timeline.now
        self._files.open(restart, spec)
        before = self._last
        self._resizes += before is not None and before[1] != world
        self._append(
            protocol.Hello(
                nodes=len(placement),
                gpus_per_node=placement[0],
                world=world,
                batch=batch,
                lr_factor=batch / spec.base_batch,
                base_batch=spec.base_batch,
                max_batch=spec.max_batch,
                dataset=spec.dataset,
                epochs=spec.epochs,
                epoch=at.epoch,
                cursor=at.cursor,
                step=at.step,
                checkpoint=f"step-{at.step:09d}" if at.step and restored else "",
                queue_s=max(now - launch_s - load_s - before[0], 0.0) if before is not None else 0.0,
                launch_s=(1.0 - GROUP) * launch_s,
                import_s=IMPORTS * launch_s,
                group_s=GROUP * launch_s,
                load_s=load_s,
                noise=self._noise(at, batch) if at.step else None,
                progress=at.progress,
                resizes=self._resizes,
            )
        )
        self._first, self._last = (now, at.step), (now, world)
        self._from, self._seconds = self._curve.used(at), 0.0
        self.due = now + self._settings.first_report_s

    def ran(self, seconds: float) -> None:
        """Add `seconds` to the time spent in steps since the last throughput report."""
        self._seconds += seconds

    def _first_step(self, at: Position) -> None:
        """Report the run's first step, if there was one and it is not reported yet. Its duration is the mean of all
        steps so far."""
        if self._first is not None and at.step > self._first[1]:
            (begun, step), self._first = self._first, None
            seconds = self._seconds / (at.step - step)
            self._append(protocol.First(step + 1, seconds), begun + seconds)

    def throughput(self, at: Position, batch: int) -> None:
        """Report the steps since the last throughput report, if there were any. Set the time of the next report."""
        if self._files is None:
            return
        samples = self._curve.used(at) - self._from
        self._first_step(at)
        seconds = self._seconds * math.exp(self._rng.normal(0.0, self._settings.speed_noise))
        if samples > 0:
            self._append(
                protocol.Throughput(
                    epoch=at.epoch,
                    step=at.step,
                    cursor=at.cursor,
                    samples=samples,
                    seconds=seconds,
                    batch=batch,
                    lr_factor=batch / self.spec.base_batch,
                    loss=self._curve.loss(at),
                    noise=self._noise(at, batch),
                    progress=at.progress,
                )
            )
        self._from, self._seconds = self._curve.used(at), 0.0
        self.due = self._timeline.now + self._settings.report_s

    def epoch(self, at: Position, batch: int) -> None:
        """Report the end of an epoch."""
        self._first_step(at)
        self._append(
            protocol.Epoch(at.epoch, at.step, at.cursor, self._curve.loss(at), self._curve.accuracy(at, batch))
        )

    def batch(self, at: Position, batch: int, order: int) -> None:
        """Report that an order has changed the batch."""
        self._append(protocol.Batch(at.step, batch, batch / self.spec.base_batch, order))

    def checkpoint(self, at: Position, name: str, seconds: float, order: int | None) -> None:
        """Report that a checkpoint has been written."""
        self._append(protocol.Checkpoint(name, at.epoch, at.cursor, at.step, 0, seconds, stall_s=seconds, order=order))

    def membership(self, at: Position, batch: int, placement: Sequence[int], **change: Any) -> None:
        """Report a new membership. `change` has further fields of the report, such as the reason for the change."""
        now, world = self._timeline.now, sum(placement)
        self._append(
            protocol.Membership(
                nodes=len(placement),
                gpus_per_node=placement[0] if len({*placement}) == 1 else 0,
                world=world,
                step=at.step,
                batch=batch,
                **change,
            )
        )
        self._last = now, world

    def bye(self, at: Position, reason: str, code: int = 0) -> None:
        """Report the end of the run."""
        self._append(protocol.Bye(reason, at.step, code))

    def _append(self, report: protocol.Report, time: float | None = None) -> None:
        if self._files is None:
            return
        time = self._timeline.now if time is None else time
        self._files.report(time, report)
        if self._last is not None:
            self._last = time, self._last[1]

    def _noise(self, at: Position, batch: int) -> float:
        noise = self._curve.application.noise(at.progress, batch)
        return noise * math.exp(self._rng.normal(0.0, self._settings.gradient_noise))

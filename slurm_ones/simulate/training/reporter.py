"""What a simulated job says of itself: the truth, measured with noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ones_wrapper.protocol import Batch, Bye, Checkpoint, Epoch, First, Hello, Report, Spec, Throughput
from slurm_ones.simulate.slurm.settings import ClusterSettings
from slurm_ones.simulate.slurm.timeline import Timeline
from slurm_ones.simulate.training.files import JobFiles
from slurm_ones.simulate.training.progress import Course, Position

GROUP, IMPORTS = 0.2, 0.6
"""Shares of a launch: building the process group, and importing torch and the script."""


class Reporter:
    """The reports of one job. Without files nobody hears them, and none is ever due."""

    def __init__(
        self,
        course: Course,
        files: JobFiles | None,
        timeline: Timeline,
        settings: ClusterSettings,
        rng: np.random.Generator,
    ) -> None:
        app = course.application
        # Gradients are accumulated where a batch does not fit at once, so one GPU takes all of it.
        self.spec = Spec(app.base_batch, app.max_batch, app.max_batch, course.dataset, course.epochs)
        self.due = math.inf
        """When the next throughput report is due."""
        self._course = course
        self._files = files
        self._timeline = timeline
        self._settings = settings
        self._rng = rng
        self._from = 0
        self._seconds = 0.0
        self._first: tuple[float, int] | None = None
        """Time and step of the hello, until the run's first step is told."""
        self._last: tuple[float, int] | None = None
        """When anything was said last, and the world size then."""
        self._resizes = 0

    def hello(
        self, at: Position, batch: int, placement: Sequence[int], launch_s: float, load_s: float, restart: int
    ) -> None:
        """A run begins; its steps are measured from here."""
        if self._files is None:
            return
        spec, world, now = self.spec, sum(placement), self._timeline.now
        self._files.open(restart, spec)
        before = self._last
        self._resizes += before is not None and before[1] != world
        self._say(
            Hello(
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
                checkpoint=f"step-{at.step:09d}" if at.step else "",
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
        self._from, self._seconds = self._course.used(at), 0.0
        self.due = now + self._settings.first_report_s

    def ran(self, seconds: float) -> None:
        """Steps took that long."""
        self._seconds += seconds

    def _first_step(self, at: Position) -> None:
        """Tell the run's first step, before the first report of any: as long as the mean of those so far, and at the
        time when it ended."""
        if self._first is not None and at.step > self._first[1]:
            (begun, step), self._first = self._first, None
            seconds = self._seconds / (at.step - step)
            self._say(First(step + 1, seconds), begun + seconds)

    def throughput(self, at: Position, batch: int) -> None:
        """Of the steps since the last report, if there were any; the next is due after the usual time."""
        if self._files is None:
            return
        samples = self._course.used(at) - self._from
        self._first_step(at)
        seconds = self._seconds * math.exp(self._rng.normal(0.0, self._settings.speed_noise))
        if samples > 0:
            self._say(
                Throughput(
                    epoch=at.epoch,
                    step=at.step,
                    cursor=at.cursor,
                    samples=samples,
                    seconds=seconds,
                    batch=batch,
                    lr_factor=batch / self.spec.base_batch,
                    loss=self._course.loss(at),
                    noise=self._noise(at, batch),
                    progress=at.progress,
                )
            )
        self._from, self._seconds = self._course.used(at), 0.0
        self.due = self._timeline.now + self._settings.report_s

    def epoch(self, at: Position, batch: int) -> None:
        """A pass ended there."""
        self._first_step(at)
        self._say(Epoch(at.epoch, at.step, at.cursor, self._course.loss(at), self._course.accuracy(at, batch)))

    def batch(self, at: Position, batch: int, order: int) -> None:
        """An order changed the batch."""
        self._say(Batch(at.step, batch, batch / self.spec.base_batch, order))

    def checkpoint(self, at: Position, name: str, seconds: float, order: int | None) -> None:
        """A checkpoint is durable."""
        self._say(Checkpoint(name, at.epoch, at.cursor, at.step, 0, seconds, stall_s=seconds, order=order))

    def bye(self, at: Position, reason: str, code: int = 0) -> None:
        """The run's last words."""
        self._say(Bye(reason, at.step, code))

    def _say(self, report: Report, time: float | None = None) -> None:
        if self._files is None:
            return
        time = self._timeline.now if time is None else time
        self._files.report(time, report)
        if self._last is not None:
            self._last = time, self._last[1]

    def _noise(self, at: Position, batch: int) -> float:
        noise = self._course.application.noise(at.progress, batch)
        return noise * math.exp(self._rng.normal(0.0, self._settings.gradient_noise))

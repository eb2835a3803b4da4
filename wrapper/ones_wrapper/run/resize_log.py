"""Lines about resizes in a job's log: one at each resize, and one about the speed after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ones_wrapper.files.job_io import read_reports, read_spec
from ones_wrapper.process.log import log
from ones_wrapper.protocol import MAX_LINE, Batch, Epoch, First, Hello, Membership, Throughput, reports_name
from ones_wrapper.protocol.growth import efficiency

MEASURE_S = 30.0
"""Seconds of training after a resize in which the new speed is measured, for a line in the log."""
_SHOWN = 16
"""Largest number of ranks whose shares are listed in a line."""
_WARM_UP = 2
"""Number of steps after a resize that are not measured."""


def shape_name(nodes: int, gpus_per_node: int, world: int) -> str:
    """Return the text of a shape: nodes × GPUs per node, or the number of GPUs if nodes differ."""
    return f"{nodes}x{gpus_per_node}" if gpus_per_node else f"{world} GPUs"


@dataclass(frozen=True)
class Before:
    """Shape and speed of the previous start."""

    shape: str
    batch: int
    ended: float
    """Unix time of the last step that this start reported."""
    useful_per_s: float
    """Useful samples per second shortly before this start ended; 0 if none were reported."""


def before(job_dir: Path, restart: int) -> Before | None:
    """Return the previous start, of this run or of the run before; None if neither trained."""
    spec = read_spec(job_dir)
    for number in (restart, restart - 1):
        found = _before(job_dir / reports_name(number), spec.grown if spec is not None else 0)
        if found is not None:
            return found
    return None


def _before(path: Path, free: int) -> Before | None:
    shape, base, batch, ended = "", 0, 0, 0.0
    speeds: list[Throughput] = []
    for when, report in read_reports(path, 4 * MAX_LINE, 8 * MAX_LINE):
        if isinstance(report, (Hello, Membership)):
            shape, batch = shape_name(report.nodes, report.gpus_per_node, report.world), report.batch
            speeds.clear()
            base = report.base_batch if isinstance(report, Hello) else base
        elif isinstance(report, (First, Epoch, Throughput)):
            ended = when
        if isinstance(report, Throughput):
            speeds.append(report)
        if isinstance(report, Batch):
            batch = report.batch
    if not shape or not ended:
        return None
    useful = seconds = 0.0
    # An order may change the batch just before the end: what counts is the last batch that was measured.
    for one in reversed([one for one in speeds if one.batch == speeds[-1].batch]):
        useful += one.samples * efficiency(one.batch, base or one.batch, one.noise, free)
        seconds += one.seconds
        if seconds > MEASURE_S:
            break
    return Before(shape, batch, ended, useful / seconds if seconds else 0.0)


def shares_changed(shares: Sequence[int], step: int) -> str:
    """Return the line about new shares of the ranks."""
    parts = ", ".join(str(each) for each in shares[:_SHOWN]) + (", …" if len(shares) > _SHOWN else "")
    return f"step {step}: ranks get {parts} of {sum(shares)} samples a step, by the speed that they measured"


class ResizeLog:
    """Log of resizes. All ranks measure, but only rank 0 writes lines. Methods are not collective."""

    def __init__(
        self, clock: Callable[[], float] = time.time, tell: Callable[[int, float, str], None] = lambda *resize: None
    ) -> None:
        """`tell` is called with step, pause in seconds and text of each resize in the log."""
        self._clock, self._tell = clock, tell
        self._useful = self._seconds = 0.0
        self._warm_up = _WARM_UP
        self._starts: tuple[Before, str, float | None] | None = None
        self._waits: tuple[str, str, float] | None = None
        """(old shape, new shape, useful samples/s before) of a resize, until the speed after it is measured."""

    def started(self, earlier: Before | None, shape: str, gain: float | None) -> None:
        """Record the start of a run; its line is written after the first step. `gain` is the expected ratio of the new
        speed to the speed of `earlier`."""
        if earlier is not None and earlier.shape != shape:
            self._starts = (earlier, shape, gain)

    def switched(
        self, old: str, new: str, step: int, pause_s: float, gain: float | None, *, speaks: bool = True
    ) -> None:
        """Record a change of ranks during training; `speaks` is True on rank 0."""
        before_it = self._useful / self._seconds if self._seconds else 0.0
        self._useful = self._seconds = 0.0
        self._warm_up = _WARM_UP
        self._waits = None
        if speaks:
            self._speak(old, new, step, pause_s, gain, before_it)

    def batch_changed(self) -> None:
        """Drop the speed measured so far, since the batch changes."""
        if self._waits is None:
            self._useful = self._seconds = 0.0

    def stepped(self, step: int, useful: float, seconds: float) -> None:
        """Record the end of a step of `useful` useful samples that took `seconds`."""
        if self._starts is not None:
            (earlier, shape, gain), self._starts = self._starts, None
            pause_s = max(0.0, self._clock() - earlier.ended)
            self._speak(earlier.shape, shape, step - 1, pause_s, gain, earlier.useful_per_s)
        if self._warm_up:
            self._warm_up -= 1
            return
        self._useful += useful
        self._seconds += seconds
        if self._seconds < MEASURE_S:
            return
        if self._waits is not None:
            (old, new, was), self._waits = self._waits, None
            log(f"{new} trains {self._useful / self._seconds / was:.2g} times as fast as {old} did")
        if self._seconds > 2 * MEASURE_S:  # old steps count less
            self._useful, self._seconds = self._useful / 2, self._seconds / 2

    def _speak(self, old: str, new: str, step: int, pause_s: float, gain: float | None, was: float) -> None:
        expected = "" if gain is None else f"; expected {gain:.2g} times as fast"
        text = f"{old} → {new} at step {step}: paused {pause_s:.2g} s{expected}"
        log(text)
        self._tell(step, pause_s, text)
        self._waits = (old, new, was) if was > 0 else None

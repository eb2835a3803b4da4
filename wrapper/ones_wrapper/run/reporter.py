"""What a run records: throughput, its start, reports to the companion, and which samples were used."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ones_wrapper.data.progress import Progress
from ones_wrapper.data.uneven import Watch
from ones_wrapper.files.job_io import Previous, ReportWriter
from ones_wrapper.group import Group
from ones_wrapper.process.log import log
from ones_wrapper.protocol import MAX_TEXT, Bye, Hello, Report, Spec, Throughput


class Reporter:
    """The reports of one rank's run; only rank 0 has a writer. Not collective."""

    def __init__(self, writer: ReportWriter | None, meter: Meter) -> None:
        self._writer = writer
        self._meter = meter
        self._warned = self._left = False

    def lead(self, writer: ReportWriter | None) -> None:
        """This rank writes the reports from now on, of another run; or none, where there is no writer."""
        self._writer = writer
        self._left = False

    def send(self, report: Report | None) -> None:
        """Send a report, where there is one."""
        if report is not None and self._writer is not None:
            self._writer.send(report)

    def send_interval(self, report: Throughput | None) -> None:
        """Send an interval's report, and say what its owner should not find out at the end."""
        self.send(report)
        if report is not None and report.nonfinite and not self._warned and self._writer is not None:
            self._warned = True
            log(f"the loss is not a finite number (by step {report.step}); training goes on, and it is reported")

    def flush(self) -> None:
        """Send the interval so far: what follows is no step, or one at another batch."""
        self.send_interval(self._meter.flush())

    def bye(self, reason: str, step: int, code: int, note: str) -> None:
        """Send the last report; later calls do nothing."""
        if not self._left:
            self._left = True
            self.flush()
            self.send(Bye(reason, step, code, note))


WARM_UP = 2
"""Steps after a start that are not measured: memory and communicators are being set up."""


PENDING = 64
"""Losses that are kept before they are added up."""


@dataclass
class Losses:
    """A sum of losses over samples. It stays on the device until it is read."""

    total: torch.Tensor | float = 0.0
    samples: torch.Tensor | float = 0.0
    nonfinite: torch.Tensor | float = 0.0
    """Losses that were not finite numbers; they are in neither of the others."""

    def add(self, loss: torch.Tensor | float, samples: int) -> None:
        """A mean loss over `samples` samples."""
        if isinstance(loss, torch.Tensor):
            self.add_all([loss.detach()], [samples])
        elif math.isfinite(loss):
            self.total, self.samples = self.total + loss * samples, self.samples + samples
        else:
            self.nonfinite = self.nonfinite + 1

    def add_all(self, losses: Sequence[torch.Tensor], samples: Sequence[int]) -> None:
        """Several at once, all on one device."""
        values = torch.stack([loss.reshape(()) for loss in losses])
        weights = torch.tensor(samples).to(values.device, non_blocking=True)
        finite = torch.isfinite(values)
        self.total = self.total + torch.where(finite, values * weights, 0.0).sum()
        self.samples = self.samples + (finite * weights).sum()
        self.nonfinite = self.nonfinite + (~finite).sum()

    def include(self, other: Losses) -> None:
        """Add all of another sum."""
        self.total = self.total + other.total
        self.samples = self.samples + other.samples
        self.nonfinite = self.nonfinite + other.nonfinite

    @property
    def mean(self) -> float | None:
        """The mean over samples; None without a finite one. Waits for the device."""
        samples = float(self.samples)
        return float(self.total) / samples if samples else None


class Meter:
    """A stopwatch that runs during steps alone, not while checkpoints, drains or evaluation take their
    time.
    """

    def __init__(
        self,
        every_s: float,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """`wait` returns once the device did what is queued: steps that it still owes are no fast ones."""
        self._every_s = every_s
        self._clock = clock
        self._wait = wait
        self._began = clock()
        self._left = WARM_UP
        self._latest: Callable[..., Throughput] | None = None
        """Makes the report of the interval, given its time and its losses."""
        self._samples = 0
        self._seconds = 0.0
        self.step_s = 0.0
        """Length of a step in seconds, smoothed."""
        self.last_s = 0.0
        """Length of the last step."""
        self._epoch, self._interval = Losses(), Losses()
        self.watch: Watch | None = None
        """Tells this rank's own time from its waiting for others, where shares are uneven."""
        self._pending: list[tuple[torch.Tensor, int]] = []
        """Losses of the interval that are not yet added: together they cost one loss's additions."""

    def ranks_changed(self) -> None:
        """The next steps are not measured, as after a start."""
        self._left, self.step_s = WARM_UP, 0.0

    def start(self) -> None:
        """A step begins, with fetching its data."""
        self._began = self._clock()
        if self.watch is not None:
            self.watch.start()

    def leave_out(self, seconds: float) -> None:
        """So much time since the step began was not the step's: an evaluation in its middle."""
        self._began += seconds
        if self.watch is not None:
            self.watch.leave_out(seconds)

    def stop(self, progress: Progress, samples: int, batch: int, lr_factor: float) -> Throughput | None:
        """A step of `samples` samples ended; the report of the interval when it is long enough."""
        seconds = self._clock() - self._began
        # Also at the end of the warm-up: the first interval would have to wait for its steps.
        if self._left == 1 or (not self._left and self._seconds + seconds >= self._every_s):
            self._wait()
            seconds = self._clock() - self._began
        self.last_s = seconds
        if self._left:
            self._left -= 1
            return None
        self.step_s = seconds if self.step_s == 0 else 0.9 * self.step_s + 0.1 * seconds
        self._samples += samples
        self._seconds += seconds
        self._latest = partial(
            Throughput,
            progress.epoch,
            progress.step,
            progress.cursor,
            self._samples,
            batch=batch,
            lr_factor=lr_factor,
            noise=progress.noise or None,
            progress=progress.useful,
        )
        return self._end() if self._seconds >= self._every_s else None

    def settle(self) -> None:
        """Wait for the device, in the interval's time: what follows is no step, and would wait for it in its own."""
        if self._latest is not None:
            began = self._clock()
            self._wait()
            self._seconds += self._clock() - began

    def forget(self) -> None:
        """Drop what is not reported yet, and ask the device for nothing any more: it may hang."""
        self._latest, self._pending = None, []
        self._epoch, self._interval = Losses(), Losses()

    def flush(self) -> Throughput | None:
        """The report of the interval so far, if there is any; a new interval begins."""
        self.settle()
        return self._end()

    def _end(self) -> Throughput | None:
        latest, self._latest = self._latest, None
        seconds, self._samples, self._seconds = self._seconds, 0, 0.0
        self._settle()
        losses, self._interval = self._interval, Losses()
        self._epoch.include(losses)
        if latest is None:
            return None
        return latest(seconds=seconds, loss=losses.mean, nonfinite=int(losses.nonfinite))

    def loss(self, loss: torch.Tensor | float, samples: int) -> None:
        """Add the mean loss over `samples` samples of a pass; stays on the device."""
        if not samples:
            return
        if not isinstance(loss, torch.Tensor):
            self._interval.add(loss, samples)
            return
        # A copy: the script may go on with the tensor.
        self._pending.append((loss.detach().clone(), samples))
        if len(self._pending) == PENDING:
            self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        # Most scripts have one kind of loss; sums of half precision would lose samples.
        for kind in {(loss.device, loss.dtype) for loss, _ in pending}:
            some = [(loss, samples) for loss, samples in pending if (loss.device, loss.dtype) == kind]
            losses = [loss if loss.dtype == torch.float64 else loss.float() for loss, _ in some]
            self._interval.add_all(losses, [samples for _, samples in some])

    def take_epoch(self) -> Losses:
        """The losses of this rank since the last call."""
        self._settle()
        taken, now = self._epoch, self._interval
        taken.include(now)
        self._epoch = Losses(-now.total, -now.samples, -now.nonfinite)  # the interval adds them when it ends
        return taken


class StartReport:
    """The times of a run's beginning, and its hello."""

    def __init__(self, started: float, before: Previous | None, directory: Path, spool: Path | None) -> None:
        """`started` is the Unix time of the script's first call; now, the process group is built. `directory` is the
        job's, `spool` the one that it reads.
        """
        env = os.environ
        self._places = str(directory)[:MAX_TEXT], str(spool or "")[:MAX_TEXT]
        launched = float(env.get("ONES_LAUNCHED") or started)
        self._queue_s = max(0.0, launched - before.time) if before else 0.0
        self._launch_s = max(0.0, started - launched)
        self._import_s = float(env.get("ONES_IMPORT_S") or 0.0)
        self._group_s = time.time() - started
        self._attempt = int(env.get("ONES_ATTEMPT") or 0)
        self._hello_at = 0.0

    def hello(
        self,
        group: Group,
        spec: Spec,
        progress: Progress,
        batch: int,
        lr_factor: float,
        load_s: float,
        loaded: str,
        note: str,
    ) -> Hello:
        """The report. `batch` and `lr_factor` are those in force; `loaded` the checkpoint, `note` what was odd
        about it, and `load_s` how long it took.
        """
        self._hello_at = time.monotonic()
        return Hello(
            nodes=group.nodes,
            gpus_per_node=group.gpus_per_node,
            world=group.world,
            batch=batch,
            lr_factor=lr_factor,
            base_batch=spec.base_batch,
            max_batch=spec.max_batch,
            dataset=spec.dataset,
            epochs=spec.epochs,
            epoch=progress.epoch,
            cursor=progress.cursor,
            step=progress.step,
            checkpoint=loaded,
            note=note[:MAX_TEXT],
            queue_s=self._queue_s,
            launch_s=self._launch_s,
            import_s=self._import_s,
            group_s=self._group_s,
            load_s=load_s,
            noise=progress.noise or None,
            progress=progress.useful,
            resizes=progress.resizes,
            attempt=self._attempt,
            directory=self._places[0],
            spool=self._places[1],
        )

    def since_hello_s(self) -> float:
        """Seconds since the hello."""
        return time.monotonic() - self._hello_at


class Trace:
    """Writes lines `{"restart", "attempt", "rank", "world", "begin": step}` and `{…, "epoch", "step", "samples":
    [indices]}`; in a job of blocks also `{…, "generation"}` where the ranks change.
    """

    def __init__(self, path: Path, common: dict[str, int]) -> None:
        self._path = path
        self._common = common

    @classmethod
    def of(cls, env: Mapping[str, str], restart: int, rank: int, world: int, name: str = "") -> Trace | None:
        """The trace that the environment asks for, if it does. `name` tells processes apart where ranks change; such
        a job's runs are told apart by `restart` alone.
        """
        pattern = env.get("ONES_TRACE")
        if not pattern:
            return None
        path = pattern.replace("{restart}", str(restart)).replace("{rank}", name or str(rank))
        attempt = 0 if name else int(env.get("ONES_ATTEMPT") or 0)
        return cls(Path(path), {"restart": restart, "attempt": attempt, "rank": rank, "world": world})

    def ranks_changed(self, restart: int, rank: int, world: int, generation: int) -> None:
        """What follows is of another membership."""
        self._common |= {"restart": restart, "rank": rank, "world": world}
        self._write({"generation": generation})

    def begin(self, step: int) -> None:
        """The run goes on from this step: what earlier runs did from there on is undone."""
        self._write({"begin": step})

    def step(self, epoch: int, step: int, samples: list[int]) -> None:
        """This rank used these dataset indices in a step."""
        self._write({"epoch": epoch, "step": step, "samples": samples})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({**self._common, **line}) + "\n")

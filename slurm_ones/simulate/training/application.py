"""True curves of a simulated training job: its speed at each size, and its efficiency at each batch.

Only the simulator knows these curves. The companion sees the job's reports, which are noisy.

A faster kind of GPU speeds up compute, but not the exchange of gradients. Applications differ in how much their compute
gains (Gavel, OSDI 2020; Sia, SOSP 2023). Models with large matrices gain the full speed-up of a newer GPU; small
recurrent or embedding models gain little. On kind k, compute is `POWER[k] ** use` times as fast as on the reference
GPU, on which the profiles were measured. The values of `POWER` are our own round numbers from 1.0 to 3.5, not measured.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ones_wrapper.protocol.limits import StrategyLimits
from slurm_ones.policy.contract import Floats, Ints
from slurm_ones.simulate.spec import NONE, Slowdown
from slurm_ones.simulate.training.strategies import TrainedBy

PLACES = 1_000_000
"""Base of the code `nodes * PLACES + gpus`, larger than any number of GPUs in a simulation."""


class Speed(Protocol):
    """Model of the seconds that an optimizer step takes."""

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        """Return two arrays for these local batches: seconds of a step, and seconds of its gradient exchange. The step
        has one pass, without accumulation."""


@runtime_checkable
class PlacedSpeed(Speed, Protocol):
    """Model of step times that depend on how many GPUs are on each node."""

    def placed(self, placement: tuple[int, ...], local: Floats) -> tuple[Floats, Floats]:
        """Return the two arrays of `Speed.step` for a placement, the number of GPUs on each node."""


@dataclass(frozen=True)
class Application:
    """A kind of training job, with its true curves.

    Progress is counted in samples of the base batch: a sample used at efficiency e adds e to the progress. A job is
    done when its progress reaches the end of its last epoch.
    """

    name: str
    speed: Speed
    base_batch: int
    max_batch: int
    max_local_batch: int
    """Largest batch that one GPU can process in one pass. Larger batches need several passes (gradient
    accumulation)."""
    max_gpus: int
    """Largest number of GPUs on which the application can run."""
    ends: Floats
    """(E,) progress at the end of each epoch."""
    batches: Ints
    """(B,) global batches at which the gradient was measured, ascending."""
    sqr: Floats
    var: Floats
    """(E, B) variance of the gradient at the base batch, in each epoch. `sqr` (E, B) is the squared norm of the
    gradient."""
    metric: Floats
    """(E, B) validation metric at the end of each epoch, for training at each batch."""
    min_batch: int = 0
    """Smallest global batch that the application allows; 0 for the base batch."""
    resize_s: float = 30.0
    """Seconds that a resize of this application takes, as in published studies. `--resize-cost` replaces it."""
    parameters: float = 25e6
    """Number of the model's parameters. The state that is sent to new ranks is proportional to it."""
    target: float = math.nan
    """Validation metric that satisfies the job's user. NaN if the user only wants all epochs trained."""
    patience: int = 0
    """Number of epochs without improvement after which the training stops early (`TrainingCurve`); 0 for no early
    stopping. At efficiency 1 the training stops at the last epoch, at lower efficiency at that epoch or earlier."""
    least_gain: float = 0.0
    """Smallest rise of the metric in `patience` epochs that counts as an improvement."""
    passes_alone: int = 1
    """Fewest passes in a step on a single GPU, if the batch is above the base batch."""
    faster: float = 1.0
    """Compute speed on this application's kind of GPU, divided by the speed on the reference GPU."""
    by: TrainedBy | None = None
    """Training strategy; None for plain data parallelism."""
    later: Application | None = None
    """The application after `TrainedBy.from_share` of the training, when ranks exchange less; None if nothing
    changes."""
    _curves: dict[int, Floats] = field(default_factory=dict, repr=False)
    _placed: dict[tuple[tuple[int, ...], float, Slowdown], float] = field(default_factory=dict, repr=False)
    _efficiencies: dict[float, Floats] = field(default_factory=dict, repr=False)
    _single: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> float:
        """Progress of a job that has trained all epochs, in samples of the base batch."""
        return float(self.ends[-1])

    @property
    def dataset(self) -> int:
        """Number of samples in an epoch, estimated from the profile."""
        return max(1, round(self.total / len(self.ends)))

    def altered(self, **values: Any) -> Application:
        """Return a copy with these fields changed. Its caches are empty."""
        known = {field.name: getattr(self, field.name) for field in fields(self) if not field.name.startswith("_")}
        return Application(**{**known, **values})

    def at(self, progress: float) -> Application:
        """Return `later` if it is set and the share `TrainedBy.from_share` of the training is done; else this
        application."""
        frozen = self.by is not None and self.by.frozen(progress / self.total)
        return self.later if frozen and self.later is not None else self

    def limits(self, progress: float) -> StrategyLimits | None:
        """Return the limits that the job reports at this progress; None for a job without a strategy."""
        if self.by is None:
            return None
        most, local = self.max_gpus, self.max_local_batch
        return self.by.limits(most, local, progress / self.total)

    def epoch(self, progress: float) -> int:
        """Return the number of the epoch at this progress, from 0."""
        return min(int(np.searchsorted(self.ends, progress, side="right")), len(self.ends) - 1)

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Return the true samples/s; 0 above `max_gpus`. Arrays are as in `policy.contract.ThroughputModel`."""
        gpus, batch = np.asarray(gpus), np.asarray(batches, dtype=np.float64)
        runs = (gpus >= 1) & (gpus <= self.max_gpus)
        result = np.zeros(np.shape(gpus))
        result[runs] = batch[runs] / self._seconds(np.asarray(nodes)[runs], gpus[runs], batch[runs])
        return result

    def step_seconds(self, nodes: int, gpus: int, batches: Floats) -> Floats:
        """Return the seconds of an optimizer step at each global batch, with all its accumulation passes."""
        return self._seconds(np.full(len(batches), nodes), np.full(len(batches), gpus), batches)

    def placed_speed(self, placement: tuple[int, ...], batch: float, slowdown: Slowdown = NONE) -> float:
        """Return the samples/s on a placement (GPUs on each node). Measurements on this placement are used if the
        profile has them."""
        key = (placement, batch, slowdown)
        if key not in self._placed:
            self._placed[key] = float(self.placed_speeds(placement, np.array([batch]), slowdown)[0])
        return self._placed[key]

    def placed_speeds(self, placement: tuple[int, ...], batches: npt.ArrayLike, slowdown: Slowdown = NONE) -> Floats:
        """Return the samples/s on a placement (GPUs on each node), for each of these batches."""
        gpus, wanted = sum(placement), np.asarray(batches, dtype=np.float64)
        passes, local = self._passes(np.array([gpus]), wanted)
        if isinstance(self.speed, PlacedSpeed):
            step, sync = self._paced(*self.speed.placed(placement, local))
        else:
            step, sync = self._paced(*self.speed.step(len(placement), gpus, local))
        compute = np.maximum(step - sync, 0.0)
        more = passes * compute * (slowdown.compute - 1.0) + sync * (slowdown.exchange - 1.0)
        return wanted / (step + (passes - 1.0) * compute + more)

    def _seconds(self, nodes: Ints, gpus: Ints, batches: Floats) -> Floats:
        """Return the seconds of a step, accumulation passes included. Only the last pass exchanges gradients."""
        passes, local = self._passes(gpus, batches)
        places, row = np.unique(nodes * PLACES + gpus, return_inverse=True)
        curves = np.array([self._curve(place) for place in places.tolist()]).reshape(len(places), 2, -1)
        row = row.ravel()
        # Linear between the local batches of the curves.
        left = np.clip(np.searchsorted(self._locals, local, side="right") - 1, 0, max(len(self._locals) - 2, 0))
        right = np.minimum(left + 1, len(self._locals) - 1)
        gap = np.maximum(self._locals[right] - self._locals[left], 1.0)
        share = np.clip((local - self._locals[left]) / gap, 0.0, 1.0)
        step, sync = ((1.0 - share) * curves[row, i, left] + share * curves[row, i, right] for i in (0, 1))
        result: Floats = step + (passes - 1.0) * np.maximum(step - sync, 0.0)
        return result

    def _passes(self, gpus: Ints, batches: Floats) -> tuple[Floats, Floats]:
        replicas = gpus if self.by is None else gpus / self.by.degree
        passes = np.maximum(np.ceil(batches / replicas / self.max_local_batch), 1.0)
        alone = (gpus == 1) & (batches > self.base_batch)
        passes = np.where(alone, np.maximum(passes, self.passes_alone), passes)
        return passes, np.ceil(batches / replicas / passes)

    @cached_property
    def _locals(self) -> Floats:
        return np.unique(np.round(np.geomspace(1, self.max_local_batch, 64)))

    def _curve(self, place: int) -> Floats:
        """Return (2, L) seconds of a step, and of its gradient exchange, at the L local batches `_locals`. `place` is
        `nodes * PLACES + gpus`."""
        if place not in self._curves:
            self._curves[place] = np.array(self._paced(*self.speed.step(place // PLACES, place % PLACES, self._locals)))
        return self._curves[place]

    def _paced(self, step: Floats, sync: Floats) -> tuple[Floats, Floats]:
        """Convert step and exchange times from the reference GPU to the application's kind of GPU."""
        return (step, sync) if self.faster == 1.0 else (np.maximum(step - sync, 0.0) / self.faster + sync, sync)

    def gradient(self, progress: float, batches: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Return squared norm and variance of the gradient at this progress, interpolated between measured batches."""
        row, batches = self.epoch(progress), np.asarray(batches, dtype=np.float64)
        return np.interp(batches, self.batches, self.sqr[row]), np.interp(batches, self.batches, self.var[row])

    def noise(self, progress: float, batch: float) -> float:
        """Return the gradient noise scale, in samples, that a job with global batch `batch` would measure."""
        sqr, var = self.gradient(progress, batch)
        return self.base_batch * float(var) / max(float(sqr), 1e-12)

    def efficiency(self, progress: float, batches: npt.ArrayLike) -> Floats:
        sqr, var = self.gradient(progress, batches)
        return self._worth(sqr, var, np.asarray(batches, dtype=np.float64) / self.base_batch)

    def efficiencies(self, batch: float) -> Floats:
        """Return (E,) the true progress per sample in each epoch, at one global batch."""
        if batch not in self._efficiencies:
            sqr = np.array([np.interp(batch, self.batches, row) for row in self.sqr])
            var = np.array([np.interp(batch, self.batches, row) for row in self.var])
            self._efficiencies[batch] = self._worth(sqr, var, batch / self.base_batch)
        return self._efficiencies[batch]

    @staticmethod
    def _worth(sqr: Floats, var: Floats, scale: Floats | float) -> Floats:
        """Return the progress per sample at a global batch of `scale` × the base batch (Pollux, OSDI 2021, §3.1)."""
        return np.clip((var + sqr) / np.maximum(var + scale * sqr, 1e-12), 1e-6, 1.0)

    def single_goodput(self, progress: float) -> float:
        """Return the progress/s of a single GPU with its best batch."""
        row, low = self.epoch(progress), float(self.min_batch or self.base_batch)
        if row not in self._single:
            batches = np.unique(np.round(np.geomspace(low, max(low, float(self.max_batch)), 16)))
            goodput = batches / self.step_seconds(1, 1, batches) * self.efficiency(progress, batches)
            self._single[row] = float(goodput.max())
        return self._single[row]

    def metric_at(self, progress: float, batch: float) -> float:
        """Return the validation metric of a job at this progress, trained with this batch."""
        row = int(np.searchsorted(self.ends, progress * (1 + 1e-9), side="right")) - 1
        return float(np.interp(batch, self.batches, self.metric[max(row, 0)]))

    def gained(self, before: float, now: float) -> float:
        """Return the rise of the metric from progress `before` to progress `now`, at the base batch."""
        ends, metric = np.append(0.0, self.ends), np.append(0.0, self.metric[:, 0])
        low, high = np.interp([before, now], ends, metric)
        return float(high - low)

    def seconds(self, nodes: int, gpus: int, batch: float, progress: float, until: float | None = None) -> float:
        """Return the seconds that training from `progress` to `until` (default: the end) takes at one size and
        batch."""
        until = self.total if until is None else until
        rate = batch / float(self.step_seconds(nodes, gpus, np.array([batch]))[0])
        starts = np.concatenate([[0.0], self.ends[:-1]])
        still = np.clip(np.minimum(self.ends, until) - np.maximum(starts, progress), 0.0, None)
        return float((still / self.efficiencies(batch)).sum() / rate)


@dataclass(frozen=True)
class Submission:
    """Job of a workload, as its user submits it."""

    name: str
    time: float
    """Seconds from the start of the simulation to the submission."""
    application: str
    gpus: int
    """Number of GPUs that the user requests."""
    batch: int
    """Global batch that the user chose."""
    elastic: bool = True
    """False for a rigid job, whose user has not opted in."""
    epochs: float = 1.0
    """Share of the application's epochs that the job trains."""
    declares: float = 1.0
    """Number of epochs that the job reports, divided by the number that it trains; 0 to report none."""
    priority: int = 1
    """Slurm priority. Jobs of higher priority start first."""
    deadline_s: float | None = None
    """Seconds from the submission to the user's deadline; None for no deadline."""
    limit_s: float = 0.0
    """Time limit in seconds; 0 for the cluster's default."""


POWER = {"t4": 1.0, "rtx": 1.6, "v100": 2.0, "a100": 3.5}
"""Compute speed of each kind of GPU, divided by that of the reference GPU. An application's speed is multiplied by this
factor to the power of its `USE`."""
USE = {
    "recommender": 0.1,
    "lstm-wikitext2": 0.3,
    "speech-rnn": 0.4,
    "unet-cells": 0.6,
    "detector-voc": 0.6,
    "resnet18-cifar10": 0.5,
    "wideresnet-cifar100": 0.8,
    "resnet50-tiny": 0.8,
    "detector-coco": 0.8,
    "resnet50-imagenet": 0.9,
    "transformer-iwslt": 0.9,
    "bert-glue": 1.0,
    "bert-squad": 1.0,
    "vit-imagenet": 1.0,
    "gpt2-finetune": 1.0,
}
"""Exponent of `POWER` for each application. At 1 its compute gains the full speed of a faster GPU, at 0 nothing."""
LEAST_USE = 0.2
"""Smallest exponent of an application that is not in `USE`. A hash of its name chooses the exponent, up to 1."""


def use_of(application: str) -> float:
    """Return an application's exponent of `POWER`. A variant such as `bert-glue-a` has the exponent of `bert-glue`."""
    for name, use in USE.items():
        if application == name or application.startswith(f"{name}-"):
            return use
    return LEAST_USE + (1.0 - LEAST_USE) * (zlib.crc32(application.encode()) % 1000) / 999.0


def factor(application: str, kind: str) -> float:
    """Return the application's compute speed on a kind of GPU, relative to the reference GPU; 1 for a kind without a
    name."""
    return 1.0 if not kind else float(POWER[kind] ** use_of(application))


def on_kind(app: Application, kind: str) -> Application:
    """Return the application on this kind of GPU, unchanged if it is as fast as on the reference GPU."""
    times = factor(app.name, kind)
    if times == 1.0:
        return app
    later = None if app.later is None else on_kind(replace(app.later, name=app.name), kind)
    return app.altered(faster=times, later=later)


STATE_BYTES = 12.0
"""Bytes of training state per parameter: the weight and two optimizer moments, in single precision."""


@dataclass(frozen=True)
class Requeue:
    """Resize by requeue: the job writes a checkpoint, stops and starts again. In between it does not train."""

    seconds: float | None = 30.0
    """Seconds from any start of a job until it trains; None to use each application's `resize_s`."""

    def start_s(self, app: Application) -> float:
        """Return the seconds from a job's start to its first training step."""
        return app.resize_s if self.seconds is None else self.seconds

    grow_s = shrink_s = start_s
    """Seconds that training pauses when the job gains GPUs (`grow_s`) or loses GPUs (`shrink_s`)."""

    def prepare_s(self, app: Application) -> float:
        """Return the seconds for which a job holds new GPUs before training pauses to include them."""
        return 0.0


@dataclass(frozen=True)
class Hot:
    """Resize from memory: blocks join and leave while the job trains.

    A new block starts while all other blocks train. Then training pauses while the new block is sent the state.
    Training also pauses briefly when blocks leave. The defaults were measured with real jobs on a real Slurm, with gloo
    and without GPUs (docs/benchmarks/resizes.md).
    """

    pause_s: float = 0.3
    """Seconds that training pauses when blocks join, besides the time to send them the state."""
    shrink_pause_s: float = 0.03
    """Seconds that training pauses when blocks leave."""
    bytes_per_s: float = 650e6
    """Speed, in bytes/s, at which the state is sent to new blocks."""
    launch_s: float = 7.0
    """Seconds from a block's start until it can train: it imports, builds the model and makes a first pass. The first
    block of a job takes as long."""
    recover_s: float = 5.0
    """Seconds from the loss of a block until the remaining blocks train again."""
    terms: bool = False
    """True if each change restarts training from a checkpoint, in a new term. Then all costs here must be the costs of
    such a change."""

    def __post_init__(self) -> None:
        for name in ("pause_s", "shrink_pause_s", "launch_s", "recover_s"):
            if not 0 <= getattr(self, name) < 86400:
                raise ValueError(f"{name}: {getattr(self, name)!r} must be seconds, at least 0 and less than a day")
        if not 0 < self.bytes_per_s <= 1e15:
            raise ValueError(f"bytes_per_s: {self.bytes_per_s!r} must be above 0 and at most 1e15")

    def start_s(self, app: Application) -> float:
        return self.launch_s

    def grow_s(self, app: Application) -> float:
        return self.pause_s + self.sent_bytes(app) / self.bytes_per_s

    @staticmethod
    def sent_bytes(app: Application) -> int:
        """Return the bytes of state that are sent to each new block."""
        return round(STATE_BYTES * app.parameters)

    def shrink_s(self, app: Application) -> float:
        return self.shrink_pause_s

    def prepare_s(self, app: Application) -> float:
        return self.launch_s


Mechanism = Requeue | Hot
"""Mechanism that resizes the jobs of a simulation."""


EPSILON = 1e-6


def interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return what `numpy.interp` returns, for one number, but ten times as fast."""
    right = bisect_right(xs, x)
    left = max(right - 1, 0)
    if right in (0, len(xs)) or xs[left] == x:
        return ys[left]
    return (ys[right] - ys[left]) / (xs[right] - xs[left]) * (x - xs[left]) + ys[left]


@dataclass(frozen=True)
class Position:
    """Position in a job's training, as a checkpoint stores it."""

    epoch: int = 0
    """Number of complete epochs, which are passes over the data."""
    cursor: int = 0
    """Number of samples already used in the present epoch."""
    step: int = 0
    progress: float = 0.0
    """Sum of the statistical efficiencies of all samples used."""
    wanted: int = 0
    """Global batch that was last requested, which may differ from the one in use."""
    reached: tuple[float, ...] = (0.0,)
    """Progress at the ends of the last `patience` epochs."""


class TrainingCurve:
    """Course of one job's training, which covers a `share` of the application's epochs.

    Training stops early if the metric has not improved for `patience` epochs, which are passes over the data. At a
    batch of low efficiency an epoch brings little progress, so the training soon stops with a low metric. Such a job
    looks fast although it has failed.
    """

    def __init__(self, application: Application, share: float) -> None:
        self.application = application
        self.dataset = application.dataset
        self.epochs = max(1, math.ceil(len(application.ends) * share - 1e-9))
        """Number of passes over the data that the training takes at the base batch."""
        # Half a sample an epoch may be lost to rounding the dataset's length.
        self.total = application.total * share - 0.5 * len(application.ends)
        metric = application.metric[:, 0]
        self._ends: list[float] = [0.0, *application.ends.tolist()]
        self._metric: list[float] = [min(float(metric[0]), 0.0), *metric.tolist()]
        self._sample_curves: dict[float, list[float]] = {}

    def _sample_curve(self, batch: float) -> list[float]:
        """Return the number of samples used up to the end of each epoch of the profile, if all are used at this
        batch."""
        if batch not in self._sample_curves:
            samples = np.append(0.0, np.cumsum(np.diff(self._ends) / self.application.efficiencies(batch)))
            self._sample_curves[batch] = samples.tolist()
        return self._sample_curves[batch]

    def use(self, at: Position, samples: int, batch: int, steps: int) -> Position:
        """Return the position after `samples` more samples of the same epoch, used in `steps` steps of size `batch`."""
        ends, used = self._ends, self._sample_curve(float(batch))
        progress = interpolated(interpolated(at.progress, ends, used) + samples, used, ends)
        return replace(at, cursor=at.cursor + samples, step=at.step + steps, progress=progress)

    def used(self, at: Position) -> int:
        """Return the number of samples used from the start of the training up to a position."""
        return at.epoch * self.dataset + at.cursor

    def samples_left(self, at: Position, batch: int) -> float:
        """Return the number of samples from a position to the end of the training, at this batch."""
        before, until = (
            interpolated(one, self._ends, self._sample_curve(float(batch))) for one in (at.progress, self.total)
        )
        return max(until - before, 0.0)

    def finished(self, at: Position) -> bool:
        """Return True if the position is at the end of the training."""
        return at.progress >= self.total * (1.0 - 1e-12)

    def next_pass(self, at: Position) -> tuple[Position, bool]:
        """Return the position at the start of the next epoch, and True if early stopping ends the training now."""
        app, reached, gives_up = self.application, at.reached, False
        if app.patience:
            full = len(reached) >= app.patience
            gives_up = full and app.gained(reached[-app.patience], at.progress) <= app.least_gain * (1.0 + EPSILON)
            reached = (*reached, at.progress)[-app.patience :]
        return replace(at, epoch=at.epoch + 1, cursor=0, reached=reached), gives_up

    def accuracy(self, at: Position, batch: int) -> float | None:
        """Return the validation metric at a position; None if it is negative or unknown."""
        metric = self.application.metric_at(at.progress, batch)
        return metric if math.isfinite(metric) and metric >= 0 else None

    def loss(self, at: Position) -> float:
        """Return a made-up training loss. It falls from about 2 at the start to 0.05 at the best metric."""
        metric = interpolated(at.progress, self._ends, self._metric)
        best, first = max(self._metric), self._metric[0]
        return 0.05 + 2.0 * min(max((best - metric) / max(best - first, 1e-9), 0.0), 1.0)

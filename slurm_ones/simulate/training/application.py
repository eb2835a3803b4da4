"""What a simulated training job truly is: its speed at each size, and what a sample is worth at each batch.

Only the simulator knows this. The companion sees what the job's reports say, with noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ones_wrapper.limits import Limits
from slurm_ones.policy.contract import Floats, Ints
from slurm_ones.simulate.training.network import NONE, Slowdown
from slurm_ones.simulate.training.strategies import TrainedBy

PLACES = 1_000_000
"""More GPUs than any job has."""


class Speed(Protocol):
    """Seconds that an optimizer step takes."""

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        """(step, of it gradient exchange) in seconds at each local batch, without accumulation."""


@runtime_checkable
class PlacedSpeed(Speed, Protocol):
    """A speed that knows how much the exact placement matters."""

    def placed(self, placement: tuple[int, ...], local: Floats) -> tuple[Floats, Floats]:
        """As `step`, on nodes that give the job that many GPUs each."""


@dataclass(frozen=True)
class Application:
    """One kind of training job.

    Progress is counted in samples of the base batch: a sample used at a batch of efficiency e brings e samples'
    worth. A job is done when its progress has reached the end of its last epoch.
    """

    name: str
    speed: Speed
    base_batch: int
    max_batch: int
    max_local_batch: int
    """Largest batch that one GPU takes in a pass; beyond, gradients are accumulated."""
    max_gpus: int
    """GPUs beyond which it cannot be run."""
    ends: Floats
    """(E,) progress at the end of each epoch."""
    batches: Ints
    """(B,) global batches at which the gradient was measured, ascending."""
    sqr: Floats
    var: Floats
    """(E, B) squared norm of the gradient and its variance at the base batch, in each epoch."""
    metric: Floats
    """(E, B) validation metric at the end of each epoch."""
    min_batch: int = 0
    """Smallest global batch it takes; 0 for the base batch."""
    resize_s: float = 30.0
    """What the published studies take a resize of this application to cost; `--resize-cost` overrides it."""
    parameters: float = 25e6
    """Of its model: what is sent to new ranks grows with them."""
    target: float = math.nan
    """Metric at which its user is content; NaN where every job that trained its epochs is."""
    patience: int = 0
    """Epochs over the data without improvement after which its training gives up (`patience.EarlyStopping`); 0 where it
    trains to its last epoch. Its last epoch is where that happens at efficiency 1: never later at any other."""
    least_gain: float = 0.0
    """Rise of the metric that counts as an improvement over `patience` epochs."""
    passes_alone: int = 1
    """Passes that one GPU makes at least in a step beyond the base batch."""
    by: TrainedBy | None = None
    """Its training strategy; None where it is plainly data parallel."""
    later: Application | None = None
    """The same once a part of its training is done, where its strategy then exchanges less (`TrainedBy.from_share`)."""
    _curves: dict[int, Floats] = field(default_factory=dict, repr=False)
    _placed: dict[tuple[tuple[int, ...], float, Slowdown], float] = field(default_factory=dict, repr=False)
    _efficiencies: dict[float, Floats] = field(default_factory=dict, repr=False)
    _single: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> float:
        """Progress at which the job is done."""
        return float(self.ends[-1])

    @property
    def dataset(self) -> int:
        """Samples in an epoch, as near as the profile says."""
        return max(1, round(self.total / len(self.ends)))

    def at(self, progress: float) -> Application:
        """The application as it trains from that progress on."""
        frozen = self.by is not None and self.by.frozen(progress / self.total)
        return self.later if frozen and self.later is not None else self

    def limits(self, progress: float) -> Limits | None:
        """What its strategy says of itself at that progress."""
        if self.by is None:
            return None
        most, local = self.max_gpus, self.max_local_batch
        return self.by.limits(most, local, progress / self.total)

    def epoch(self, progress: float) -> int:
        """Epoch that the job is in, from 0."""
        return min(int(np.searchsorted(self.ends, progress, side="right")), len(self.ends) - 1)

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """True samples/s; shapes as in `policy.contract.ThroughputModel`. 0 on more GPUs than it can be run on."""
        gpus, batch = np.asarray(gpus), np.asarray(batches, dtype=np.float64)
        runs = (gpus >= 1) & (gpus <= self.max_gpus)
        result = np.zeros(np.shape(gpus))
        result[runs] = batch[runs] / self._seconds(np.asarray(nodes)[runs], gpus[runs], batch[runs])
        return result

    def step_seconds(self, nodes: int, gpus: int, batches: Floats) -> Floats:
        """Seconds that an optimizer step of each global batch takes, accumulation included; nodes filled up."""
        return self._seconds(np.full(len(batches), nodes), np.full(len(batches), gpus), batches)

    def placed_speed(self, placement: tuple[int, ...], batch: float, slowdown: Slowdown = NONE) -> float:
        """Samples/s on nodes that give the job that many GPUs each, as far as the profile tells them apart."""
        key = (placement, batch, slowdown)
        if key not in self._placed:
            self._placed[key] = float(self.placed_speeds(placement, np.array([batch]), slowdown)[0])
        return self._placed[key]

    def placed_speeds(self, placement: tuple[int, ...], batches: npt.ArrayLike, slowdown: Slowdown = NONE) -> Floats:
        """The same at many batches."""
        gpus, wanted = sum(placement), np.asarray(batches, dtype=np.float64)
        passes, local = self._passes(np.array([gpus]), wanted)
        if isinstance(self.speed, PlacedSpeed):
            step, sync = self.speed.placed(placement, local)
        else:
            step, sync = self.speed.step(len(placement), gpus, local)
        compute = np.maximum(step - sync, 0.0)
        more = passes * compute * (slowdown.compute - 1.0) + sync * (slowdown.exchange - 1.0)
        result: Floats = wanted / (step + (passes - 1.0) * compute + more)
        return result

    def _seconds(self, nodes: Ints, gpus: Ints, batches: Floats) -> Floats:
        """Seconds of a step: passes that accumulate gradients exchange none. All arrays of one dimension."""
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
        """Passes of a step and the samples of a replica in each."""
        replicas = gpus if self.by is None else gpus / self.by.degree
        passes = np.maximum(np.ceil(batches / replicas / self.max_local_batch), 1.0)
        alone = (gpus == 1) & (batches > self.base_batch)
        passes = np.where(alone, np.maximum(passes, self.passes_alone), passes)
        return passes, np.ceil(batches / replicas / passes)

    @cached_property
    def _locals(self) -> Floats:
        """(L,) local batches at which curves are kept."""
        result: Floats = np.unique(np.round(np.geomspace(1, self.max_local_batch, 64)))
        return result

    def _curve(self, place: int) -> Floats:
        """(2, L) step and gradient exchange on `nodes * PLACES + gpus`."""
        if place not in self._curves:
            self._curves[place] = np.array(self.speed.step(place // PLACES, place % PLACES, self._locals))
        return self._curves[place]

    def gradient(self, progress: float, batch: float) -> tuple[float, float]:
        """(squared norm, variance) of the gradient at that point of the training, linear between batches."""
        row = self.epoch(progress)
        sqr = np.interp(batch, self.batches, self.sqr[row])
        return float(sqr), float(np.interp(batch, self.batches, self.var[row]))

    def noise(self, progress: float, batch: float) -> float:
        """Gradient noise scale in samples, as a job at `batch` would measure it."""
        sqr, var = self.gradient(progress, batch)
        return self.base_batch * var / max(sqr, 1e-12)

    def efficiency(self, progress: float, batches: npt.ArrayLike) -> Floats:
        """True progress per sample at each global batch."""
        return self._efficiency(self.epoch(progress), np.asarray(batches, dtype=np.float64))

    def efficiencies(self, batch: float) -> Floats:
        """(E,) true progress per sample at one global batch in each epoch."""
        if batch not in self._efficiencies:
            sqr = np.array([np.interp(batch, self.batches, row) for row in self.sqr])
            var = np.array([np.interp(batch, self.batches, row) for row in self.var])
            self._efficiencies[batch] = self._worth(sqr, var, batch / self.base_batch)
        return self._efficiencies[batch]

    def _efficiency(self, row: int, batches: Floats) -> Floats:
        sqr = np.interp(batches, self.batches, self.sqr[row])
        var = np.interp(batches, self.batches, self.var[row])
        return self._worth(sqr, var, batches / self.base_batch)

    @staticmethod
    def _worth(sqr: Floats, var: Floats, scale: Floats | float) -> Floats:
        """Progress per sample at `scale` times the base batch (Pollux, OSDI 2021, §3.1)."""
        result: Floats = np.clip((var + sqr) / np.maximum(var + scale * sqr, 1e-12), 1e-6, 1.0)
        return result

    def single_goodput(self, progress: float) -> float:
        """Progress/s of one GPU at its best batch."""
        row = self.epoch(progress)
        if row not in self._single:
            self._single[row] = self._best_single(progress)
        return self._single[row]

    def _best_single(self, progress: float) -> float:
        low = float(self.min_batch or self.base_batch)
        batches = np.unique(np.round(np.geomspace(low, max(low, float(self.max_batch)), 16)))
        return float((batches / self.step_seconds(1, 1, batches) * self.efficiency(progress, batches)).max())

    def metric_at(self, progress: float, batch: float) -> float:
        """Validation metric once the progress has reached this point."""
        row = int(np.searchsorted(self.ends, progress * (1 + 1e-9), side="right")) - 1
        return float(np.interp(batch, self.batches, self.metric[max(row, 0)]))

    def gained(self, before: float, now: float) -> float:
        """Rise of the metric between two points of progress at the base batch."""
        ends, metric = np.append(0.0, self.ends), np.append(0.0, self.metric[:, 0])
        low, high = np.interp([before, now], ends, metric)
        return float(high - low)

    def seconds(self, nodes: int, gpus: int, batch: float, progress: float, until: float | None = None) -> float:
        """Seconds from `progress` to `until` (the end) at one size and batch."""
        until = self.total if until is None else until
        rate = batch / float(self.step_seconds(nodes, gpus, np.array([batch]))[0])
        starts = np.concatenate([[0.0], self.ends[:-1]])
        still = np.clip(np.minimum(self.ends, until) - np.maximum(starts, progress), 0.0, None)
        return float((still / self.efficiencies(batch)).sum() / rate)


@dataclass(frozen=True)
class Submission:
    """One job as its user submits it."""

    name: str
    time: float
    """Seconds after the start."""
    application: str
    gpus: int
    """GPUs that its user asks for."""
    batch: int
    """Global batch that its user chose."""
    elastic: bool = True
    """False for a rigid job, which never opted in."""
    epochs: float = 1.0
    """Share of the application's epochs that it trains."""
    declares: float = 1.0
    """Epochs that it says it trains over those that it does; 0 where it does not say."""
    priority: int = 1
    """Slurm's: jobs of higher priority come first."""
    deadline_s: float | None = None
    """Seconds after its submission by which its user wants it to have ended."""
    limit_s: float = 0.0
    """Its time limit; 0 for that of the cluster."""

"""What a simulated training job truly is: its speed at each size, and what a sample is worth at each batch.

Only the simulator knows this. The companion sees what the job's reports say, with noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurm_ones.decide.policy import Floats, Ints


class Speed(Protocol):
    """Seconds that an optimizer step takes."""

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        """(step, of it gradient exchange) in seconds at each local batch, without accumulation."""


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
    target: float = math.nan
    """Metric at which its user is content; NaN where every job that trained its epochs is."""
    _cache: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = field(default_factory=dict, repr=False)
    _to_end: dict[tuple[int, int, float], tuple[Floats, Floats]] = field(default_factory=dict, repr=False)
    _single: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> float:
        """Progress at which the job is done."""
        return float(self.ends[-1])

    @property
    def dataset(self) -> int:
        """Samples in an epoch, as near as the profile says."""
        return max(1, round(self.total / len(self.ends)))

    def epoch(self, progress: float) -> int:
        """Epoch that the job is in, from 0."""
        return min(int(np.searchsorted(self.ends, progress, side="right")), len(self.ends) - 1)

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """True samples/s; shapes as in `decide.policy.ThroughputModel`."""
        result = np.zeros(np.shape(gpus))
        places = np.asarray(nodes) * (2 * self.max_gpus) + np.asarray(gpus)
        for place in np.unique(places[np.asarray(gpus) <= self.max_gpus]):
            here = np.flatnonzero(places == place)
            batch = np.asarray(batches)[here].astype(np.float64)
            result[here] = batch / self.step_seconds(int(nodes[here[0]]), int(gpus[here[0]]), batch)
        return result

    def step_seconds(self, nodes: int, gpus: int, batches: Floats) -> Floats:
        """Seconds that an optimizer step of each global batch takes, accumulation included."""
        locals_, steps, syncs = self._curve(nodes, gpus)
        passes = np.maximum(np.ceil(batches / gpus / self.max_local_batch), 1.0)
        local = np.ceil(batches / gpus / passes)
        step, sync = np.interp(local, locals_, steps), np.interp(local, locals_, syncs)
        result: Floats = step + (passes - 1.0) * np.maximum(step - sync, 0.0)
        return result

    def _curve(self, nodes: int, gpus: int) -> tuple[Floats, Floats, Floats]:
        key = (nodes, gpus)
        if key not in self._cache:
            locals_ = np.unique(np.round(np.geomspace(1, self.max_local_batch, 64)))
            self._cache[key] = (locals_, *self.speed.step(nodes, gpus, locals_))
        return self._cache[key]

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

    def _efficiency(self, row: int, batches: Floats) -> Floats:
        sqr = np.interp(batches, self.batches, self.sqr[row])
        var = np.interp(batches, self.batches, self.var[row])
        scale = batches / self.base_batch
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

    def seconds(self, nodes: int, gpus: int, batch: float, progress: float) -> float:
        """Seconds from `progress` to the end at one size and batch."""
        key = (nodes, gpus, batch)
        if key not in self._to_end:
            rate = batch / float(self.step_seconds(nodes, gpus, np.array([batch]))[0])
            rates = rate * np.array([self._efficiency(e, np.array([batch]))[0] for e in range(len(self.ends))])
            each = np.diff(self.ends, prepend=0.0) / rates
            self._to_end[key] = (rates, np.append(np.cumsum(each[::-1])[::-1], 0.0))
        rates, to_end = self._to_end[key]
        row = self.epoch(progress)
        return float(max(self.ends[row] - progress, 0.0) / rates[row] + to_end[row + 1])

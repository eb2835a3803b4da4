"""Throughput of one job at each size and batch, from what it measured (ONES §3.2).

Per GPU count the mean of the last five measurements, linear between sizes, anchored at (0, 0). Two things are
ours:

**Other batches.** A step takes a + b · local batch: a fixed overhead and a time per sample, both not
negative, fitted to the job's measurements over all sizes. So the speed-up curve is kept per GPU at equal
local batch, and a batch not yet tried at a measured size gets the ratio of the two step times. With one local
batch measured nothing is known of the overhead, and samples/s are taken not to depend on the local batch.

**Larger sizes.** Beyond the largest measured size the paper's method says nothing useful. Here the curve goes
on as n^e, bounded by linear: e = 0.8 while one size is known (each doubling is expected to bring ×1.74, so a
size not yet tried is worth trying), and the exponent that the two largest sizes showed once there are two,
between 0 and 0.95. One measurement at the new size then replaces the guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from slurm_ones.decide.policy import Floats, Ints

LAST = 5
"""Measurements kept per GPU count (ONES)."""
UNTRIED_EXPONENT = 0.8
MAX_EXPONENT = 0.95
MAX_LOCAL_GROWTH = 4.0
"""A local batch beyond this multiple of the largest measured one is not believed to be faster still."""
PRIOR_PER_GPU = 1.0
"""Samples/s of one GPU where nothing was measured: low, so that an unknown job is taken for a long one."""
ABSURD = 1e12
"""No job trains more samples/s or has a larger batch than this."""


@dataclass(frozen=True)
class Measurement:
    """One measured stretch of a run."""

    nodes: int
    gpus_per_node: int
    batch: int
    """Global batch in samples."""
    samples_per_s: float
    """Over all ranks."""
    time: float
    """When it was measured, in seconds of any one clock."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def believable(self) -> bool:
        """Whether every figure is finite, positive and within reason."""
        counts = (self.nodes, self.gpus_per_node, self.batch)
        return (
            math.isfinite(self.time)
            and all(1 <= count < ABSURD for count in counts)
            and 1.0 / ABSURD < self.samples_per_s < ABSURD
        )


class MeasuredThroughput:
    """A `ThroughputModel` over the measurements of one job.

    Measurements that make no sense are dropped. With none left the model is a guess: `prior_per_gpu`
    samples/s on one GPU (pass the median of other jobs where there are some) and n^0.8 of it on n.
    """

    def __init__(self, measurements: Iterable[Measurement], prior_per_gpu: float = PRIOR_PER_GPU) -> None:
        by_gpus: dict[int, list[Measurement]] = {}
        for measurement in sorted((m for m in measurements if m.believable), key=lambda m: m.time):
            by_gpus.setdefault(measurement.gpus, []).append(measurement)
        kept = [m for gpus in sorted(by_gpus) for m in by_gpus[gpus][-LAST:]]

        self.measured: tuple[int, ...] = tuple(sorted(by_gpus))
        """GPU counts that were measured, ascending."""
        local = np.array([m.batch / m.gpus for m in kept])
        speed = np.array([m.samples_per_s for m in kept])
        gpus = np.array([m.gpus for m in kept])
        self._overhead, self._per_sample = _step_time(local, local * gpus / speed)
        self._max_local = MAX_LOCAL_GROWTH * local.max(initial=0.0)
        if self.measured:
            at_unit = speed / self._at_local(local)
            means = [float(at_unit[gpus == n].mean()) for n in self.measured]
        else:
            prior = prior_per_gpu if math.isfinite(prior_per_gpu) and prior_per_gpu > 0 else PRIOR_PER_GPU
            means = [prior]
        self._sizes = np.array([0, *(self.measured or (1,))], dtype=np.float64)
        self._curve = np.array([0.0, *means])
        self._exponent = _exponent(self._sizes, self._curve)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Not known yet."""
        return np.zeros(np.shape(gpus), dtype=np.float64)

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Samples/s at each (GPUs, global batch) pair, finite and not negative; 0 on 0 GPUs."""
        sizes = np.maximum(np.asarray(gpus, dtype=np.float64), 0.0)
        batch = np.maximum(np.asarray(batches, dtype=np.float64), 1.0)
        largest = self._sizes[-1]
        curve = np.interp(sizes, self._sizes, self._curve)
        curve = curve * np.maximum(sizes / largest, 1.0) ** self._exponent
        result: Floats = curve * self._at_local(batch / np.maximum(sizes, 1.0))
        return result

    def _at_local(self, local: Floats) -> Floats:
        """Relative speed at a local batch: samples per step over time per step of one GPU."""
        if self._overhead <= 0.0:
            return np.ones_like(local)
        local = np.minimum(local, self._max_local)
        result: Floats = local / (self._overhead + self._per_sample * local)
        return result


def _step_time(local: Floats, seconds: Floats) -> tuple[float, float]:
    """Overhead a and time per sample b of a step, by nonnegative least squares on relative errors.

    Both scaled so that the mean measured step takes 1. (0, 1) where only one local batch was measured.
    """
    if len(local) < 2 or local.max() < 1.05 * local.min():
        return 0.0, 1.0
    scale = local.mean()
    rows = np.stack([1.0 / seconds, local / scale / seconds], axis=1) * seconds.mean()
    (overhead, per_sample), _ = nnls(rows, np.ones(len(local)))
    if not (math.isfinite(overhead) and math.isfinite(per_sample)) or overhead + per_sample <= 0.0:
        return 0.0, 1.0
    return float(overhead), float(per_sample / scale)


def _exponent(sizes: Floats, curve: Floats) -> float:
    """How the curve goes on beyond its last size."""
    if len(sizes) < 3:
        return UNTRIED_EXPONENT
    shown = math.log(curve[-1] / curve[-2]) / math.log(sizes[-1] / sizes[-2])
    return min(max(shown, 0.0), MAX_EXPONENT)

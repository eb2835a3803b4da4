"""Throughput of one job at each size, placement and batch, from its own measurements and those of other jobs.

ONES (§3.2) interpolates between the means of the last five measurements at each size. Here a model of the step time
(`step_time`, after Pollux) is fitted to all of a job's measurements together. So an untried size is predicted too, with
an uncertainty.

Measurements come from users' jobs and may be false, so three rules limit their influence:

- The longer a job has run at a size, by Slurm's clock, the more a measurement at this size counts. After t seconds, log
  step time has a further standard deviation of `UNPROVEN` · exp(-t / `PROVEN_S`). So the variance of n new measurements
  is NOISE² / n + UNPROVEN² exp(-2t / PROVEN_S).
- At the same samples per GPU, no size is faster per GPU than the smallest measured size n₀. A step on n ≥ n₀ GPUs takes
  at least T(n₀) · c(n) / c(n₀), less the tolerance `LINEAR`; c is the model's compute time.
- If enough similar jobs of other users are known (`peers`), no speed exceeds the expected one by more than
  `PEERS_BEYOND` standard deviations. If a job reports a higher speed at its smallest size, its speeds at all sizes are
  scaled down by the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np

from ones_db import ThroughputPoint
from slurm_ones.learn.step_time import (
    ANY_LOCAL,
    CAUTIOUS,
    MISFIT,
    NOISE,
    PARAMETERS,
    PLAIN,
    Fit,
    Points,
    Prior,
    Sizes,
    StepLayout,
    correlated,
    fit_all,
    log_compute,
    log_step,
    log_step_and_slopes,
    padded,
    sizes,
)
from slurm_ones.policy.contract import Floats, Ints

LAST = 5
"""Number of newest measurements kept at each pair of shape and batch (as in ONES)."""
MOST_POINTS = 16
"""Largest number of pairs of shape and batch to which a model is fitted; the latest are used."""
ODD = math.log(2.0)
"""Largest log ratio of a measurement to the median at its size. A larger one (a stall, a clock jump) is dropped."""
ABSURD = 1e12
"""Largest value of samples/s, batch and counts in an accepted measurement."""
LONGEST = 27.0
"""Bound on the absolute value of the log of a step's seconds."""
MOST_DOUBT = 2.0
"""Largest standard deviation of log throughput that is returned."""
UNPROVEN, PROVEN_S = 0.25, 300.0
LINEAR = 0.2
"""Log of the factor by which noise may make scaling look better than linear."""
PEERS_BEYOND = 2.0


def believable(point: ThroughputPoint) -> bool:
    """Tell whether every number of the measurement is finite and within limits."""
    counts = (point.shape.nodes, point.shape.gpus_per_node, point.batch)
    return (
        math.isfinite(point.time)
        and all(1 <= count < ABSURD for count in counts)
        and 1.0 / ABSURD < point.samples_per_s < ABSURD
    )


def reference_of(measured: Iterable[ThroughputPoint], base_batch: int | None, max_local: float) -> float:
    """Return a job's reference local batch: its base batch or its largest local batch, whichever is smaller. Without a
    base batch it is the mean measured local batch."""
    if base_batch is not None and base_batch >= 1:
        return max(min(float(base_batch), max_local), 1.0)
    locals_ = [point.batch / point.shape.gpus for point in measured if believable(point)]
    return max(math.exp(float(np.mean(np.log(locals_)))), 1.0) if locals_ else 32.0


def points_of(
    measured: Iterable[ThroughputPoint],
    reference: float,
    layout: StepLayout = PLAIN,
    ran: Mapping[tuple[int, int], float] | None = None,
) -> Points:
    """Return a job's plausible measurements, combined for each pair of size and batch.

    `ran` holds the seconds that the job has run on each (nodes, GPUs). Without it, measurements count fully.
    """
    kinds: dict[tuple[int, int, int], list[float]] = {}
    for point in sorted(filter(believable, measured), key=lambda point: point.time):
        kind = (point.shape.nodes, point.shape.gpus, point.batch)
        # The key is removed and inserted again, so that the keys are in the order of their last measurement.
        logs = kinds.pop(kind, [])
        kinds[kind] = [*logs[1 - LAST :], math.log(point.batch / point.samples_per_s)]
    kept = list(kinds.items())[-MOST_POINTS:]
    logs_and_counts = [_typical(logs) for _, logs in kept]
    nodes, gpus, batches = np.array([kind for kind, _ in kept], dtype=np.float64).reshape(-1, 3).T
    variance = NOISE**2 / np.array([count for _, count in logs_and_counts], dtype=np.float64)
    if ran is not None:
        lasted = np.array([ran.get((on, gpus_), 0.0) for (on, gpus_, _), _ in kept])
        variance = variance + UNPROVEN**2 * np.exp(-2.0 * lasted / PROVEN_S)
    return Points(
        sizes(nodes, gpus, batches, reference, layout),
        np.array([log for log, _ in logs_and_counts]),
        NOISE**2 / variance,
    )


def _typical(logs: list[float]) -> tuple[float, int]:
    middle = sorted(logs)[len(logs) // 2]
    near = [log for log in logs if abs(log - middle) <= ODD]
    return sum(near) / len(near), len(near)


def moved(fit: Fit, by: Floats) -> Fit:
    """Return the fit with `by` (parameters,) added to its parameters, and its measurements scaled accordingly."""
    parameters, points, reference = fit.parameters + by, fit.points, np.float64(fit.reference)
    longer = log_step(parameters, points.at, reference) - log_step(fit.parameters, points.at, reference)
    return replace(fit, parameters=parameters, points=replace(points, log_step=points.log_step + longer))


class MeasuredThroughput:
    """`ThroughputModel` of one job. Its results are finite even if measurements are absurd."""

    def __init__(
        self, fit: Fit, layout: StepLayout = PLAIN, peers: Prior | None = None, widths: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        self.fit = fit
        self.layout = layout
        self.widths = widths
        """Factors on the predicted standard deviation, inside a node and across nodes (`hierarchy.found_widths`)."""
        self.peers: MeasuredThroughput | None = None
        """Upper bound on the job's speed: a model of other users' jobs with the same spec. None if there are too
        few."""
        if peers is not None:
            expected = fit_all([(points_of((), fit.reference), fit.reference, peers)])[0]
            self.peers = MeasuredThroughput(expected, layout)
        self.believed = self._believed()
        """Factor on the job's speeds at all sizes, at most 1: the plausible speed at its smallest measured size,
        divided by the reported one."""
        self.apart: Floats = np.zeros(PARAMETERS)
        """Direction of additional uncertainty of the parameters (parameters,); its length is one standard deviation."""

    def _believed(self) -> float:
        if self.peers is None or not len(self.fit.misfit):
            return 1.0
        points, first = self.fit.points, _first(self.fit.points)
        gpus, log_step = float(points.at.gpus[first]), float(points.log_step[first])
        batch = gpus * math.exp(float(points.at.local[first])) * self.fit.reference
        asked = (1 + int(points.at.across[first]), round(gpus), round(batch))
        most = float(self.peers.plausible(*(np.array([number]) for number in asked))[0])
        return min(most * math.exp(log_step) / batch, 1.0)

    def moved(self, by: Floats, doubt: Floats) -> MeasuredThroughput:
        """Return the model on another kind of GPU, with `by` added to the parameters and `doubt` to their uncertainty
        (both: parameters,)."""
        found = copy(self)
        found.__dict__.pop("_alone", None)
        found.fit, found.apart = moved(self.fit, by), doubt
        found.peers = self.peers.moved(by, doubt) if self.peers is not None else None
        return found

    @classmethod
    def of(cls, measured: Iterable[ThroughputPoint] = (), prior: Prior = CAUTIOUS) -> MeasuredThroughput:
        """Return a model from these measurements and this prior, for a job without a spec."""
        measured = list(measured)
        reference = reference_of(measured, None, ANY_LOCAL)
        return cls(fit_all([(points_of(measured, reference), reference, prior)])[0])

    @classmethod
    def together(cls, models: Sequence[MeasuredThroughput]) -> MeasuredThroughputs:
        """Combine models of several jobs into one, with a row for each job in its arrays."""
        return MeasuredThroughputs(models)

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Return samples/s at each size and global batch, finite and not negative; 0 on 0 GPUs."""
        return self._alone.throughput(*_as_row(nodes, gpus, batches)).reshape(np.shape(gpus))

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Return the relative standard deviation of `throughput` due to parameters and misfit."""
        return self._alone.uncertainty(*_as_row(nodes, gpus, batches)).reshape(np.shape(gpus))

    def plausible(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Return the highest plausible samples/s: `throughput` plus `PEERS_BEYOND` standard deviations of its log."""
        return self._alone.plausible(*_as_row(nodes, gpus, batches)).reshape(np.shape(gpus))

    @cached_property
    def _alone(self) -> MeasuredThroughputs:
        return MeasuredThroughputs((self,))


def _as_row(*arrays: Ints) -> Iterator[Ints]:
    return (np.ravel(array)[None, :] for array in arrays)


class MeasuredThroughputs:
    """Models of several jobs that predict in one call, in arrays (jobs, sizes)."""

    def __init__(self, models: Sequence[MeasuredThroughput]) -> None:
        fits = [model.fit for model in models]
        self._layouts = [model.layout for model in models]
        self._reference = np.array([[fit.reference] for fit in fits])
        self._parameters = np.stack([fit.parameters for fit in fits])
        self._covariance = np.stack([fit.covariance for fit in fits])
        most = max(len(fit.misfit) for fit in fits)
        # Padding has weight 0.
        self._points = Sizes.together([fit.points.at for fit in fits], padded)
        self._misfit = padded([fit.misfit for fit in fits], 0.0)
        self._slopes = np.zeros((len(fits), most, PARAMETERS))
        self._weights = np.zeros((len(fits), most, most))
        for j, fit in enumerate(fits):
            known = len(fit.misfit)
            self._slopes[j, :known], self._weights[j, :known, :known] = fit.slopes, fit.weights
        self._first = [(j, _first(fit.points)) for j, fit in enumerate(fits) if len(fit.misfit)]
        self._first_step = np.array([[fits[j].points.log_step[first]] for j, first in self._first])
        self._guarded = [j for j, model in enumerate(models) if model.peers is not None]
        peers = [model.peers for model in models if model.peers is not None]
        self._peers = MeasuredThroughputs(peers) if peers else None
        self._widths = np.array([model.widths for model in models])
        self._apart = np.stack([model.apart for model in models])
        self._believed = np.array([[models[j].believed] for j in self._guarded])

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        at = self._at(nodes, gpus, batches)
        step = self.log_step(at)
        speed = np.exp(np.log(at.gpus) + at.local + np.log(self._reference) - step)
        if self._peers is not None:
            guarded = self._guarded
            most = self._peers.plausible(nodes[guarded], gpus[guarded], batches[guarded])
            speed[guarded] = np.minimum(speed[guarded] * self._believed, most)
        return np.where(gpus > 0, speed, 0.0)

    def plausible(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        deviation = np.sqrt(np.log1p(self.uncertainty(nodes, gpus, batches) ** 2))
        return self.throughput(nodes, gpus, batches) * np.exp(PEERS_BEYOND * deviation)

    def _linear(self, at: Sizes) -> Floats:
        """Return a lower bound of log step time, by linear scaling from the job's smallest measured size; -inf up to
        that size. The shape is (jobs with measurements, sizes)."""
        rows = [j for j, _ in self._first]
        anchor = self._points.each(lambda values: np.array([[values[j, p]] for j, p in self._first]))
        here, parameters = at.each(lambda values: values[rows]), self._parameters[rows]
        longer = log_compute(parameters, here) - log_compute(parameters, anchor)
        return np.where(here.gpus > anchor.gpus, self._first_step + longer - LINEAR, -np.inf)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return np.sqrt(np.expm1(self.variance(self._at(nodes, gpus, batches))))

    def log_step(self, at: Sizes) -> Floats:
        """Return the log of a step's seconds (jobs, sizes)."""
        step = log_step(self._parameters, at, self._reference)
        if self._first:
            step = step + np.einsum("jqp,jp->jq", correlated(at, self._points), self._misfit)
            measured = [j for j, _ in self._first]
            step[measured] = np.maximum(step[measured], self._linear(at))
        return np.minimum(np.maximum(step, -LONGEST), LONGEST)

    def variance(self, at: Sizes) -> Floats:
        """Return the variance of `log_step` (jobs, sizes)."""
        slopes = log_step_and_slopes(self._parameters, at, self._reference)[1]
        apart = np.einsum("jqa,ja->jq", slopes, self._apart) ** 2
        variance = np.full(np.shape(at.gpus), MISFIT**2)
        if self._first:
            near = correlated(at, self._points)
            weighed = near @ self._weights
            slopes = slopes - weighed @ self._slopes
            variance -= (weighed * near).sum(axis=-1)
        variance += ((slopes @ self._covariance) * slopes).sum(axis=-1)
        variance *= np.where(at.across > 0, self._widths[:, 1:], self._widths[:, :1]) ** 2
        variance += apart
        return np.where(np.isnan(variance), MOST_DOUBT**2, np.minimum(np.maximum(variance, 0.0), MOST_DOUBT**2))

    def _at(self, *asked: Ints) -> Sizes:
        nodes, gpus, batches = (array.astype(np.float64) for array in asked)
        if all(not len(layout.gpus) for layout in self._layouts):
            most = np.array([[layout.max_local] for layout in self._layouts])
            sent = np.array([[layout.gradient_gb] for layout in self._layouts])
            # For jobs without rows, one column of their own numbers stands in for the single number.
            return sizes(nodes, gpus, batches, self._reference, StepLayout(most, gradient_gb=sent))  # type: ignore[arg-type]
        each = [
            sizes(nodes[j], gpus[j], batches[j], float(self._reference[j, 0]), layout)
            for j, layout in enumerate(self._layouts)
        ]
        return Sizes.together(each, np.stack)


def _first(known: Points) -> int:
    """Return the index of the smallest measured size's point; of several batches, the one measured most often."""
    return int(np.lexsort((-known.count, known.at.gpus))[0])

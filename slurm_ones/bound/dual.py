"""Dual bound on the sum of JCTs: the least cost of each job by itself when GPUs have a price.

Any schedule gives job j some number of GPUs n_j(t), with Σ n_j(t) ≤ N at every moment. For any prices λ(t) ≥ 0

    Σ JCT_j ≥ Σ [JCT_j + ∫ λ n_j dt] − N ∫ λ dt ≥ Σ V_j(λ) − N ∫ λ dt,

with V_j(λ) the least sum of JCT and GPU cost over all ways to run job j by itself. The right-hand side is the
Lagrangian dual: a bound at any prices. It is concave in λ, so the prices can be improved step by step. Prices are
constant in intervals, and 0 after the last.

GPUs of several kinds count as multiples of one kind (`curves.Curve.counted`). Then the prices of the kinds are λ(t)
times these multiples, and all of the following holds unchanged.

The gradient by a price is the GPU-seconds that the jobs would take in its interval minus the GPU-seconds available.

V_p(t) is the least remaining cost of a job that begins part p of its training at time t. Λ(t) is the cost of one GPU
until t, and d = work / rate(n) is the time of the part on n GPUs. Bellman's equation,

    V_p(t) = min over s ≥ t and n of  (s − t) + d + n (Λ(s + d) − Λ(s)) + V_{p+1}(s + d),

is solved backwards from V = 0 after the last part. A forward pass over the same choices gives the GPU-seconds that the
job takes in each price interval.

Two errors are numerical:

- V is computed at moments and interpolated linearly. V is a minimum over many choices and therefore mostly concave, so
  interpolation gives too low a V. More moments raised the bound in every case tried.
- A job keeps its GPUs for a whole part, at a size on the concave hull of its rates. A real job could divide a part
  between two sizes, and would when the price changes. Too few parts therefore make the bound too high. The best
  schedule of two jobs on two GPUs is known: for it the bound was 0.13 % too high with 8 parts, and not too high with 16
  or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from slurm_ones.bound.curves import Curve, Work, hull
from slurm_ones.policy.contract import Floats, Ints


class Way(NamedTuple):
    """Sizes that a job can have in one part of its training, and the seconds that the part takes at each size."""

    sizes: Floats
    """GPUs of each size (sizes,), ascending."""
    seconds: Floats
    """Seconds that the part takes at each size (sizes,)."""


def ways_of(curve: Curve) -> Sequence[Way]:
    """Return, for each part of a curve, the sizes on its concave hull."""
    found: list[Way] = []
    columns: list[int] = []
    for k, rate in enumerate(curve.rate):
        if k == 0 or not np.array_equal(rate, curve.rate[k - 1]):
            columns = hull(curve.sizes, rate)
        found.append(Way(np.asarray(curve.sizes, dtype=np.float64)[columns], curve.work[k] / rate[columns]))
    return found


class Costs:
    """Costs in seconds of all jobs with one curve. Prices are constant between two `edges`."""

    def __init__(self, curve: Curve, submitted: Floats, edges: Floats, moments: Floats) -> None:
        """Prepare to compute V at the `moments`, which ascend from the first edge to the last and include all edges."""
        self._ways = ways_of(curve)
        first = int(np.searchsorted(moments, submitted.min(), side="right")) - 1
        self._edges, self._moments = edges, moments[first:]
        self._begin = self._split(submitted, np.ones(len(submitted)))

    def _split(self, times: Floats, jobs: Floats) -> Floats:
        """Return the number of jobs at each moment (moments,). A job between two moments is divided between them."""
        times = np.minimum(times, self._moments[-1])
        floor = np.minimum(np.searchsorted(self._moments, times, side="right") - 1, len(self._moments) - 2)
        before, after = self._moments[floor], self._moments[floor + 1]
        above = (times - before) / (after - before) * jobs
        count = len(self._moments)
        return _sums(floor, jobs - above, count) + _sums(floor + 1, above, count)

    def at(self, prices: Floats) -> tuple[float, Floats]:
        """Return the costs of all jobs at these prices (intervals,), and their gradient by the prices (intervals,).

        The gradient is the GPU-seconds that the jobs take in each interval.
        """
        moments = self._moments
        paid = np.interp(moments, self._edges, np.append(0.0, np.cumsum(prices * np.diff(self._edges))))
        value, places = np.zeros(len(moments)), np.arange(len(moments))
        chosen: list[tuple[Ints, Ints]] = []
        for way in reversed(self._ways):
            each = zip(way.sizes, way.seconds, strict=True)
            cost = np.array([np.interp(moments + d, moments, value + n * paid) + (d - n * paid) for n, d in each])
            column = cost.argmin(axis=0)
            by_then = moments + cost[column, places]
            least = np.minimum.accumulate(by_then[::-1])[::-1]
            until = np.minimum.accumulate(np.where(by_then == least, places, len(places))[::-1])[::-1]
            value = least - moments
            chosen.append((column, until))
        return float(self._begin @ value), self._used(chosen[::-1])

    def _used(self, chosen: Sequence[tuple[Ints, Ints]]) -> Floats:
        """Return the GPU-seconds that the jobs take in each interval (intervals,).

        `chosen` has two index arrays (moments,) for each part of the training: for a job that reaches the part at a
        moment, its size, and the moment at which it starts the part.
        """
        there, starts, ends, gpus = self._begin, [], [], []
        for way, (column, until) in zip(self._ways, chosen, strict=True):
            there = _sums(until, there, len(until))
            some = np.flatnonzero(there)
            start, size = self._moments[some], way.sizes[column[some]]
            end = start + way.seconds[column[some]]
            starts.append(start)
            ends.append(end)
            gpus.append(there[some] * size)
            there = self._split(end, there[some])
        weight = np.concatenate(gpus)
        taken = self._since(np.concatenate(starts), weight) - self._since(np.concatenate(ends), weight)
        return np.diff(taken)

    def _since(self, times: Floats, gpus: Floats) -> Floats:
        """Return the GPU-seconds used up to each edge (edges,) by GPUs that are held from `times` on."""
        edges = self._edges
        at = np.searchsorted(edges, times, side="left")
        held = np.cumsum(_sums(at, gpus, len(edges) + 1))[: len(edges)]
        return edges * held - np.cumsum(_sums(at, gpus * times, len(edges) + 1))[: len(edges)]


def _sums(places: Ints, weights: Floats, count: int) -> Floats:
    return np.bincount(places, weights, count).astype(np.float64, copy=False)


class Dual:
    """Dual function of a workload. Prices are constant between two of the ascending `edges`, in seconds."""

    def __init__(self, work: Work, edges: Floats, moments: int) -> None:
        """Compute costs at `moments` moments in each interval. The edges must span all submissions."""
        self.work, self.edges = work, edges
        self.lengths: Floats = np.diff(edges)
        every = np.arange(len(self.lengths) * moments + 1) / moments
        known = np.interp(every, np.arange(len(edges)), edges)
        known[::moments] = edges
        self._costs = [
            Costs(curve, work.submitted[work.curve == c], edges, known)
            for c, curve in enumerate(work.curves)
            if (work.curve == c).any()
        ]

    def value(self, prices: Floats) -> tuple[float, Floats]:
        """Return the bound on the sum of all JCTs at these prices (intervals,), and its gradient by them
        (intervals,)."""
        bill = self.work.gpus * self.lengths
        total, used = -float(prices @ bill), -bill
        for costs in self._costs:
            cost, gpu_s = costs.at(prices)
            total, used = total + cost, used + gpu_s
        return total, used


def improved(dual: Dual, evaluations: int, start: Floats | None = None) -> tuple[float, Floats]:
    """Return the highest bound on the sum of JCTs that about `evaluations` evaluations find, and its prices
    (intervals,).

    The search starts at the prices `start`, or else at the best of four constant prices. Each of the four is lower by a
    factor of 4 after the last submission.
    """
    scale = 1.0 / np.sqrt(dual.lengths)
    best = (-np.inf, np.zeros(len(scale)))

    def negative(x: Floats) -> tuple[float, Floats]:
        nonlocal best
        value, gradient = dual.value(x * scale)
        if value > best[0]:
            best = (value, x * scale)
        return -value, -gradient * scale

    early = dual.edges[:-1] <= dual.work.submitted.max()
    few = [np.where(early, price, price / 4.0) for price in np.geomspace(0.004, 0.25, 4)]
    for prices in few if start is None else [start]:
        negative(prices / scale)
    minimize(
        negative,
        best[1] / scale,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, None)] * len(scale),
        options={"maxfun": evaluations, "maxiter": evaluations, "maxcor": 20},
    )
    return best

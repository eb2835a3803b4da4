"""The dual bound: what all jobs cost at least, each alone, where GPUs have a price.

Any schedule of any kind gives job j some numbers of GPUs n_j(t) with Σ n_j(t) ≤ N at every moment. For any prices
λ(t) ≥ 0

    Σ JCT_j ≥ Σ [JCT_j + ∫ λ n_j dt] − N ∫ λ dt ≥ Σ V_j(λ) − N ∫ λ dt,

with V_j(λ) the least of a job's own JCT and its bill, over everything that it could do if it were alone. The right-hand
side is the Lagrangian dual: each value of it is a bound, and it is concave in λ, so prices are improved for as long as
one likes. Prices are constant in intervals, and 0 after the last. V is found backwards in time for every curve by
dynamic programming over progress (`steps`); jobs of one curve share it, and enter where they are submitted.

GPUs of several kinds count as so many of one of them (`curves.KindCurve.counted`): the prices of the kinds then are
λ(t) times these numbers, and what follows is the same.

The gradient by a price is the GPU-seconds that the jobs would take in that interval less those there are.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from slurm_ones.schedule.policy import Floats, Ints
from slurm_ones.simulate.bound.steps import Steps, at
from slurm_ones.simulate.bound.work import Work

LEAST = 1e-9
"""Price that stands for none, so that what is impossible stays so."""


class Dual:
    """The dual of some work, with prices that are constant between the `edges` (I + 1,) in seconds, ascending."""

    def __init__(self, work: Work, edges: Floats) -> None:
        """The first edge is no later than the first submission, the last one no earlier than the last."""
        self.work, self.edges = work, edges
        self.lengths: Floats = np.diff(edges)
        self._steps = Steps(work.curves)
        # Lengths that differ by rounding alone share their steps.
        kinds, self._kind = np.unique(np.round(self.lengths, 6), return_inverse=True)
        self._ways = [self._steps.ways(length) for length in kinds.tolist()]
        self._begin: Ints = np.clip(np.searchsorted(edges, work.submitted, side="right") - 1, 0, len(self.lengths) - 1)
        """(J,) interval in which each job is submitted."""
        self._first_s: Floats = edges[self._begin + 1] - work.submitted
        self._first, self._leads = self._steps.first(work.curve, self._first_s)

    def value(self, prices: Floats) -> tuple[float, Floats]:
        """(bound on the sum of all JCTs, its gradient by each price (I,)) at prices (I,)."""
        steps, work = self._steps, self.work
        parts, jobs = steps.parts, np.arange(len(work.curve))
        after = np.zeros((len(work.curves), parts + 2))
        # Whoever is left after the last interval has the cluster for nothing.
        after[:, : parts + 1] = steps.left
        total, prices = 0.0, np.maximum(prices, LEAST)
        choices: list[tuple[Ints, Floats]] = []
        begun: dict[int, tuple[Ints, Floats]] = {}
        for i in range(len(prices) - 1, -1, -1):
            price, ways = float(prices[i]), self._ways[self._kind[i]]
            after[:, parts + 1] = after[:, parts] - steps.last(price)
            entering = jobs[self._begin == i]
            if len(entering):
                costs, begun[i] = self._enter(entering, price, after)
                total += costs
            cost = price * ways.gpu_s + ways.values(after) + ways.seconds
            choice = cost.argmin(axis=2)
            on = np.take_along_axis(cost, choice[:, :, None], axis=2)[:, :, 0]
            needs = np.take_along_axis(ways.gpu_s, choice[:, :, None], axis=2)[:, :, 0]
            end, end_needs = steps.ending(price, ways.seconds)
            ends = end <= on
            after = np.zeros_like(after)
            after[:, : parts + 1] = np.where(ends, end, on)
            after[:, parts] = np.minimum(after[:, parts], 0.0)
            choices.append((np.where(ends, -1, choice), np.where(ends, end_needs, needs)))
        used = self._used(choices[::-1], begun)
        bill = work.gpus * self.lengths
        return total - float(prices @ bill), used - bill

    def _enter(self, jobs: Ints, price: float, after: Floats) -> tuple[float, tuple[Ints, Floats]]:
        """What the jobs that are submitted in an interval cost, and (step, GPU-seconds) of each in it."""
        steps, curve, left = self._steps, self.work.curve[jobs], self._first_s[jobs]
        cost = price * self._first[jobs] + at(after[curve], self._leads[jobs]) + left[:, None]
        choice = cost.argmin(axis=1)
        rows = np.arange(len(jobs))
        end, end_needs = steps.ending_first(price, left, curve)
        on, needs = cost[rows, choice], self._first[jobs][rows, choice]
        ends = end <= on
        found = np.where(ends, end, on)
        return float(found.sum()), (np.where(ends, -1, choice), np.where(ends, end_needs, needs))

    def _used(self, choices: list[tuple[Ints, Floats]], begun: dict[int, tuple[Ints, Floats]]) -> Floats:
        """(I,) GPU-seconds that all jobs take in each interval. A job between two whole numbers counts as parts of
        two."""
        steps, work = self._steps, self.work
        parts = steps.parts
        there = np.zeros((len(work.curves), parts + 1))
        used = np.zeros(len(choices))
        rows = np.arange(len(work.curves))[:, None]
        starts = np.broadcast_to(np.arange(parts + 1), there.shape)
        for i, (choice, needs) in enumerate(choices):
            used[i] = float((there * np.where(there > 0, needs, 0.0)).sum())
            moved = np.zeros((len(work.curves), parts + 2))
            goes = np.where(choice >= 0, there, 0.0)
            ways = self._ways[self._kind[i]]
            floor, above = ways.floor[rows, starts, choice], ways.above[rows, starts, choice]
            np.add.at(moved, (rows, floor), goes * (1.0 - above))
            np.add.at(moved, (rows, floor + 1), goes * above)
            if i in begun:
                first, need = begun[i]
                used[i] += float(need.sum())
                on = first >= 0
                jobs = np.flatnonzero(self._begin == i)[on]
                curve, leads = work.curve[jobs], self._leads[jobs, first[on]]
                floor = np.minimum(np.floor(leads), parts).astype(np.int64)
                above = leads - floor
                np.add.at(moved, (curve, floor), 1.0 - above)
                np.add.at(moved, (curve, floor + 1), above)
            there = moved[:, : parts + 1]
            there[:, parts] = 0.0
        return used


def improved(dual: Dual, evaluations: int, start: Floats | None = None) -> tuple[float, Floats]:
    """(bound on the sum of JCTs, prices (I,)): the best of so many evaluations.

    Prices begin at the `start`, else at the best of a few that are the same for all intervals, but for those after the
    last submission.
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

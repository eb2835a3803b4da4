"""The dual bound: what all jobs cost at least, each alone, where GPUs have a price.

Any schedule of any kind gives job j some numbers of GPUs n_j(t) with Σ n_j(t) ≤ N at every moment. For any prices
λ(t) ≥ 0

    Σ JCT_j ≥ Σ [JCT_j + ∫ λ n_j dt] − N ∫ λ dt ≥ Σ V_j(λ) − N ∫ λ dt,

with V_j(λ) the least of a job's own JCT and its bill, over everything that it could do if it were alone. The right-hand
side is the Lagrangian dual: each value of it is a bound, and it is concave in λ, so prices are improved for as long as
one likes. Prices are constant in intervals, and 0 after the last. How V is found: `costs`.

GPUs of several kinds count as so many of one of them (`curves.KindCurve.counted`): the prices of the kinds then are
λ(t) times these numbers, and what follows is the same.

The gradient by a price is the GPU-seconds that the jobs would take in that interval less those there are.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from slurm_ones.schedule.policy import Floats
from slurm_ones.simulate.bound.costs import Costs
from slurm_ones.simulate.bound.work import Work


class Dual:
    """The dual of some work, with prices that are constant between the `edges` (I + 1,) in seconds, ascending."""

    def __init__(self, work: Work, edges: Floats, moments: int) -> None:
        """The first edge is no later than the first submission, the last one no earlier than the last. What a job costs
        is known at so many moments in each interval."""
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
        """(bound on the sum of all JCTs, its gradient by each price (I,)) at prices (I,)."""
        bill = self.work.gpus * self.lengths
        total, used = -float(prices @ bill), -bill
        for costs in self._costs:
            cost, gpu_s = costs.at(prices)
            total, used = total + cost, used + gpu_s
        return total, used


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

"""DecentLaM against DmSGD over real gloo ranks, at the setting that its bias is stated for: 8 ranks in a ring,
γ = 2e-4, β = 0.9, linear regressions in 30 dimensions whose data differs between ranks, full gradients.

`bias_ratio`: DmSGD's squared distance from the optimum over DecentLaM's; at most 1/(1 − β)² = 100. `fixed_point_error`:
the larger of both distances from the fixed points, which are found by a linear solve.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ones_wrapper.group import Group
from ones_wrapper.group.flat import flattened, unflatten
from ones_wrapper.strategies.decentlam.strategy import DecentLamExchange
from ones_wrapper.strategies.decentlam.topologies import mixing
from tests.wrapper.forked import Team
from tests.wrapper.gradients.quadratics import Array, Point, minimise, quadratic, regression

RANKS, SIZE, RATE, MOMENTUM = 8, 30, 2e-4, 0.9
STEPS, AT_ONCE = 4000, 500


class DmSgd(DecentLamExchange):
    """DmSGD, to compare with: ranks step on their own gradients, and mix their parameters after it."""

    def _correct(self, *given: Any) -> None:
        """Leave gradients as they are."""

    @torch.no_grad()
    def _step_made(self) -> None:
        for _, some in self._buckets():
            mine = flattened(some)
            mixed = self._own * mine
            for weight, theirs in self._exchanged(mine):
                mixed.add_(theirs, alpha=weight)
            unflatten(mixed, some)


def optimum(hessians: Array, slopes: Array) -> Array:
    """Of the mean over the ranks."""
    return np.linalg.solve(hessians.sum(0), slopes.sum(0))


def fixed_point(hessians: Array, slopes: Array, weights: Array, rate: float) -> Array:
    """Of decentralised SGD, x = W (x − rate ∇f(x)), by linear solve; [rank, size]."""
    ranks, size = slopes.shape
    whole, mix = np.zeros((ranks * size, ranks * size)), np.kron(weights, np.eye(size))
    for rank in range(ranks):
        block = slice(rank * size, (rank + 1) * size)
        whole[block, block] = hessians[rank]
    one = np.eye(ranks * size)
    return np.linalg.solve(one - mix @ (one - rate * whole), rate * mix @ slopes.ravel()).reshape(ranks, size)


def trained(
    group: Group, hessians: Array, slopes: Array, starts: Array, momenta: Array, corrected: bool
) -> tuple[Array, Array]:
    """Where a rank is after some steps: parameters and momentum."""
    rank = group.rank
    exchange = (DecentLamExchange if corrected else DmSgd)(group, topology="ring", momentum=MOMENTUM)
    model = Point(starts[rank], quadratic(hessians[rank], slopes[rank]))
    exchange.wrap(model)
    with torch.no_grad():
        model.x.copy_(torch.tensor(starts[rank]))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    optimizer.state[model.x]["momentum_buffer"] = torch.tensor(momenta[rank])
    at = minimise(exchange, model, optimizer, rank, group.world, AT_ONCE)[-1]
    return at, optimizer.state[model.x]["momentum_buffer"].numpy()


def measure() -> dict[str, float]:
    """All ranks begin in the optimum, so that what they go away from it is the bias."""
    hessians, slopes = regression(RANKS, SIZE, 2.0)
    best, weights = optimum(hessians, slopes), mixing("ring", RANKS)
    squares, errors = [], []
    team = Team(RANKS)
    for corrected, step in ((True, RATE), (False, RATE / (1 - MOMENTUM))):
        places, momenta = np.tile(best, (RANKS, 1)), np.zeros((RANKS, SIZE))
        for _ in range(STEPS // AT_ONCE):
            found = team.run(trained, hessians, slopes, places, momenta, corrected)
            places, momenta = (np.array([one[i] for one in found]) for i in (0, 1))
        errors.append(float(np.abs(places - fixed_point(hessians, slopes, weights, step)).max()))
        squares.append(float(np.square(places - best).sum()))
    team.close()
    return {"bias_ratio": squares[1] / squares[0], "fixed_point_error": max(errors)}

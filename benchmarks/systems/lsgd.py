"""Leader SGD over real gloo ranks: how close all of them come to a convex problem's optimum, and what they send.

`max_error`: the largest distance of any rank from the optimum of a strongly convex quadratic, after begins that differ.
`bytes_over_allreduce`: bytes that all ranks sent in some rounds, as the kernel counted them for their connections, over
those of an all-reduce at each of the same steps; 1/(2 × `period`) by the formula, `bytes_by_formula`.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.group import Group
from ones_wrapper.strategies.lsgd import LsgdExchange
from tests.wrapper.forked import Team
from tests.wrapper.gradients.quadratics import Array, Point, minimise, quadratic, regression
from tests.wrapper.wire import sent_bytes

RANKS, PERIOD, ROUNDS, NUMBERS = 4, 16, 2, 1 << 18


def converged(group: Group, hessian: Array, slope: Array) -> Array:
    """Where a rank ends that began at a place of its own."""
    exchange = LsgdExchange(group, period=PERIOD, local_period=PERIOD, pull=0.1)
    model = Point(np.zeros(len(slope)), quadratic(hessian, slope))
    exchange.wrap(model)
    with torch.no_grad():
        model.x += group.rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.5, nesterov=True)
    return minimise(exchange, model, optimizer, group.rank, group.world, 320)[-1]


def sent(group: Group) -> tuple[int, int]:
    """Bytes of this rank: in some rounds, and in all-reduces at each of their steps."""
    exchange = LsgdExchange(group, period=PERIOD, local_period=PERIOD, pull=0.1)
    model = exchange.wrap(torch.nn.Linear(NUMBERS, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: exchange.finish())
    part = AccumulationStep(Share(group.rank, group.rank + 1, group.world), group.rank, 1, 0, 1, 1)
    x, gradient = torch.ones(1, NUMBERS), torch.zeros(NUMBERS)
    dist.all_reduce(gradient)  # connects all
    dist.barrier()
    counts = [sent_bytes()]
    for _ in range(ROUNDS * PERIOD):
        with exchange.during(part):
            loss = model(x).sum()
            loss.backward()
            exchange.loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    counts.append(sent_bytes())
    for _ in range(ROUNDS * PERIOD):
        dist.all_reduce(gradient)
    dist.barrier()
    counts.append(sent_bytes())
    return counts[1] - counts[0], counts[2] - counts[1]


def measure() -> dict[str, float]:
    """On four ranks, at the default period."""
    (hessian,), (slope,) = regression(1, 30, 1.0)
    team = Team(RANKS)
    places = np.array(team.run(converged, hessian, slope))
    found = team.run(sent)
    team.close()
    ours, theirs = (sum(one[i] for one in found) for i in (0, 1))
    return {
        "max_error": float(np.abs(places - np.linalg.solve(hessian, slope)).max()),
        "bytes_over_allreduce": ours / theirs,
        "bytes_by_formula": 1 / (2 * PERIOD),
    }

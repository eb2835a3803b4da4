"""Leader SGD: the symmetric trap, convex problems, its messages, leaders of nodes, and what is published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.group import Group
from ones_wrapper.strategies.lsgd import Lsgd, LsgdExchange
from tests.marks import nightly
from tests.wrapper.forked import Team
from tests.wrapper.gradients.quadratics import Array, Point, minimise, quadratic, regression

RANKS = 4


def double_well(x: torch.Tensor) -> torch.Tensor:
    """(x² − 1)², which has a maximum at 0 between its minima."""
    return (x.square() - 1).square().sum()


def escaped(group: Group, pull: float, period: int) -> tuple[float, float]:
    """Ranks begin on both sides of the maximum; where one ends, and where the leader is."""
    exchange = LsgdExchange(group, period=period, local_period=period, pull=pull)
    model = Point(np.zeros(1), double_well)
    exchange.wrap(model)
    with torch.no_grad():
        model.x.fill_((-1) ** group.rank * (0.3 + 0.01 * (group.rank // 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    minimise(exchange, model, optimizer, group.rank, group.world, 400)
    with exchange.published():
        leader = float(double_well(model.x))
    return float(double_well(model.x)), leader


@pytest.mark.slow
def test_it_leaves_the_symmetric_trap(team: Team) -> None:
    """Where the centre of EASGD stays on the maximum, the leader reaches a minimum."""
    for _, leader in team.run(escaped, 0.1, 4):
        assert leader < 1e-6


def converged(group: Group, hessian: Array, slope: Array, pull: float, per_node: int) -> tuple[Array, int]:
    group = replace(group, gpus_per_node=per_node)
    exchange = LsgdExchange(group, period=8, local_period=2, pull=pull)
    model = Point(np.zeros(len(slope)), quadratic(hessian, slope))
    exchange.wrap(model)
    with torch.no_grad():
        model.x += group.rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.5, nesterov=True)
    return minimise(exchange, model, optimizer, group.rank, group.world, 160)[-1], exchange.leader


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [nightly(1), 2, nightly(4)])
def test_convex_problems(team: Team, per_node: int) -> None:
    """On a strongly convex quadratic all ranks end in the optimum, with leaders of nodes and without."""
    (hessian,), (slope,) = regression(1, 5, 1.0)
    for at, _ in team.run(converged, hessian, slope, 0.1, per_node):
        assert np.abs(at - np.linalg.solve(hessian, slope)).max() < 1e-12


def by_nodes(group: Group, losses: list[float], steps: int) -> list[tuple[float, int]]:
    """Ranks that stand still, two a node, each at its own number; where they are after each step, and the leader."""
    group = replace(group, gpus_per_node=2)
    exchange = LsgdExchange(group, period=4, local_period=2, pull=0.5)
    model = Point(np.zeros(1), lambda x: 0.0 * x.sum() + losses[group.rank])
    exchange.wrap(model)
    with torch.no_grad():
        model.x.fill_(float(group.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        (at,) = minimise(exchange, model, optimizer, group.rank, group.world, 1)
        found.append((float(at[0]), exchange.leader))
    return found


def test_leaders_of_nodes(team: Team) -> None:
    """Each second step the better rank of each node pulls, each fourth the best of all, and cached ones in between."""
    losses = [3.0, 2.0, 1.0, float("nan")]
    x, local = np.arange(4.0), np.full(4, np.nan)
    expected = []
    for step in (1, 2, 3, 4):
        if step > 2:
            x = x + 0.5 / 2 * (local - x)
        if step % 2 == 0:
            local = np.array([x[1], x[1], x[2], x[2]])
            x = x + 0.5 * (local - x)
        if step == 4:
            x = x + 0.5 * (x[2] - x)
        expected.append(x)
    for rank, found in enumerate(team.run(by_nodes, losses, 4)):
        np.testing.assert_allclose([at for at, _ in found], [x[rank] for x in expected], rtol=1e-12)
        assert [leader for _, leader in found] == [0, 0, 0, 2]


def published(group: Group) -> tuple[list[float], list[float], list[float]]:
    """Adam's state and a buffer under the leader, around it, and for good."""
    exchange = LsgdExchange(group, period=2, local_period=2, pull=0.1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
    exchange.wrap(model)
    unused = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    exchange.trained_by([optimizer])
    optimizer.register_step_pre_hook(lambda *_: exchange.finish())
    part = AccumulationStep(Share(2 * group.rank, 2 * group.rank + 2, 2 * group.world), 2 * group.rank, 2, 0, 1, 1)
    for _ in range(3):
        with exchange.during(part):
            x = torch.tensor([[1.0], [2.0 + group.rank]])
            out = model(x) if group.rank % 2 else model[1](model[0](x))
            loss = (out - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            exchange.loss(loss * 0 + abs(group.rank - 1))
            optimizer.step()

    def all_there() -> list[float]:
        state = [optimizer.state[p].get("exp_avg", torch.zeros(0)) for p in model.parameters()]
        return torch.cat([t.detach().flatten().float() for t in (*model.state_dict().values(), *state)]).tolist()

    assert bool(optimizer.state[unused]) == bool(group.rank % 2)
    assert exchange.leader == 1
    with exchange.published():
        during = all_there()
        assert optimizer.state[unused]["step"] == 3
    after = all_there()
    exchange.settle()
    return during, after, all_there()


def test_the_leader_is_published(team: Team) -> None:
    """Parameters, buffers and the optimizer's state are the leader's in a checkpoint, also what a rank has none of."""
    found = team.run(published)
    leader = found[1][1]
    for rank, (during, after, settled) in enumerate(found):
        assert during == settled == leader
        assert (after == leader) == (rank == 1)


def left_early(group: Group) -> tuple[float, float, float]:
    """Where a rank is after a step in which its script left the loop; what is published then, and for good."""
    exchange = LsgdExchange(group, period=4, local_period=4, pull=0.1)
    model = Point(np.zeros(1), lambda x: (group.rank + 1) * x.sum())
    exchange.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange.trained_by([optimizer])
    optimizer.register_step_pre_hook(lambda *_: exchange.finish())
    part = AccumulationStep(Share(group.rank, group.rank + 1, group.world), group.rank, 1, 0, 1, 1)

    def loop() -> Iterator[None]:
        with exchange.during(part):
            yield

    for _ in loop():
        model().backward()
        optimizer.step()
        break
    own = float(model.x)
    with exchange.published():
        published = float(model.x)
    exchange.settle()
    return own, published, float(model.x)


def test_ranks_whose_script_left_the_loop_after_its_step_differ(team: Team) -> None:
    """What is published then is still one model."""
    found = team.run(left_early)
    assert [own for own, _, _ in found] == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert all(published == settled == found[0][0] for _, published, settled in found)


def clipped(group: Group) -> list[float]:
    """A rank's gradient after a step of two passes of unequal size, clipped by its norm as it is before `finish`."""
    exchange = LsgdExchange(group, period=4, local_period=4, pull=0.1)
    model = Point(np.zeros(2), lambda x: x.sum())
    exchange.wrap(model)
    for index, (samples, slope) in enumerate([(3, 1.0), (1, 5.0), (0, float("nan"))]):
        part = AccumulationStep(Share(0, 4, 4 * group.world), 0, samples, index, 3, 3)
        with exchange.during(part):
            (slope * model.x.sum()).backward()
            if part.last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                exchange.finish()
    assert model.x.grad is not None
    return model.x.grad.tolist()


def test_clipping_sees_the_mean_of_a_step_of_several_passes(team: Team) -> None:
    """(3 × 1 + 1 × 5) / 4 = 2 in both directions, of norm 2 √2, is clipped to norm 2."""
    for gradient in team.run(clipped):
        assert gradient == pytest.approx([2**0.5] * 2, rel=1e-6)


def frozen_later(group: Group) -> list[float]:
    """Where a rank's parameters are when a layer was frozen between rounds, and trained again."""
    exchange = LsgdExchange(group, period=2, local_period=2, pull=1.0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    exchange.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + group.rank))
    optimizer.register_step_pre_hook(lambda *_: exchange.finish())
    part = AccumulationStep(Share(group.rank, group.rank + 1, group.world), group.rank, 1, 0, 1, 1)
    for step in range(6):
        model[0].requires_grad_(step not in (2, 3, 4))
        with exchange.during(part):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).square().sum()
            loss.backward()
            exchange.loss(loss)
            optimizer.step()
    return [float(p) for p in model.parameters()]


def test_a_layer_may_be_frozen_between_rounds(team: Team) -> None:
    """At a round with pull 1 all ranks are where the leader is, with the frozen layer."""
    found = team.run(frozen_later)
    assert all(one == pytest.approx(found[0], abs=1e-6) for one in found)


def without_loss(group: Group) -> str:
    exchange = LsgdExchange(group, period=1, local_period=1, pull=0.1)
    model = Point(np.zeros(1), double_well)
    exchange.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange.loss = lambda loss: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as error:
        minimise(exchange, model, optimizer, group.rank, group.world, 1)
    return str(error.value)


def test_wrong_uses_are_said(team: Team) -> None:
    for said in team.run(without_loss):
        assert "call job.loss(loss)" in said
    for period, local, pull, why in (
        (10, 4, 0.1, "multiple of local_period=4"),
        (0, None, 0.1, "period=0"),
        (4, None, 0, "pull=0"),
    ):
        with pytest.raises(ValueError, match=why):
            Lsgd(period, local, pull)
    assert Lsgd(16)._options == {"period": 16, "local_period": 4, "pull": 0.1}

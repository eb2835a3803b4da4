"""DecentLaM: its fixed point and that of DmSGD, the topologies it takes, and the mean path through a resize."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.group import Group
from ones_wrapper.strategies.decentlam import topologies
from ones_wrapper.strategies.decentlam.strategy import DecentLamExchange
from tests.wrapper.forked import Team
from tests.wrapper.gradients.quadratics import Array, Point, minimise, quadratic, regression

RANKS = 4


def path_in_numpy(hessians: Array, slopes: Array, weights: Array, rate: float, beta: float, steps: int) -> Array:
    """DecentLaM as its paper writes it, all ranks in one process."""
    x = np.zeros_like(slopes)
    m = np.zeros_like(slopes)
    for _ in range(steps):
        g = np.einsum("nij,nj->ni", hessians, x) - slopes
        m = beta * m + (x - weights @ (x - rate * g)) / rate
        x = x - rate * m
    return x


def trained(
    group: Group, topology: str, hessians: Array, slopes: Array, rate: float, beta: float, steps: int
) -> tuple[Array, Array, Array]:
    """Where a rank ends; what is published then, twice."""
    exchange = DecentLamExchange(group, topology=topology, momentum=beta)
    model = Point(np.zeros(slopes.shape[1]), quadratic(hessians[group.rank], slopes[group.rank]))
    exchange.wrap(model, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=beta, weight_decay=0.0)
    at = minimise(exchange, model, optimizer, group.rank, group.world, steps)[-1]
    copy = exchange.inside(model)
    assert isinstance(copy, Point) and (copy is model) == (group.world == 1)
    with exchange.published():
        mean, momentum = model.x.detach().numpy().copy(), optimizer.state[model.x]["momentum_buffer"].numpy().copy()
    np.testing.assert_allclose(copy.x.detach().numpy(), mean, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(model.x.detach().numpy(), at)  # it goes on where it was
    exchange.settle()
    np.testing.assert_allclose(model.x.detach().numpy(), mean, rtol=0, atol=1e-15)
    assert exchange.inside(model) is model
    return at, mean, momentum


@pytest.mark.slow
@pytest.mark.parametrize("topology", topologies.NAMES)
def test_the_ranks_do_what_the_paper_says(team: Team, topology: str) -> None:
    """Over gloo, each topology: the same as all ranks in one process, and the mean is what is published."""
    hessians, slopes = regression(RANKS, 6, 1.0)
    weights = topologies.mixing(topology, RANKS)
    found = team.run(trained, topology, hessians, slopes, 0.05, 0.8, 25)
    expected = path_in_numpy(hessians, slopes, weights, 0.05, 0.8, 25)
    np.testing.assert_allclose([at for at, _, _ in found], expected, rtol=0, atol=1e-12)
    for _, mean, _ in found:
        np.testing.assert_allclose(mean, expected.mean(0), rtol=0, atol=1e-12)


def resized(group: Group, hessian: Array, slope: Array, start: Array, mean: Array, steps: int) -> tuple[Array, Array]:
    """Train from (x̄, m̄), or from points of the ranks' own where there is no mean yet; the new (x̄, m̄)."""
    exchange = DecentLamExchange(group, topology="ring", momentum=0.9)
    model = Point(start, quadratic(hessian, slope))
    exchange.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if mean.size:
        optimizer.state[model.x]["momentum_buffer"] = torch.tensor(mean)
    else:
        with torch.no_grad():
            model.x += group.rank
    minimise(exchange, model, optimizer, group.rank, group.world, steps)
    apart = model.x.detach().clone()
    exchange.settle()
    assert mean.size or not torch.equal(apart, model.x)
    return model.x.detach().numpy(), optimizer.state[model.x]["momentum_buffer"].numpy()


@pytest.mark.slow
def test_a_resize_keeps_the_mean_path(teams: dict[int, Team]) -> None:
    """From 4 ranks to 3: with one objective on all of them the means go on as plain momentum SGD would."""
    (hessian,), (slope,) = regression(1, 4, 1.0)
    x, m = np.full(4, 1.5), np.zeros(4)  # the mean of ranks that begin at 0 … 3
    found = np.zeros(4), np.zeros(0)
    for world, steps in ((4, 12), (3, 12)):
        found = teams[world].run(resized, hessian, slope, *found, steps)[0]
        for _ in range(steps):
            m = 0.9 * m + hessian @ x - slope
            x = x - 0.02 * m
        np.testing.assert_allclose(found, (x, m), rtol=0, atol=1e-11)


def weighed(group: Group, total: int) -> Array:
    """The mean of the parameters after one step in which ranks have unequally many samples, by passes of two."""
    exchange = DecentLamExchange(group, topology="complete", momentum=0.0)
    model = Point(np.zeros(2), lambda x: x.sum())
    exchange.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    with torch.no_grad():
        model.x.fill_(1.0)
    exchange.trained_by([optimizer])
    optimizer.register_step_pre_hook(lambda *_: exchange.finish())
    own = [sample for sample in range(total) if sample % group.world == group.rank]
    cuts = [own[:1], own[1:]]
    for index, some in enumerate(cuts):
        part = AccumulationStep(Share(0, len(own), total), 0, len(some), index, 2, total)
        with exchange.during(part):
            (model.x.sum() * (sum(some) / len(some) if some else torch.nan)).backward()
            if part.last:
                optimizer.step()
    return model.x.detach().numpy()


@pytest.mark.parametrize("total", [4, 6, 7, 9])
def test_every_sample_counts_alike(team: Team, total: int) -> None:
    """Unequal shares and passes, and a pass without samples: the mean moves as in one process, decay included."""
    expected = 1 - 0.1 * (np.mean(range(total)) + 0.5)
    np.testing.assert_allclose(team.run(weighed, total), np.full((RANKS, 2), expected), rtol=1e-12)


@pytest.mark.parametrize("name", topologies.NAMES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_topologies(name: str, world: int) -> None:
    """Symmetric, doubly stochastic and connected at any size, so stable at any momentum. Bytes follow from degrees."""
    weights = topologies.checked(topologies.mixing(name, world), world)
    assert topologies.largest_momentum(weights) == 1.0
    neighbours = [topologies.neighbours(weights, rank) for rank in range(world)]
    assert topologies.degree(name, world) == max(map(len, neighbours))


def swap(world: int) -> list[list[int]]:
    return [[0, 1], [1, 0]]


REFUSED = [
    ("directed-exponential", 8, "only for momentum up to 0.51"),
    ("one-peer-exponential", 8, "from step to step"),
    ("star", 8, "none of ring, grid, exponential, complete"),
    (lambda world: topologies.directed("directed-exponential", world), 4, "momentum up to 0.63"),
    (lambda world: np.eye(world), 4, "no path of neighbours"),
    (swap, 2, "swaps ranks for ever"),
    (lambda world: np.ones((world, world)), 3, "rows that sum to 1"),
    (lambda world: [[0.5, 0.5], [1.0, 0.0]], 2, "columns that sum to 1"),
    (lambda world: np.eye(3), 2, "must be 2 × 2"),
]


@pytest.mark.parametrize(("topology", "world", "why"), REFUSED)
def test_refused_topologies(topology: topologies.Topology, world: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        topologies.mixing(topology, world)


def test_the_bound_is_where_it_diverges() -> None:
    """The directed exponential graph below and above the momentum that the refusal names."""
    weights, bound = topologies.directed("directed-exponential", 8), 0.51
    start = np.arange(8.0)[:, None]
    for beta, ends in ((bound, True), (bound + 0.03, False)):
        x, m = start.copy(), np.zeros((8, 1))
        for _ in range(3000):
            m = beta * m + (x - weights @ x)
            x = x - m
        assert (np.abs(x - x.mean()).max() < 1e-3) == ends


def refused(group: Group) -> list[str]:
    """What is said of optimizers and models that cannot be used."""
    said = []
    for wrong in (
        lambda p: [torch.optim.AdamW(p)],
        lambda p: [torch.optim.SGD(p, lr=0.1)],
        lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)],
        lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    ):
        exchange = DecentLamExchange(group, topology="ring", momentum=0.9)
        model = exchange.wrap(torch.nn.Linear(2, 1))
        with pytest.raises(ValueError) as error:
            exchange.trained_by(wrong(list(model.parameters())))
        said.append(str(error.value))
    for given, options in ((torch.nn.Linear(2, 1).bfloat16(), {}), (torch.nn.Linear(2, 1), {"static_graph": True})):
        with pytest.raises(ValueError) as error:
            DecentLamExchange(group, "ring", 0.9).wrap(given, **options)
        said.append(str(error.value))
    return said


def test_wrong_uses_are_said(team: Team) -> None:
    expected = [
        "AdamW; take torch.optim.SGD",
        "momentum=0;",
        "nesterov=True",
        "2 optimizers",
        "bfloat16",
        "static_graph",
    ]
    for said in team.run(refused):
        for text, part in zip(said, expected, strict=True):
            assert part in text

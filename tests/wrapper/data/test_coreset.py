"""Coresets: what CRAIG chooses and how it weighs, and what a job that trains on one promises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.data.coreset import Chosen, Floats, Ints, budgets, cost, distances, in_quanta, lazy_greedy, select
from ones_wrapper.data.coreset_feed import CoresetFeed, Selection, labels_of
from ones_wrapper.group import Group, RankError
from tests.marks import nightly
from tests.wrapper.forked import Team
from tests.wrapper.paired import Paired

ROWS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


class Alone:
    """One rank, in the test's process."""

    rank, world = 0, 1

    def everywhere(self, function: Any) -> list[Any]:
        return [function()]

    def total(self, values: list[float]) -> list[float]:
        return values


def worth(distance: Floats, chosen: list[int]) -> float:
    """The facility location F: what the greedy maximises."""
    return float(distance.max() * len(distance) - cost(distance, chosen))


@given(random=ROWS, samples=st.integers(2, 20), width=st.integers(1, 300), scale=st.integers(-400, 400))
def test_distances_are_exact(random: np.random.Generator, samples: int, width: int, scale: int) -> None:
    """Those of whole numbers, in whatever order products are added; near those of the features, also of rows that lie
    close together far from zero, or have an outlier; symmetric, so mutual gains tie exactly."""
    rows = random.standard_normal((samples, width)) + 1000 * random.standard_normal(width)
    rows[0] *= 2
    whole = in_quanta(rows, rows[:5])[0].astype(np.int64)
    squares = ((whole[:, None] - whole[None, :]) ** 2).sum(2)
    found = distances(rows, rows)
    np.testing.assert_array_equal(found, [[round(math.sqrt(one)) for one in row] for row in squares.tolist()])
    order = random.permutation(width)
    np.testing.assert_array_equal(distances(np.ldexp(rows[:, order], scale), np.ldexp(rows[:, order], scale)), found)
    np.testing.assert_array_equal(found, found.T)
    truth = np.linalg.norm(rows[:, None] - rows[None, :], axis=2)
    # Each feature is half a quantum off at most, and the distance as much again.
    quantum = truth.max() / found.max()
    np.testing.assert_allclose(found * quantum, truth, rtol=1e-6, atol=2 * quantum * (1 + math.sqrt(width)))
    assert found.max() > 2**23


@given(random=ROWS, samples=st.integers(1, 30), ties=st.booleans())
def test_the_lazy_order_is_the_greedy_one(random: np.random.Generator, samples: int, ties: bool) -> None:
    """Each next sample is the one with the largest gain, worked out for all; of equally good ones the first."""
    rows = random.integers(0, 3, (samples, 2)).astype(float) if ties else random.standard_normal((samples, 3))
    distance = distances(rows, rows)
    nearest = np.full(samples, distance.max())
    expected: list[int] = []
    for _ in range(samples):
        gains = [-1.0 if j in expected else np.maximum(nearest - distance[:, j], 0).sum() for j in range(samples)]
        expected.append(int(np.argmax(gains)))
        nearest = np.minimum(nearest, distance[:, expected[-1]])
    assert lazy_greedy(distance, samples) == expected
    assert lazy_greedy(distance, samples // 2) == expected[: samples // 2]


def chosen_of(rows: Floats, labels: Ints, count: int, group: Any, shard: int) -> tuple[Ints, Floats]:
    found = select(lambda members: rows[members], labels, count, group, shard)
    return found.indices, found.weights


@given(random=ROWS, samples=st.integers(6, 12), count=st.integers(1, 4), shard=st.integers(2, 5))
def test_shards_keep_to_the_bound_of_greedi(random: np.random.Generator, samples: int, count: int, shard: int) -> None:
    """(1 - 1/e)² / min(shards, count) of the best subset (NIPS 2013, Theorem 4.1); in fact nearly the greedy's."""
    rows = random.standard_normal((samples, 2))
    distance = distances(rows, rows)
    found = chosen_of(rows, np.zeros(samples, np.int64), count, Alone(), shard)[0].tolist()
    best = max(worth(distance, list(one)) for one in combinations(range(samples), count))
    shards = -(-samples // shard)
    assert worth(distance, found) >= (1 - np.exp(-1)) ** 2 / min(shards, count) * best
    assert worth(distance, found) >= 0.75 * worth(distance, lazy_greedy(distance, count))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), data=st.data())
def test_budgets_follow_the_classes(sizes: list[int], data: st.DataObject) -> None:
    """They add up, no class gives more than it has, each gives one where there are enough, and none is far from its
    share."""
    count = data.draw(st.integers(1, sum(sizes)))
    found = budgets(sizes, count)
    assert sum(found) == count and all(0 <= one <= size for one, size in zip(found, sizes, strict=True))
    if count >= len(sizes):
        assert min(found) >= 1
    shares = [count * size / sum(sizes) for size in sizes]
    assert all(one - share < len(sizes) for one, share in zip(found, shares, strict=True))


def test_weights_count_who_is_nearest() -> None:
    """Within the class; their mean is 1, so that the learning rate keeps its meaning."""
    random = np.random.default_rng(0)
    rows, labels = random.standard_normal((60, 4)), random.integers(0, 3, 60)
    indices, weights = chosen_of(rows, labels, 12, Alone(), 2048)
    nearest = []
    for row, label in zip(rows, labels, strict=True):
        theirs = indices[labels[indices] == label]
        nearest.append(theirs[np.linalg.norm(rows[theirs] - row, axis=1).argmin()])
    counts = np.array([nearest.count(j) for j in indices])
    np.testing.assert_allclose(weights, counts * 12 / 60)
    assert weights.mean() == pytest.approx(1.0) and len(set(indices.tolist())) == 12


@pytest.fixture(scope="module")
def team(teams: dict[int, Team]) -> Team:
    return teams[3]


def on_rank(group: Group, shard: int, count: int) -> tuple[Ints, Floats]:
    random = np.random.default_rng(1)
    return chosen_of(random.standard_normal((90, 3)), random.integers(0, 4, 90), count, group, shard)


@pytest.mark.parametrize("shard, count", [nightly(2048, 20), (8, 20), nightly(8, 3), (5, 90)])
def test_a_selection_is_the_same_at_any_world_size(team: Team, shard: int, count: int) -> None:
    alone = on_rank(Alone(), shard, count)  # type: ignore[arg-type]
    for indices, weights in team.run(on_rank, shard, count):
        np.testing.assert_array_equal(indices, alone[0])
        np.testing.assert_array_equal(weights, alone[1])


def broken(group: Group) -> str:
    labels = np.zeros(12, np.int64)
    with pytest.raises(RankError) as error:
        select(lambda members: np.full((len(members), 1), np.nan), labels, 3, group, 4)
    return str(error.value)


def test_features_that_are_no_numbers_end_all_ranks(team: Team) -> None:
    for said in team.run(broken):
        assert "rank 0: ValueError: coreset: features are not finite numbers" in said


def test_bad_input_gets_a_sentence() -> None:
    """It names the number, and what would fit."""
    with pytest.raises(ValueError, match=r"fraction=1\.5 must be above 0 and at most 1: a subset is no larger"):
        ones.strategies.Coreset(1.5)
    with pytest.raises(ValueError, match="every=-1 must be 0 or more"):
        ones.strategies.Coreset(0.5, every=-1)
    with pytest.raises(ValueError, match="13 samples of 12: a subset is no larger than the data"):
        select(lambda members: np.zeros((len(members), 1)), np.zeros(12, np.int64), 13, Alone())  # type: ignore[arg-type]
    plain = TensorDataset(torch.randn(6, 2), torch.randn(6))
    with pytest.raises(ValueError, match=r"class of each sample of TensorDataset is not known.*each of the 6 samples"):
        labels_of(plain, None)
    with pytest.raises(ValueError, match=r"labels of shape \(5,\)"):
        labels_of(plain, [0] * 5)


def test_labels_are_found() -> None:
    classes = torch.tensor([2, 0, 1, 0])
    whole = TensorDataset(torch.randn(4, 2), classes)
    assert labels_of(whole, None).tolist() == [2, 0, 1, 0]
    assert labels_of(Subset(whole, [3, 0]), None).tolist() == [0, 2]

    class Images(Dataset[int]):
        targets = (5, 6, 7)

        def __len__(self) -> int:
            return 3

    assert labels_of(Images(), None).tolist() == [5, 6, 7]
    assert labels_of(whole, np.zeros(4, np.int8)).tolist() == [0, 0, 0, 0]


SAMPLES = 60


class Numbered(TensorDataset):
    """A regression in two classes; its items have their numbers."""

    def __init__(self) -> None:
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        super().__init__(x, x.prod(1, keepdim=True), torch.arange(SAMPLES))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def skip(self, count: int) -> Endless:
        return self


@pytest.mark.parametrize("again", [180, 176, 182])
def test_another_fraction_is_refused(again: int) -> None:
    """Also where whole batches of 16 leave as many samples of both."""
    data, selection = TensorDataset(torch.zeros(1000, 1), torch.arange(1000)), Selection()

    def feed(count: int) -> CoresetFeed:
        return CoresetFeed(data, ones.strategies.Coreset(count / 1000), selection, shuffle=True, seed=1, whole=16)

    first = feed(181)
    first.take(0, Chosen(np.arange(181), np.ones(181)))
    assert first.samples == 176 and not first.due(0, 16)
    assert (feed(again).samples == 176) and not first.due(0, 16)
    with pytest.raises(ValueError, match=f"has 181 samples, and fraction={again / 1000} are {again}; use the same fra"):
        feed(again).due(0, 16)


def refused() -> None:
    """What a loader says to coresets that it cannot have."""
    job = ones.init(batch=4)
    with pytest.raises(ValueError, match="a coreset is chosen from a dataset with length and items"):
        job.loader(Endless(), coreset=ones.strategies.Coreset(0.5))
    with pytest.raises(ValueError, match="drop_last leaves none of 3 chosen samples, fewer than a batch of 4"):
        job.loader(
            TensorDataset(torch.zeros(6, 1), torch.arange(6)), coreset=ones.strategies.Coreset(0.5), drop_last=True
        )


def test_a_loader_refuses() -> None:
    testing.run(refused, ranks=1)


def refused_of_replicas(by_model: bool) -> None:
    """Two ranks make one forward pass together; features of inputs alone need none."""
    job = ones.init(batch=4, strategy=Paired())
    model = job.ddp(torch.nn.Linear(4, 1).double())
    job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    data, labels = Numbered(), torch.zeros(SAMPLES, dtype=torch.long)
    features = (lambda batch: model(batch[0])) if by_model else None
    try:
        next(iter(job.loader(data, coreset=ones.strategies.Coreset(0.5, features=features, labels=labels))))
        testing.put("")
    except ValueError as error:
        testing.put(str(error))


@pytest.mark.parametrize("by_model", [True, False])
def test_features_within_a_replica_are_refused(by_model: bool) -> None:
    found = [put.value for put in testing.run(partial(refused_of_replicas, by_model), ranks=2)]
    refusal = "coreset: the forward passes of a model that several ranks share need all of them at once"
    assert all(said.startswith(refusal) if by_model else said == "" for said in found), found

"""Random numbers that follow from the sample, or from the step and the rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from ones_wrapper.data.feed import Cut, Feed
from ones_wrapper.data.randomness import key, may_draw, seed_all, seed_step

Drawn = tuple[float, float, float]


def draw() -> Drawn:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Augmented(Dataset[tuple[int, Drawn]]):
    """Each item draws from all three generators, some more often than others."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, Drawn]:
        return index, [draw() for _ in range(1 + index % 3)][-1]


def plain(samples: list[Any]) -> list[Any]:
    return list(samples)


def with_a_draw(samples: list[Any]) -> tuple[list[Any], Drawn]:
    """A `collate_fn` such as MixUp's."""
    return samples, draw()


def drawn(epoch: int, cursor: int, batch: int, world: int, seed: int = 0, **how: Any) -> dict[int, Drawn]:
    """What each sample drew from `cursor` to the end of the epoch, whoever fetched it."""
    found: dict[int, Drawn] = {}
    for rank in range(world):
        feed = Feed(Augmented(), shuffle=True, seed=seed, collate_fn=plain, **how)
        for part, got in feed.batches(epoch, cursor, Cut(batch, world, rank, 3)):
            found |= dict(got[: part.samples])
    return found


def test_what_a_sample_draws_follows_from_the_sample() -> None:
    """Protects: augmentation is the same at any world size, batch, number of workers and place in the epoch, and
    differs between samples, epochs and seeds.
    """
    alone = drawn(0, 0, 5, 1)
    assert len(alone) == 24 and len({value for one in alone.values() for value in one}) == 72
    assert drawn(0, 0, 8, 3) == alone
    assert drawn(0, 0, 7, 2, num_workers=2) == alone
    rest = drawn(0, 10, 4, 2)
    assert len(rest) == 14 and rest.items() <= alone.items()
    for other in (drawn(1, 0, 5, 1), drawn(0, 0, 5, 1, seed=1)):
        assert not {value for one in alone.values() for value in one} & {
            value for one in other.values() for value in one
        }


@pytest.mark.parametrize("failing", [False, True])
def test_fetching_leaves_the_generators_alone(failing: bool) -> None:
    """Protects: dropout does not depend on whether workers fetch; not even a failing item changes that."""

    def collate(samples: list[Any]) -> list[Any]:
        if failing:
            raise OSError("a broken file")
        return samples

    seed_all(7)
    expected = draw()
    seed_all(7)
    feed = Feed(Augmented(), shuffle=True, seed=0, collate_fn=collate)
    if failing:
        with pytest.raises(OSError, match="broken"):
            next(feed.batches(0, 0, Cut(5, 1, 0, 5)))
    else:
        next(feed.batches(0, 0, Cut(5, 1, 0, 5)))
    assert draw() == expected


@pytest.mark.parametrize("dataset", [Augmented(), TensorDataset(torch.arange(24))])
def test_what_collating_draws_repeats(dataset: Dataset[Any]) -> None:
    """Protects: a `collate_fn` that draws does the same after a restart, with workers or without, also over samples
    that draw nothing."""

    def all_of(workers: int, cursor: int) -> list[Drawn]:
        feed = Feed(dataset, shuffle=True, seed=0, collate_fn=with_a_draw, num_workers=workers)
        return [got[1] for _, got in feed.batches(0, cursor, Cut(6, 1, 0, 6))]

    assert all_of(0, 0) == all_of(1, 0)
    assert all_of(0, 12) == all_of(0, 0)[2:]
    assert len(set(all_of(0, 0))) == 4


def test_unkeyed_workers_draw_anew_in_each_epoch() -> None:
    """Protects: without keys, an epoch and a rank do not repeat another's augmentation."""
    how: dict[str, Any] = {"keyed": False, "num_workers": 1}
    first, second = drawn(0, 0, 5, 2, **how), drawn(1, 0, 5, 2, **how)
    values = [one[2] for one in (*first.values(), *second.values())]
    assert len(set(values)) == len(values) == 48


class AtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, Drawn]]:
        return [(index, (0.0, 0.0, 0.0)) for index in indices]


def test_fetching_at_once() -> None:
    """Protects: a dataset's `__getitems__` is used where its random numbers are not keyed, by item otherwise."""
    for keyed in (True, False):
        feed = Feed(AtOnce(), shuffle=False, seed=0, keyed=keyed, collate_fn=plain)
        got = next(feed.batches(0, 0, Cut(3, 1, 0, 3)))[1]
        assert [index for index, _ in got] == [0, 1, 2]
        assert (got[0][1] != (0.0, 0.0, 0.0)) == keyed


def test_datasets_that_cannot_draw() -> None:
    """Protects: what costs time is left out where it is known to be in vain, and only there."""

    class Noisy(TensorDataset):
        pass

    tensors, noisy = TensorDataset(torch.arange(3)), Noisy(torch.arange(3))
    assert not may_draw(tensors) and not may_draw(Subset(Subset(tensors, [0, 1]), [1]))
    assert not may_draw(ConcatDataset([tensors, tensors]))
    assert not may_draw(StackDataset(tensors, tensors)) and not may_draw(StackDataset(a=tensors, b=tensors))
    assert may_draw(noisy) and may_draw(Subset(noisy, [0])) and may_draw(ConcatDataset([tensors, noisy]))
    assert may_draw(StackDataset(a=tensors, b=noisy)) and may_draw(Augmented())


def test_steps_are_seeded_by_step_and_rank() -> None:
    """Protects: a step that is taken again draws the same, and no two steps or ranks do."""
    found = []
    for seed, step, rank in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0)):
        seed_step(seed, step, rank)
        found.append(draw())
    assert found[0] == found[-1]
    assert len({value for one in found for value in one}) == 12


def test_keys_do_not_meet() -> None:
    """Protects: neighbouring seeds, epochs and samples have nothing in common."""
    keys = {key(seed, epoch, sample) for seed in range(10) for epoch in range(30) for sample in range(300)}
    assert len(keys) == 90_000
    assert abs(np.mean([value / 2**64 for value in keys]) - 0.5) < 0.01

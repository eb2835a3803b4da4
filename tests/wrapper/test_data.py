"""Elastic data: the arithmetic of cursor and shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from ones_wrapper.data import Feed, local_indices, permutation, shares, split

stretches = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(0, 6)), min_size=0, max_size=8)
"""(world size, global batch, steps before the next resize) of each run."""


@given(cursor=st.integers(0, 99), total=st.integers(1, 99), world=st.integers(1, 40))
def test_split_is_even_and_complete(cursor: int, total: int, world: int) -> None:
    """Protects: shares follow each other without gap, differ by one at most, and rank 0 has samples."""
    parts = [split(cursor, total, world, rank) for rank in range(world)]
    assert [p for part in parts for p in range(part.start, part.stop)] == list(range(cursor, cursor + total))
    sizes = {part.samples for part in parts}
    assert max(sizes) - min(sizes) <= 1
    assert parts[0].samples == max(sizes)


@given(samples=st.integers(1, 120), history=stretches, seed=st.integers(0, 5), shuffle=st.booleans())
def test_any_history_uses_each_sample_once(
    samples: int, history: list[tuple[int, int, int]], seed: int, shuffle: bool
) -> None:
    """Protects the core promise: whatever world sizes and batches follow each other, each sample is used
    once.
    """
    order = permutation(samples, seed, 0, shuffle)
    used: Counter[int] = Counter()
    cursor = 0
    for world, batch, steps in [*history, (2, 7, samples)]:
        plans = [list(shares(cursor, samples, batch, world, rank)) for rank in range(world)]
        for step in list(zip(*plans, strict=True))[:steps]:
            for share in step:
                indices = local_indices(order, share)
                assert indices  # also a rank without samples takes part
                used.update(indices[: share.samples])
            assert sum(share.samples for share in step) == step[0].total == min(batch, samples - cursor)
            cursor += step[0].total
    assert used == Counter(range(samples))


def test_permutations_differ_by_epoch_and_seed_alone() -> None:
    """Protects: every rank and run draws the same order, and epochs do not repeat each other's."""
    first = permutation(50, 1, 0, True)
    assert np.array_equal(first, permutation(50, 1, 0, True))
    assert not np.array_equal(first, permutation(50, 1, 1, True))
    assert not np.array_equal(first, permutation(50, 2, 0, True))
    assert permutation(4, 1, 0, False).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_feed_fetches_what_the_shares_say(workers: int) -> None:
    """Protects: batches and shares stay in step, with worker processes too, and random numbers are left
    alone.
    """
    feed = Feed(
        TensorDataset(torch.arange(11)),
        shuffle=True,
        seed=0,
        collate_fn=None,
        num_workers=workers,
        options={},
    )
    order = feed.order(0)
    state = torch.get_rng_state()
    got = [(share.samples, x.tolist()) for share, (x,) in feed.batches(order, 3, 4, 3, 2)]
    assert torch.equal(state, torch.get_rng_state())
    assert got == [(1, [order[6]]), (1, [order[10]])]
    alone = [(share.samples, x.tolist()) for share, (x,) in feed.batches(order, 10, 4, 3, 2)]
    assert alone == [(0, [order[10]])]  # borrowed, and not counted


class Stream(IterableDataset[int]):
    """A dataset without items."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_datasets_that_cannot_be_cut() -> None:
    """Protects: a stream or an empty dataset is refused with its reason."""
    with pytest.raises(TypeError, match="Stream has no length"):
        Feed(Stream(), shuffle=True, seed=0, collate_fn=None, num_workers=0, options={})
    with pytest.raises(ValueError, match="empty"):
        Feed(TensorDataset(torch.zeros(0)), shuffle=True, seed=0, collate_fn=None, num_workers=0, options={})

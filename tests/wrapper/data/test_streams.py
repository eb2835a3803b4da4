"""Elastic data from datasets that can only be walked through."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from ones_wrapper.data.feed import Cut, Feed
from ones_wrapper.data.streams import StreamFeed, make_feed


class Skips(IterableDataset[int]):
    """A stream that skips, in one order for all epochs."""

    def __init__(self, samples: int, first: int = 0) -> None:
        self.samples, self.first, self.epoch = samples, first, 3

    def skip(self, n: int) -> Skips:
        return type(self)(self.samples, self.first + n)

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(self.samples)
        return iter(order[self.first :].tolist())


class HuggingFace(Skips):
    """Its order changes with the epoch, but what `skip` returns is in an order of its own whatever the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, n: int) -> Skips:
        return Skips(self.samples, n).skip(7)


class FromPosition(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("not asked for")

    def from_position(self, epoch: int, start: int) -> Iterator[int]:
        order = np.random.default_rng(epoch).permutation(self.samples)
        yield from order[start:].tolist()


class Augmented(HuggingFace):
    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample, random.random(), float(np.random.rand()), float(torch.rand(()))


def plain(samples: list[Any]) -> list[Any]:
    return list(samples)


stretches = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(1, 20), st.integers(1, 5)), min_size=0, max_size=6
)
"""(world size, global batch, largest local batch, steps before the next interruption) of each run."""


def use(feed: StreamFeed, history: list[tuple[int, int, int, int]], samples: int) -> list[int]:
    """The samples of epoch 3 in the order in which runs that follow each other use them."""
    used: list[int] = []
    for world, batch, max_local, steps in [*history, (2, 7, 3, samples + 1)]:
        cursor, taken = len(used), 0
        ranks = [feed.batches(3, cursor, Cut(batch, world, rank, max_local)) for rank in range(world)]
        step: dict[int, int] = {}
        for together in zip(*ranks, strict=True):  # strict: the end comes to all alike
            assert len({(part.share.total, part.index, part.count) for part, _ in together}) == 1
            for part, got in together:
                assert len(got) == max(part.samples, 1) <= max_local
                step |= dict(zip(feed.indices(3, part), got, strict=False))
            if together[0][0].last:
                assert len(step) == together[0][0].share.total == min(batch, samples - cursor)
                assert sorted(step) == list(range(cursor, cursor + len(step)))
                used += [step[position] for position in sorted(step)]
                cursor, taken, step = cursor + len(step), taken + 1, {}
                if taken == steps:
                    break
    return used


@pytest.mark.parametrize("kind", [Skips, HuggingFace, FromPosition])
@given(samples=st.integers(1, 80), history=stretches)
def test_any_history_uses_each_sample_once(
    kind: type[Any], samples: int, history: list[tuple[int, int, int, int]]
) -> None:
    """Protects the core promise for streams of unknown length, in either protocol: each sample once, in the stream's
    order of that epoch.
    """
    feed = StreamFeed(kind(samples), seed=0, collate_fn=plain)
    assert feed.samples == 0
    used = use(feed, history, samples)
    assert Counter(used) == Counter(range(samples))
    assert used == np.random.default_rng(3).permutation(samples).tolist()


def test_fetching_ahead_in_a_worker() -> None:
    feed = StreamFeed(Skips(60), seed=0, collate_fn=plain, num_workers=1, options={"prefetch_factor": 5})
    used = use(feed, [(2, 7, 2, 3), (1, 5, 9, 2)], 60)
    assert used == np.random.default_rng(3).permutation(60).tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_sample_draws_follows_from_its_position(workers: int) -> None:
    """Protects: augmentation within a stream is the same at any world size and after a restart, and leaves the
    script's own random numbers alone.
    """
    state = random.getstate(), torch.get_rng_state()
    feed = StreamFeed(Augmented(20), seed=0, collate_fn=plain, num_workers=workers)
    alone = [one for _, got in feed.batches(1, 0, Cut(6, 1, 0, 6)) for one in got]
    assert len({value for one in alone for value in one[1:]}) == 60
    parts = [feed.batches(1, 7, Cut(5, 3, rank, 1)) for rank in range(3)]
    later = [one for part in parts for part, got in part for one in got[: part.samples]]
    assert sorted(later) == sorted(alone[7:])
    assert state[0] == random.getstate() and torch.equal(state[1], torch.get_rng_state())


def test_which_feed() -> None:
    """Protects: datasets with items are shuffled and cut by items, streams walked; a stream's own length is known."""

    class Sized(Skips):
        def __len__(self) -> int:
            return 9

    how: dict[str, Any] = {"shuffle": True, "seed": 0}
    assert isinstance(make_feed(TensorDataset(torch.arange(3)), **how), Feed)
    sized = make_feed(Sized(9), **how)
    assert isinstance(sized, StreamFeed) and sized.samples == 9
    tensors = list(sized.batches(0, 4, Cut(4, 2, 1, 4)))
    assert [len(local) for _, local in tensors] == [2, 1] and tensors[1][0].samples == 0


class Forgetful(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_cannot_be_obeyed_is_refused() -> None:
    """Protects: whoever has another stream is told what to write, before training."""
    with pytest.raises(TypeError, match=r"Forgetful cannot go on.*skip\(n\).*from_position\(epoch, start\)"):
        make_feed(Forgetful(), shuffle=True, seed=0)
    with pytest.raises(ValueError, match="use num_workers=1"):
        StreamFeed(Skips(3), seed=0, num_workers=2)
    with pytest.raises(ValueError, match="persistent_workers"):
        StreamFeed(Skips(3), seed=0, num_workers=1, options={"persistent_workers": True})
    with pytest.raises(ValueError, match="prefetch_factor"):
        StreamFeed(Skips(3), seed=0, options={"prefetch_factor": 2})
    with pytest.raises(ValueError, match="empty"):
        list(StreamFeed(Skips(0), seed=0).batches(0, 0, Cut(2, 1, 0, 2)))

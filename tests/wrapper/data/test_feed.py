"""Elastic data: the arithmetic of cursor, shares and passes, and the feed that fetches them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from ones_wrapper.data.feed import AccumulationStep, Cut, Feed, permutation, split, step_passes

stretches = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(1, 20), st.integers(0, 6)), min_size=0, max_size=8
)
"""(world size, global batch, largest local batch, steps before the next interruption) of each run."""


class Whoami(Dataset[tuple[int, int, int]]):
    """Its items tell which process fetched them, and what `worker_init_fn` left there."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.mark = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, os.getpid(), self.mark


def mark(worker: int) -> None:
    """A `worker_init_fn` as scripts write them."""
    info = get_worker_info()
    assert info is not None and info.id == worker
    info.dataset.mark = worker + 1  # type: ignore[attr-defined]


def pairs(samples: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return list(samples)


def tensors(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


@given(cursor=st.integers(0, 99), total=st.integers(1, 99), world=st.integers(1, 40))
def test_split_is_even_and_complete(cursor: int, total: int, world: int) -> None:
    """Protects: shares follow each other without gap, differ by one at most, and rank 0 has samples."""
    parts = [split(cursor, total, world, rank) for rank in range(world)]
    assert [p for part in parts for p in range(part.start, part.stop)] == list(range(cursor, cursor + total))
    sizes = {part.samples for part in parts}
    assert max(sizes) - min(sizes) <= 1
    assert parts[0].samples == max(sizes)


@given(cursor=st.integers(0, 99), total=st.integers(1, 99), world=st.integers(1, 40), max_local=st.integers(1, 30))
def test_passes_are_few_even_and_complete(cursor: int, total: int, world: int, max_local: int) -> None:
    """Protects: every rank makes the same number of passes, none larger than fits, no more than needed; together they
    are its share; what is borrowed is a sample of the step.
    """
    ranks = [list(step_passes(cursor, total, Cut(total, world, rank, max_local))) for rank in range(world)]
    most = -(-total // world)
    assert {len(each) for each in ranks} == {-(-most // max_local)}
    assert {one.count for each in ranks for one in each} == {len(ranks[0])}
    assert {one.largest for each in ranks for one in each} == {max(one.samples for each in ranks for one in each)}
    assert ranks[0][0].largest <= max_local
    counted = [p for each in ranks for one in each for p in range(one.start, one.start + one.samples)]
    assert counted == list(range(cursor, cursor + total))
    for each in ranks:
        assert [one.index for one in each] == list(range(len(each)))
        assert [one.last for one in each] == [False] * (len(each) - 1) + [True]
        assert all(cursor <= one.start < cursor + total for one in each)
        sizes = {one.samples for one in each}
        assert max(sizes) - min(sizes) <= 1


def steps_of(feeds: list[Feed], *where: int) -> Iterator[list[list[tuple[AccumulationStep, Any]]]]:
    """What the ranks fetch of each step: its passes, and in each what each rank has."""
    epoch, cursor, batch, max_local = where
    world = len(feeds)
    together = zip(
        *(feed.batches(epoch, cursor, Cut(batch, world, rank, max_local)) for rank, feed in enumerate(feeds)),
        strict=True,
    )
    step: list[list[tuple[AccumulationStep, Any]]] = []
    for one in together:
        step.append(list(one))
        if one[0][0].last:
            yield step
            step = []
    assert not step


def use(history: list[tuple[int, int, int, int]], feeds: list[Feed]) -> Counter[int]:
    """How often each sample of an epoch is used by runs that follow each other; a last one ends the epoch."""
    used: Counter[int] = Counter()
    cursor, samples = 0, feeds[0].samples
    for world, batch, max_local, steps in [*history, (2, 7, 3, samples)]:
        taken = 0
        for step in steps_of(feeds[:world], 1, cursor, batch, max_local) if steps else ():
            total = 0
            for one in step:
                for feed, (part, (got,)) in zip(feeds, one, strict=False):
                    assert len(got) == max(part.samples, 1)  # also a rank without samples takes part
                    assert got[: part.samples].tolist() == feed.indices(1, part)
                    used.update(got[: part.samples].tolist())
                    total += part.samples
            assert total == step[0][0][0].share.total == min(batch, samples - cursor)
            cursor, taken = cursor + total, taken + 1
            if taken == steps:
                break
    return used


@given(samples=st.integers(1, 120), history=stretches, seed=st.integers(0, 5), shuffle=st.booleans())
def test_any_history_uses_each_sample_once(
    samples: int, history: list[tuple[int, int, int, int]], seed: int, shuffle: bool
) -> None:
    """Protects the core promise: whatever world sizes, batches, passes and interruptions follow each other, each
    sample is used once.
    """
    feed = Feed(tensors(samples), shuffle=shuffle, seed=seed)
    assert use(history, [feed] * 9) == Counter(range(samples))


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_fetching_ahead_loses_and_repeats_nothing(persistent: bool) -> None:
    """Protects: consumed is counted, not fetched, also where workers are left in mid-epoch with much fetched ahead,
    and go on at another place.
    """
    options = {"prefetch_factor": 4, "persistent_workers": persistent}
    feeds = [Feed(tensors(97), shuffle=True, seed=2, num_workers=2, options=options) for _ in range(2)]
    assert use([(2, 5, 2, 3), (1, 8, 8, 2), (2, 3, 9, 1), (2, 9, 3, 2), (1, 1, 1, 4)], feeds) == Counter(range(97))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_outlive_a_change(persistent: bool) -> None:
    """Protects: workers are not started again at a batch's change, nor at an epoch's end if the script says so, and
    find the script's own dataset when they start.
    """
    feed = Feed(
        Whoami(40),
        shuffle=False,
        seed=0,
        num_workers=2,
        collate_fn=pairs,
        options={"persistent_workers": persistent, "worker_init_fn": mark},
    )
    seen: list[tuple[int, int, int]] = []
    for epoch, cursor, batch in ((0, 0, 3), (0, 6, 4), (1, 0, 8)):
        for number, (_, got) in enumerate(feed.batches(epoch, cursor, Cut(batch, 1, 0, 8))):
            seen += got
            if number == 1 and cursor < 6 and not epoch:
                break  # the batch changes
    assert [index for index, _, _ in seen] == [*range(6), *range(6, 40), *range(40)]
    assert {marked for _, _, marked in seen} == {1, 2}
    first, second = ({pid for _, pid, _ in part} for part in (seen[:40], seen[40:]))
    assert len(first) == len(second) == 2 and (first == second if persistent else not first & second)
    if not persistent:
        alone = feed.fetch(feed.share(1, 0, 8))
        assert [index for batch in alone for index, _, _ in batch] == list(range(40))
        assert feed._loader._iterator is None, "workers go with their epoch"


@pytest.mark.slow
def test_workers_of_another_kind() -> None:
    """Protects: `multiprocessing_context` works, so what goes to workers can be pickled."""
    options = {"multiprocessing_context": "spawn", "worker_init_fn": mark, "timeout": 60}
    feed = Feed(Whoami(5), shuffle=False, seed=0, num_workers=1, collate_fn=pairs, options=options)
    got = [got for _, got in feed.batches(0, 1, Cut(4, 2, 0, 1))]
    assert [(index, marked) for batch in got for index, _, marked in batch] == [(1, 1), (2, 1)]
    assert got[0][0][1] != os.getpid()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_pinned_memory() -> None:
    feed = Feed(tensors(4), shuffle=False, seed=0, options={"pin_memory": True})
    assert all(x.is_pinned() for _, (x,) in feed.batches(0, 0, Cut(2, 1, 0, 2)))


def test_permutations_differ_by_epoch_and_seed_alone() -> None:
    """Protects: every rank and run draws the same order, and epochs do not repeat each other's."""
    first = permutation(50, 1, 0, True)
    assert np.array_equal(first, permutation(50, 1, 0, True))
    assert not np.array_equal(first, permutation(50, 1, 1, True))
    assert not np.array_equal(first, permutation(50, 2, 0, True))
    assert permutation(4, 1, 0, False).tolist() == [0, 1, 2, 3]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_what_cannot_be_obeyed_is_refused() -> None:
    """Protects: a dataset that cannot be cut, and options that contradict each other, are told before training."""
    with pytest.raises(TypeError, match="Stream has no length"):
        Feed(Stream(), shuffle=True, seed=0)
    with pytest.raises(ValueError, match="empty"):
        Feed(tensors(0), shuffle=True, seed=0)
    with pytest.raises(ValueError, match="in_order"):
        Feed(tensors(3), shuffle=True, seed=0, options={"in_order": False})
    for option in ("prefetch_factor", "persistent_workers"):
        with pytest.raises(ValueError, match=option):
            Feed(tensors(3), shuffle=True, seed=0, options={option: 2})

"""Elastic data: each sample of each epoch is used exactly once, whatever the world sizes and batches on the
way.

One cursor runs through one permutation per epoch. A step uses the next global batch of it, split over the
ranks as evenly as possible. The cursor is all that a checkpoint needs to hold, and it moves when a step is
completed, not when its data is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset


class Share(NamedTuple):
    """What one rank does in one step. Positions count within the epoch's permutation."""

    start: int
    stop: int
    """The rank's positions are start … stop - 1; none where they are equal."""
    total: int
    """Samples of the step over all ranks."""

    @property
    def samples(self) -> int:
        return self.stop - self.start


def split(cursor: int, total: int, world: int, rank: int) -> Share:
    """Rank `rank`'s share of the `total` samples from `cursor` on; shares differ by one sample at most.

    The first ranks get the larger ones, so rank 0 always has samples.
    """
    each, left = divmod(total, world)
    start = cursor + rank * each + min(rank, left)
    return Share(start, start + each + (rank < left), total)


def permutation(samples: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The order of the samples in one epoch: the same on every rank and in every run."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    return np.random.default_rng([seed, epoch]).permutation(samples).astype(np.int64)


def shares(cursor: int, samples: int, batch: int, world: int, rank: int) -> Iterator[Share]:
    """The rank's shares of all steps from `cursor` to the end of the epoch."""
    while cursor < samples:
        total = min(batch, samples - cursor)
        yield split(cursor, total, world, rank)
        cursor += total


class Feed:
    """Fetches one rank's local batches of one epoch from a dataset."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        shuffle: bool,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
        options: dict[str, Any],
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"loader: {type(dataset).__name__} has no length or no items; elastic data needs a map-style dataset"
            )
        self.samples: int = len(dataset)
        if self.samples == 0:
            raise ValueError("loader: the dataset is empty")
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._options = {"collate_fn": collate_fn, "num_workers": num_workers, **options}

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The epoch's permutation."""
        return permutation(self.samples, self._seed, epoch, self._shuffle)

    def batches(
        self, order: npt.NDArray[np.int64], cursor: int, batch: int, world: int, rank: int
    ) -> Iterator[tuple[Share, Any]]:
        """(share, local batch) for each step from `cursor` on at one global batch.

        A rank without samples in a step gets a sample of another's, which its gradient does not count, so
        that it takes part in the exchange. Workers fetch ahead; what they fetched is not used until a step
        used it.
        """
        steps = partial(shares, cursor, self.samples, batch, world, rank)
        # Its own generator: the script's random numbers must not depend on how often data was set up anew.
        fetched = DataLoader(
            self._dataset,
            batch_sampler=_Indices(order, steps),
            generator=torch.Generator().manual_seed(self._seed),
            **self._options,
        )
        return zip(steps(), iter(fetched), strict=True)


class _Indices:
    """The dataset indices of each local batch, made as they are needed."""

    def __init__(self, order: npt.NDArray[np.int64], steps: Callable[[], Iterator[Share]]) -> None:
        self._order = order
        self._steps = steps

    def __iter__(self) -> Iterator[list[int]]:
        for share in self._steps():
            yield local_indices(self._order, share)


def local_indices(order: npt.NDArray[np.int64], share: Share) -> list[int]:
    """The dataset indices of a share: those it counts, or one that it does not count where it has none."""
    last = max(share.stop, share.start + 1)
    chosen: list[int] = order[share.start : last].tolist()
    return chosen or order[-1:].tolist()

"""Elastic data from a stream: a dataset that can only be iterated, such as an `IterableDataset`.

Every rank iterates over the same stream, and keeps its share of each step. So a step has the same samples at any world
size, and a checkpoint needs only the cursor. Each rank reads every sample, so that reading does not get faster with
more ranks. Put expensive work into `collate_fn`, which gets only the rank's own samples. While a rank reads a step, it
holds the samples of all ranks in memory. A run that begins in the middle of an epoch reads the used samples again,
unless the stream has `from_position`, or `skip` without `set_epoch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ones_wrapper.data.coreset import Coreset
from ones_wrapper.data.coreset_feed import CoresetFeed, Selection
from ones_wrapper.data.feed import AccumulationStep, Cut, Feed, check_options, identity, step_passes, step_size
from ones_wrapper.data.randomness import keep_generators, key, seed_all

SKIP_HELP = (
    "give it skip(n), which returns the same stream without its first n samples (as Hugging Face's streams have). "
    "or from_position(epoch, start), which returns an iterator over the epoch's samples from number `start` on"
)


class StreamFeed:
    """Feed of one replica's local batches from a stream. The stream's order must depend only on the epoch."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        keyed: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Arguments are those of `Feed`. Raises TypeError for a stream that cannot begin in the middle of an epoch, and
        ValueError for more than one worker."""
        if isinstance(dataset, DataLoader):
            raise TypeError(
                "loader: give it the dataset itself, not a DataLoader (and the DataLoader's collate_fn and num_workers)"
            )
        if not can_skip(dataset):
            raise TypeError(f"loader: {type(dataset).__name__} cannot go on in the middle of an epoch; {SKIP_HELP}")
        if num_workers > 1:
            raise ValueError(
                f"loader: num_workers={num_workers}, but a stream is read by one process, or its samples would come in "
                "another order at another number of workers; use num_workers=1"
            )
        options = check_options(options)
        if options.pop("persistent_workers", False):
            raise ValueError("loader: persistent_workers cannot be given for a stream, which each epoch opens again")
        self.samples: int = len(dataset) if hasattr(dataset, "__len__") else 0
        """Number of samples of an epoch by the stream's `len`; 0 without `len`. The epoch ends when the stream ends."""
        begin = 0, 0, Cut(1, 1, 0, 1)
        self._stream = _ReplicaStream(dataset, seed, keyed, collate_fn or default_collate, *begin)
        self._options = {"num_workers": num_workers, **options}
        self._loader(*begin)  # options that contradict each other raise now

    def _loader(self, epoch: int, cursor: int, cut: Cut) -> DataLoader[Any]:
        return DataLoader(
            replace(self._stream, epoch=epoch, cursor=cursor, cut=cut),
            batch_size=None,
            collate_fn=identity,
            generator=torch.Generator().manual_seed(key(self._stream.seed, epoch, cursor, cut.replica) >> 1),
            **self._options,
        )

    def fingerprint(self) -> str:
        """Return an empty text, since samples of a stream cannot be read by index."""
        return ""

    def batches(
        self, epoch: int, cursor: int, cut: Cut, *, seeded: bool = False
    ) -> Iterator[tuple[AccumulationStep, Any]]:
        """Yield (pass, local batch) as `Feed.batches` does. The last step of an epoch may have fewer samples."""
        return iter(self._loader(epoch, cursor, cut))

    def indices(self, epoch: int, part: AccumulationStep) -> list[int]:
        """Return the stream positions of a pass's own samples."""
        return list(range(part.start, part.start + part.samples))


@dataclass(eq=False)
class _ReplicaStream(IterableDataset[tuple[AccumulationStep, Any]]):
    """Local batches of one replica from `cursor` to the end of an epoch, as a dataset for the DataLoader."""

    dataset: Any
    seed: int
    keyed: bool
    collate: Callable[[list[Any]], Any]
    epoch: int
    cursor: int
    cut: Cut

    def __iter__(self) -> Iterator[tuple[AccumulationStep, Any]]:
        cursor, full = self.cursor, True
        with self._own_numbers():
            self._seed(cursor)
            samples = open_stream(self.dataset, self.epoch, cursor)
        while full and (step := self._read(samples, cursor)):
            for part in step_passes(cursor, len(step), self.cut):
                first = part.start - cursor
                with self._own_numbers():
                    self._seed(part.start, max(part.samples, 1))
                    chosen = step[first : first + max(part.samples, 1)]
                    local = self.collate(chosen if part.samples else chosen * part.borrows)
                yield part, local
            cursor += len(step)
            full = len(step) == self.cut.batch
        if cursor == 0:
            raise ValueError("loader: the stream is empty")

    def _read(self, samples: Iterator[Any], position: int) -> list[Any]:
        """Return the samples of the step that begins at `position`; fewer, or none, at the end of the stream."""
        step: list[Any] = []
        with self._own_numbers():
            while len(step) < self.cut.batch:
                self._seed(position + len(step))
                try:
                    step.append(next(samples))
                except StopIteration:
                    break
        return step[: step_size(len(step), self.cut)]

    def _seed(self, *parts: int) -> None:
        if self.keyed:
            seed_all(key(self.seed, self.epoch, *parts))

    def _own_numbers(self) -> AbstractContextManager[None]:
        return keep_generators() if self.keyed else nullcontext()


def can_skip(dataset: Any) -> bool:
    """Return True if a stream can begin in the middle of an epoch."""
    return any(callable(getattr(dataset, name, None)) for name in ("from_position", "skip"))


def open_stream(dataset: Any, epoch: int, start: int) -> Iterator[Any]:
    """Return an iterator over an epoch's samples that begins with sample number `start`."""
    renews = callable(getattr(dataset, "set_epoch", None))
    if renews:
        dataset.set_epoch(epoch)
    if callable(getattr(dataset, "from_position", None)):
        found: Iterator[Any] = iter(dataset.from_position(epoch, start))
        return found
    if renews:
        # Hugging Face's skip() returns a stream that keeps its shards in epoch 0's order (datasets 5.2), so other
        # samples than the first ones would be left out: walk there. At once, before any sample's numbers are drawn.
        samples: Iterator[Any] = iter(dataset)
        deque(islice(samples, start), maxlen=0)
        return samples
    rest: Iterator[Any] = iter(dataset.skip(start) if start else dataset)
    return rest


def make_feed(
    dataset: Any, *, shuffle: bool, whole: int = 1, chosen: tuple[Coreset, Selection] | None = None, **how: Any
) -> Feed | StreamFeed:
    """Return the feed for a dataset: `Feed` or `CoresetFeed` if it has a length and items, else `StreamFeed`.

    A stream keeps its own order; `shuffle` does not apply to it. Raises ValueError for a stream with `whole` above 1 or
    a coreset. `chosen` is a coreset and the object that holds its selection; `how` are further arguments of the feed.
    """
    by_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if by_items and not isinstance(dataset, IterableDataset):
        how |= {"shuffle": shuffle, "whole": whole}
        return CoresetFeed(dataset, *chosen, **how) if chosen is not None else Feed(dataset, **how)
    if chosen is not None:
        raise ValueError("loader: a coreset is chosen from a dataset with length and items, and this is a stream")
    if whole > 1:
        raise ValueError("loader: drop_last is for datasets with length and items; where a stream ends shows too late")
    return StreamFeed(dataset, **how)

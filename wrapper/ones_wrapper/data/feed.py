"""Elastic data: each epoch uses each sample exactly once, even if world size and batch change during the epoch.

Each epoch has one permutation of the samples, and a cursor in it. A step uses the next global batch of the permutation.
The cursor moves when a step is completed, not when its data is fetched. So a checkpoint needs only the cursor.

The samples of a step are split over replicas, evenly or in proportion to speed (shares.py). All ranks of a replica get
the same samples; in plain data parallel each rank is a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice, tee
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ones_wrapper.data.fingerprint import fingerprint
from ones_wrapper.data.randomness import WorkerInit, keep_generators, key, may_draw, seed_all
from ones_wrapper.data.shares import Shares

LENGTH = (
    "loader: the dataset has {now} samples, and had {before} when it was given to the job: each epoch has the same. "
    "Keep its length, and choose by the epoch what a sample is, or submit each stage as a job "
    "(--resume-from)"
)
PLANNED = 32


class Share(NamedTuple):
    """Samples of a step that one replica has, as positions within the epoch's permutation."""

    start: int
    stop: int
    """Position after the replica's last sample; equal to `start` if the replica has no samples."""
    total: int
    """Samples of all replicas in the step."""

    @property
    def samples(self) -> int:
        return self.stop - self.start


class Tokens(NamedTuple):
    """Numbers of tokens: in one pass, in all passes of the replica in the step, and of all replicas in the step."""

    of_pass: int
    of_share: int
    total: int


@dataclass(frozen=True, slots=True)
class AccumulationStep:
    """One accumulation step: one forward and backward pass of a replica within a step."""

    share: Share
    start: int
    """Position of the pass's first sample within the epoch's permutation."""
    samples: int
    """Number of samples of the pass. A pass with 0 samples uses a borrowed sample, which another pass counts, and its
    gradient has weight 0."""
    index: int
    count: int
    """Number of passes in the step, equal on all ranks."""
    largest: int
    """Number of samples of the step's largest pass on any rank, at least 1."""
    borrows: int = 1
    """Number of copies of the borrowed sample in this pass, if `samples` is 0."""
    tokens: Tokens | None = None
    """Numbers of tokens if gradients are means over tokens; None if over samples."""

    @property
    def weight(self) -> float:
        """Weight of the pass in the mean over the step; all weights of a step add up to `share.total`. It is 0 for a
        pass without samples or tokens."""
        return self.samples if self.tokens is None else self.tokens.of_pass * self.share.total / self.tokens.total

    @property
    def share_weight(self) -> float:
        """Sum of the weights of the replica's passes in the step."""
        its = self.tokens
        return self.share.samples if its is None else its.of_share * self.share.total / its.total

    @property
    def counted(self) -> int:
        """Weight of the pass in a mean of losses over several steps: its number of tokens if known, else of samples."""
        return self.samples if self.tokens is None else self.tokens.of_pass

    @property
    def last(self) -> bool:
        """True for the last pass of the step."""
        return self.index == self.count - 1


def weigh(step: list[Pass], held: Callable[[Any], Any], total: Callable[[Sequence[float]], list[float]]) -> list[Pass]:
    """Return the passes of a step with their numbers of tokens; unchanged if the step has no tokens. `held` counts the
    tokens of a local batch. `total` returns the sums over the ranks of its arguments (collective)."""
    counts = [int(held(local)) if part.samples else 0 for part, local in step]
    own = sum(counts)
    every = int(total([float(own)])[0])
    if not every:
        return step
    pairs = zip(step, counts, strict=True)
    return [(replace(part, tokens=Tokens(count, own, every)), local) for (part, local), count in pairs]


def split(cursor: int, total: int, replicas: int, replica: int, unit: int = 1, least: int = 1) -> Share:
    """Return one replica's share of the `total` samples that begin at `cursor`. Shares are multiples of `unit`, and
    differ by at most one `unit`. If `total` is no multiple of `unit`, as in an epoch's last step, the last share has
    the remainder.

    The first replicas have the larger shares, so that the first always has samples. If shares would be smaller than
    `least`, fewer replicas have samples.
    """
    if unit == 1 and total < least * replicas:
        sharing = max(1, total // least)
        if replica >= sharing:
            return Share(cursor + total, cursor + total, total)
        replicas = sharing
    units, rest = divmod(total, unit)
    each, left = divmod(units, replicas)
    start = cursor + (replica * each + min(replica, left)) * unit
    stop = start + (each + (replica < left)) * unit
    if not units:
        return Share(cursor if replica == 0 else cursor + rest, cursor + rest, total)
    return Share(start, stop + rest if replica == replicas - 1 else stop, total)


def permutation(samples: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Return the order of an epoch's samples. It is the same on every rank and in every run."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    return np.random.default_rng([seed, epoch]).permutation(samples).astype(np.int64)


def clamp_batch(
    wanted: int,
    replicas: int,
    max_batch: int,
    max_local_batch: int,
    max_accumulation_steps: int = 1,
    multiple_of: int = 1,
) -> int:
    """Return the global batch to use for `wanted` samples: at most `max_batch`, and at most what the replicas hold. It
    is a multiple of `multiple_of`, unless fewer samples fit."""
    most = max(1, min(max_batch, max_local_batch * max_accumulation_steps * replicas))
    if most < multiple_of:
        return most
    found = min(max(wanted, multiple_of), most)
    return found - found % multiple_of


@lru_cache(maxsize=256)
def accumulation_count(total: int, replicas: int, max_local: int, unit: int = 1, least: int = 1) -> int:
    """Return the number of passes of a step of `total` samples, with at most `max_local` samples of a replica in a
    pass. `max_local` must be a multiple of `unit`."""
    return -(-_largest(total, replicas, unit, least) // max_local)


@lru_cache(maxsize=256)
def _largest(total: int, parts: int, unit: int, least: int = 1) -> int:
    return max(split(0, total, parts, part, unit, least).samples for part in {0, parts - 1})


@dataclass(frozen=True, slots=True)
class Cut:
    """Global batch and limits that determine the passes of one replica in each step."""

    batch: int
    """Samples of all replicas in a step, except in an epoch's last step."""
    replicas: int
    replica: int
    max_local: int
    """Largest number of samples in a pass of the replica."""
    unit: int = 1
    """Number of samples by which each share and each pass is divisible, except in an epoch's last step."""
    uneven: Shares | None = None
    least: int = 1
    """Smallest number of samples in a share that is not empty."""
    whole: int = 1
    """Number of samples by which every step is divisible. Samples that remain at the end of an epoch are not used."""


def accumulation_steps(share: Share, cut: Cut, largest_share: int | None = None) -> Iterator[AccumulationStep]:
    """Yield the passes of one replica in one step, as few as possible with at most `max_local` samples each. They are
    of nearly equal size, in multiples of `unit`. `largest_share` is the largest share of any replica (default: that of
    even shares).

    A pass without samples borrows the sample before its position, which every rank can fetch.
    """
    count = accumulation_count(share.total, cut.replicas, cut.max_local, cut.unit, cut.least)
    largest = _largest(largest_share or _largest(share.total, cut.replicas, cut.unit, cut.least), count, cut.unit)
    for index in range(count):
        part = split(share.start, share.samples, count, index, cut.unit, cut.least)
        start = part.start if part.samples else part.start - 1
        yield AccumulationStep(share, start, part.samples, index, count, largest, cut.least)


Pass: TypeAlias = tuple[AccumulationStep, Any]
"""An accumulation step, and the local batch that this rank fetched for it."""


def step_passes(cursor: int, total: int, cut: Cut) -> Iterator[AccumulationStep]:
    """Yield the replica's passes in the step of `total` samples that begins at `cursor`."""
    counts: tuple[int, ...] = ()
    if cut.uneven is not None:
        counts = cut.uneven.samples(total, accumulation_count(total, cut.replicas, cut.max_local))
    if min(counts, default=0) < cut.least:
        return accumulation_steps(split(cursor, total, cut.replicas, cut.replica, cut.unit, cut.least), cut)
    start = cursor + sum(counts[: cut.replica])
    share = Share(start, start + counts[cut.replica], total)
    return accumulation_steps(share, replace(cut, unit=1, least=1), max(counts))


def step_size(left: int, cut: Cut) -> int:
    """Return the number of samples in an epoch's next step if `left` samples are left; 0 if there is no further
    step."""
    total = min(cut.batch, left)
    total -= total % cut.whole
    if left - total == 1 < cut.least and total > cut.least and cut.whole == 1:
        return total - 1  # the last step has two
    return total if cut.whole == 1 or total >= cut.least * cut.replicas else 0


def plan(cursor: int, samples: int, cut: Cut) -> Iterator[AccumulationStep]:
    """Yield the replica's passes from `cursor` to the end of the epoch."""
    while total := step_size(samples - cursor, cut):
        yield from step_passes(cursor, total, cut)
        cursor += total


class Feed:
    """Feed of one replica's local batches from a map-style dataset."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        shuffle: bool,
        seed: int,
        keyed: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        options: dict[str, Any] | None = None,
        whole: int = 1,
    ) -> None:
        """`seed` fixes the order of every epoch; with `keyed` also the random numbers drawn while a sample is fetched.
        `options` are further options of torch's DataLoader. An epoch's length is the largest multiple of `whole` that
        the dataset has. Raises TypeError for a dataset without length or items, ValueError for an empty dataset or
        contradictory options."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"loader: {type(dataset).__name__} has no length or no items")
        self._held = len(dataset)
        self.samples: int = self._held - self._held % whole
        if self._held == 0:
            raise ValueError("loader: the dataset is empty")
        if self.samples == 0:
            raise ValueError(f"loader: drop_last leaves none of {self._held} samples, fewer than a batch of {whole}")
        options = check_options(options)
        self._shuffle, self._seed = shuffle, seed
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._requests = _Requests()
        self._fingerprint: str | None = None
        self._given = dataset, {"num_workers": num_workers, **options}
        # A generator of its own: the script's random numbers must not depend on how often data was set up.
        self._generator = torch.Generator()
        # Workers outlive a change of batch or ranks, which would cost seconds of forks and of data fetched ahead. Each
        # epoch has new workers, as in an ordinary script, unless the script asks for persistent workers.
        self._renews = bool(num_workers) and not options.get("persistent_workers")
        self._walked: int | None = None
        """Epoch for which the DataLoader's present workers fetch, or None."""
        if num_workers:
            options["persistent_workers"] = True
        self._loader = DataLoader(
            _Collated(dataset, seed, keyed, collate_fn or default_collate),
            batch_sampler=self._requests,  # type: ignore[arg-type] # its type allows only lists of indices
            generator=self._generator,
            collate_fn=identity,
            num_workers=num_workers,
            **options,
        )

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset. The first call reads some samples."""
        if self._fingerprint is None:
            order = key(self._seed, int(self._shuffle))
            self._fingerprint = fingerprint(self._given[0], self._held, self._given[1], order)
        return self._fingerprint

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the epoch's permutation. Raises ValueError if the dataset's length has changed."""
        if self._order is None or self._order[0] != epoch:
            if (now := len(self._given[0])) != self._held:
                raise ValueError(LENGTH.format(before=self._held, now=now))
            order = permutation(self._held, self._seed, epoch, self._shuffle)
            self._order = epoch, order[: self.samples]
        return self._order[1]

    def batches(
        self, epoch: int, cursor: int, cut: Cut, *, seeded: bool = False
    ) -> Iterator[tuple[AccumulationStep, Any]]:
        """Yield (pass, local batch) for all passes from `cursor` to the end of the epoch, for a fixed `cut`.

        A replica without samples in a pass gets a borrowed sample of weight 0, since it must join the gradient
        exchange. Samples that workers have fetched in advance are not counted as used.

        Each fetch restores the global random generators afterwards, which takes 0.1 ms. With `seeded` this is left out
        for each step's first pass, since the caller then seeds the generators.
        """
        order = self.order(epoch)
        self._generator.manual_seed(key(self._seed, epoch, cursor, cut.replica) >> 1)
        used, fetched = tee(plan(cursor, self.samples, cut))
        self._requests.to_come = _ahead(
            _Request(epoch, fetched_indices(order, part), part.index > 0 or not seeded) for part in fetched
        )
        return zip(used, self._fetched(epoch), strict=True)

    def share(self, replicas: int, replica: int, most: int, unit: int = 1) -> list[AccumulationStep]:
        """Return one replica's passes over its part of the whole dataset, each of at most `most` samples. All replicas
        have equally many passes, unless a replica's part is too small."""
        cut = Cut(self.samples, replicas, replica, most, unit)
        return [part for part in step_passes(0, self.samples, cut) if part.samples]

    def fetch(self, parts: list[AccumulationStep]) -> Iterator[Any]:
        """Yield the local batches of these passes, in the order of epoch 0."""
        order = self.order(0)
        return self.fetch_samples(0, (fetched_indices(order, part) for part in parts))

    def fetch_samples(self, epoch: int, requests: Iterable[list[int]]) -> Iterator[Any]:
        """Yield a local batch for each list of dataset indices. Random numbers are those of `epoch`."""
        self._generator.manual_seed(self._seed)
        self._requests.to_come = (_Request(epoch, indices) for indices in requests)
        return self._fetched(None)

    def _fetched(self, epoch: int | None) -> Iterator[Any]:
        """Yield the requested batches from workers that already fetch for `epoch`, or from new workers."""
        if self._renews and (epoch is None or epoch != self._walked):
            self._loader._iterator = None
        self._walked = epoch
        return chain(iter(self._loader), self._end())

    def _end(self) -> Iterator[Any]:
        if self._renews:
            self._loader._iterator, self._walked = None, None
        yield from ()

    def indices(self, epoch: int, part: AccumulationStep) -> list[int]:
        """Return the dataset indices of a pass's samples; empty for a pass with a borrowed sample."""
        return fetched_indices(self.order(epoch), part) if part.samples else []


def fetched_indices(order: npt.NDArray[np.int64], part: AccumulationStep) -> list[int]:
    """Return the dataset indices that a pass fetches: of its samples, or of copies of the borrowed sample."""
    chosen: list[int] = order[part.start : part.start + max(part.samples, 1)].tolist()
    return chosen if part.samples else chosen * part.borrows


def _ahead(requests: Iterator[_Request]) -> Iterator[_Request]:
    """Yield the requests. `PLANNED` of them are computed at a time, which is much faster than one between two steps."""
    while several := list(islice(requests, PLANNED)):
        yield from several


def check_options(options: dict[str, Any] | None) -> dict[str, Any]:
    """Return further options for torch's DataLoader, with `WorkerInit` around the script's `worker_init_fn`. Raises
    ValueError for `in_order=False`."""
    options = dict(options or {})
    options["worker_init_fn"] = WorkerInit(options.get("worker_init_fn"))
    if not options.get("in_order", True):
        raise ValueError("loader: in_order=False cannot be given; which samples a step uses is decided beforehand")
    return options


def identity(collated: Any) -> Any:
    return collated


class _Request(NamedTuple):
    epoch: int
    indices: list[int]
    keep: bool = True
    """True if the fetch must restore the global random generators."""


class _Requests:
    """Iterable over the next requests, in place of the DataLoader's batch sampler."""

    to_come: Iterator[_Request] = iter(())

    def __iter__(self) -> Iterator[_Request]:
        return self.to_come


class _Collated(Dataset[Any]):
    """Dataset whose items are local batches, for the DataLoader and its workers."""

    def __init__(self, dataset: Dataset[Any], seed: int, keyed: bool, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._seed, self._collate = dataset, seed, collate
        self._by_item, self._collates = keyed and may_draw(dataset), keyed and collate is not default_collate
        """True if fetching a sample, and collating a batch, must be seeded. torch's own collate function draws no
        numbers."""

    def __getitems__(self, request: _Request) -> Any:
        epoch, indices, keep = request
        with keep_generators() if keep and (self._by_item or self._collates) else nullcontext():
            samples = self._samples(epoch, indices)
            if self._collates:
                # Numbers for collating cannot follow from one sample: they follow from the first sample and the count.
                seed_all(key(self._seed, epoch, indices[0], len(indices)))
            return self._collate(samples)

    def _samples(self, epoch: int, indices: list[int]) -> Any:
        if not self._by_item:
            at_once = getattr(self.dataset, "__getitems__", None)
            return at_once(indices) if at_once else [self.dataset[index] for index in indices]
        samples = []
        for index in indices:
            seed_all(key(self._seed, epoch, index))
            samples.append(self.dataset[index])
        return samples

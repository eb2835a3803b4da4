"""CRAIG: a weighted subset of the data whose gradient is close to that of all data (Mirzasoleiman et al., ICML 2020,
arXiv:1906.01827).

For each class, the subset S minimises Σ_i min_{j∈S} d_ij over the class's samples i: a facility location problem. d_ij
is an upper bound of the distance between the gradients of samples i and j, or their distance in the last layer. F(S) =
Σ_i (d_max − min_{j∈S} d_ij) is monotone and submodular. So a greedy choice of n samples reaches at least the fraction 1
− 1/e of the largest F of n samples. Lazy evaluation computes this choice (Minoux 1978). The weight of a chosen sample
is the number of samples to which it is the nearest chosen one (eq. 9, Algorithm 1).

A class of more than `shard` samples is cut into random shards. The greedy algorithm chooses within each shard, and then
among all chosen samples (GreeDi: Mirzasoleiman et al., NIPS 2013). The shards depend only on the data, and are
distributed over the ranks, so that the result is the same at any world size. A rank holds `shard`² distances, and in
the second round at most `MOST`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ones_wrapper.group import Group

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
FeaturesOf = Callable[[Ints], Floats]
"""Function that returns the features of samples, [samples, width], given their indices in the dataset."""

MOST = 2**26
"""Largest number of distances in memory in GreeDi's second round (512 MiB). A larger class uses only distances from a
random part of its samples."""


NORM_BITS = 25
"""Bits of the longest feature row's norm, in quanta. Squared distances then stay below 2^52, and are exact in
float64."""


@dataclass(frozen=True)
class Coreset:
    """Options of a coreset, a weighted subset of the data, for `Job.loader(dataset, coreset=...)`. The weights have
    mean 1."""

    fraction: float
    """Fraction of the samples to choose, above 0 and at most 1."""
    every: int = 0
    """Epochs between two selections; 0 for a single selection, before the first epoch."""
    features: Callable[[Any], torch.Tensor] | None = None
    """Function from a collated batch to one row of features for each sample (`last_layer_gradient`). The distance
    between two rows approximates the distance between the samples' gradients. None uses the batch's first part, the
    inputs: their distances are bounds for a convex model."""
    labels: Any = None
    """Class of each sample of the dataset, as whole numbers; for data without classes, zeros. None uses the dataset's
    own (`targets`, `labels`, or the last tensor of a TensorDataset)."""
    shard: int = 2048
    """Largest number of samples in a shard of a class, from which the greedy algorithm chooses at once."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"coreset: fraction={self.fraction} must be above 0 and at most 1: a subset is no larger than the data"
            )
        if self.every < 0 or self.shard < 1:
            raise ValueError(f"coreset: every={self.every} must be 0 or more, and shard={self.shard} 1 or more")

    def size(self, samples: int) -> int:
        """Return the number of samples to choose from `samples`."""
        return max(1, round(self.fraction * samples))


def last_layer_gradient(logits: torch.Tensor, labels: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Return each sample's gradient of the cross-entropy with respect to the logits, [samples, classes]. If the last
    layer's inputs `hidden` are given, [samples, width], return the gradient with respect to that layer's weights,
    [samples, classes × width] (§3.4)."""
    gradient = torch.softmax(logits.detach().float(), 1)
    gradient[torch.arange(len(labels)), labels] -= 1.0
    if hidden is None:
        return gradient
    return (gradient[:, :, None] * hidden.detach().float()[:, None]).flatten(1)


def distances(one: Floats, other: Floats) -> Floats:
    """Return the Euclidean distances between the rows of `one` and of `other` as multiples of a quantum, [rows of one,
    rows of other].

    Features are rounded to multiples of the quantum, so that all sums are exact. Equal features then give equal
    distances, and the same greedy choice, on every processor.
    """
    one, other = in_quanta(one, other)
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1)[None, :] - 2.0 * (one @ other.T)
    found: Floats = np.rint(np.sqrt(squares))
    return found


def in_quanta(one: Floats, other: Floats) -> tuple[Floats, Floats]:
    """Return both arrays of features, shifted to the middle of their range, as multiples of a common quantum. The
    quantum is the power of two for which the longest row's norm has `NORM_BITS` bits."""
    rows = np.concatenate([one, other])
    rows = rows - (rows.min(0, initial=math.inf) / 2 + rows.max(0, initial=-math.inf) / 2)
    # A bound of the longest row, then its length: the rounding of both is the same on any processor.
    bits = math.frexp(np.abs(rows).max(initial=0.0))[1] + math.frexp(math.sqrt(rows.shape[1]))[1]
    longest = math.sqrt((np.rint(np.ldexp(rows, NORM_BITS - bits)) ** 2).sum(1).max(initial=0.0))
    whole = np.rint(np.ldexp(rows, 2 * NORM_BITS - bits - math.frexp(longest)[1]))
    return whole[: len(one)], whole[len(one) :]


def lazy_greedy(distance: Floats, count: int) -> list[int]:
    """Return `count` columns in the order of the greedy choice; of equal columns the first.

    `distance[i, j]` is the distance of sample i from candidate j. A candidate's gain, by which it lowers the cost, only
    falls while others are chosen. So a candidate is the next choice if its recomputed gain is above the old gains of
    all others.
    """
    nearest = np.full(len(distance), distance.max(initial=0.0))
    columns = np.ascontiguousarray(distance.T)

    def gain(column: int) -> float:
        return float(np.maximum(nearest - columns[column], 0.0).sum())

    waiting = [(-gain(column), column) for column in range(len(columns))]
    heapq.heapify(waiting)
    chosen: list[int] = []
    while waiting and len(chosen) < count:
        column = waiting[0][1]
        now = (-gain(column), column)
        heapq.heapreplace(waiting, now)
        if waiting[0] == now:
            heapq.heappop(waiting)
            chosen.append(column)
            np.minimum(nearest, columns[column], out=nearest)
    return chosen


def cost(distance: Floats, chosen: Sequence[int]) -> float:
    """Return Σ_i min_{j∈chosen} d_ij, which CRAIG minimises."""
    return float(distance[:, list(chosen)].min(1).sum())


def budgets(sizes: Sequence[int], count: int) -> list[int]:
    """Return the number of samples to choose from each class; the sum is `count`. Each number is proportional to the
    class's size, and at least 1 if `count` suffices for that."""
    total = sum(sizes)
    found = [count * size // total for size in sizes]
    least = [min(1, size) for size in sizes] if count >= sum(1 for size in sizes if size) else [0] * len(sizes)
    found = [max(one, low) for one, low in zip(found, least, strict=True)]

    def missing(index: int) -> tuple[float, int]:
        return count * sizes[index] / total - found[index], -index

    while (left := count - sum(found)) != 0:
        open_ = [i for i, size in enumerate(sizes) if (found[i] < size if left > 0 else found[i] > least[i])]
        one = max(open_, key=missing) if left > 0 else min(open_, key=missing)
        found[one] += 1 if left > 0 else -1
    return found


@dataclass(frozen=True)
class Chosen:
    """A weighted subset of a dataset: indices and weights of its samples."""

    indices: Ints
    weights: Floats
    """Weight of each chosen sample; the mean is 1."""


def select(features_of: FeaturesOf, labels: Ints, count: int, group: Group, shard: int = 2048) -> Chosen:
    """Choose `count` samples and their weights, equal on all ranks. Collective. Raises `RankError` if `features_of`
    fails.

    `features_of` is called once for each sample. For a class of several shards, one rank calls it again with the
    class's samples.
    """
    if count > len(labels):
        raise ValueError(f"coreset: {count} samples of {len(labels)}: a subset is no larger than the data")
    kinds, sizes = np.unique(labels, return_counts=True)
    counts = dict(zip(kinds.tolist(), budgets(sizes.tolist(), count), strict=True))
    parts: list[tuple[int, Ints]] = []
    for kind in (kind for kind, budget in counts.items() if budget):
        members = np.flatnonzero(labels == kind)
        order = np.random.default_rng([kind % 2**63, len(members)]).permutation(members)
        parts += [(kind, np.sort(piece)) for piece in np.array_split(order, -(-len(members) // shard))]
    mine = parts[group.rank :: group.world]
    rows: list[Floats] = []

    def first_round() -> list[tuple[Ints, Floats]]:
        found = []
        for kind, members in mine:
            features = _checked(features_of(members), len(members))
            rows.append(features)
            picked = lazy_greedy(distances(features, features), counts[kind])
            found.append((members[picked], features[picked]))
        return found

    rounds = group.everywhere(first_round)
    by_kind: dict[int, list[tuple[Ints, Floats]]] = {}
    for index, (kind, _) in enumerate(parts):
        by_kind.setdefault(kind, []).append(rounds[index % group.world][index // group.world])
    several = [kind for kind, found in by_kind.items() if len(found) > 1]

    def second_round() -> list[list[int]]:
        return [
            _among(features_of, np.flatnonzero(labels == kind), by_kind[kind], counts[kind])
            for kind in several[group.rank :: group.world]
        ]

    again = group.everywhere(second_round) if several else []
    final: dict[int, tuple[Ints, Floats]] = {kind: found[0] for kind, found in by_kind.items()}
    for index, kind in enumerate(several):
        picked = again[index % group.world][index // group.world]
        indices, features = (np.concatenate(one) for one in zip(*by_kind[kind], strict=True))
        final[kind] = indices[picked], features[picked]
    nearest = group.total(_nearest(mine, rows, final, len(labels)).tolist())
    indices = np.sort(np.concatenate([found[0] for found in final.values()]))
    weights = np.asarray(nearest)[indices]
    return Chosen(indices, weights * (len(indices) / weights.sum()))


def _among(features_of: FeaturesOf, members: Ints, shards: list[tuple[Ints, Floats]], count: int) -> list[int]:
    """Return the samples that GreeDi's second round chooses, as positions among the chosen samples of all shards."""
    candidates = np.concatenate([features for _, features in shards])
    held = max(1, MOST // len(candidates))
    if len(members) > held:
        members = np.sort(np.random.default_rng(len(members)).permutation(members)[:held])
    distance = distances(_checked(features_of(members), len(members)), candidates)
    options = [lazy_greedy(distance, count)]
    start = 0
    for _, features in shards:
        if len(features) == count:
            options.append(list(range(start, start + count)))
        start += len(features)
    return min(options, key=lambda chosen: cost(distance, chosen))


def _nearest(
    mine: list[tuple[int, Ints]], rows: list[Floats], final: dict[int, tuple[Ints, Floats]], samples: int
) -> Floats:
    """Return a count for each sample of the dataset, [samples]. A chosen sample's count is the number of this rank's
    samples that have it as the nearest one; other counts are 0."""
    counts = np.zeros(samples)
    for (kind, _), features in zip(mine, rows, strict=True):
        indices, theirs = final[kind]
        np.add.at(counts, indices[distances(features, theirs).argmin(1)], 1.0)
    return counts


def _checked(features: Floats, samples: int) -> Floats:
    found = np.asarray(features, dtype=np.float64).reshape(len(features), -1)
    if len(found) != samples:
        raise ValueError(f"coreset: {len(found)} rows of features for {samples} samples; give a row for each")
    if not np.isfinite(found).all():
        raise ValueError("coreset: features are not finite numbers, so no distance can be measured")
    return found

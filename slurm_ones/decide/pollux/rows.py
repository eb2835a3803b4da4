"""Allocation matrices kept sparse: of every row (a job's GPUs on each node) only the nodes it uses.

K candidates of J jobs make K · J rows; row k · J + j is job j's in candidate k. A cluster of N nodes has so few of the
J · N elements in use that a generation costs as many steps as the cluster has GPUs, not GPUs × jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slurm_ones.schedule.policy import Ints

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


@dataclass(frozen=True)
class Rows:
    """R rows of E elements in all, nodes ascending within a row."""

    starts: Ints
    """(R + 1,) where each row's elements begin."""
    node: Ints
    """(E,)"""
    gpus: Ints
    """(E,) above 0."""

    @cached_property
    def counts(self) -> Ints:
        """(R,) nodes that each row uses."""
        return self.starts[1:] - self.starts[:-1]

    @cached_property
    def row(self) -> Ints:
        """(E,) the row of each element."""
        return np.repeat(np.arange(len(self.starts) - 1), self.counts)

    @cached_property
    def totals(self) -> Ints:
        """(R,) GPUs of each row."""
        sums = running_sum(self.gpus)[self.starts]
        return sums[1:] - sums[:-1]

    def take(self, rows: Ints) -> Rows:
        """The given rows, in that order."""
        counts = self.counts[rows]
        starts = running_sum(counts)
        at = np.repeat(self.starts[rows] - starts[:-1], counts) + np.arange(starts[-1])
        return Rows(starts, self.node[at], self.gpus[at])

    def over(self, other: Rows) -> Rows:
        """These rows, then the other's."""
        return Rows(
            np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]),
            np.concatenate([self.node, other.node]),
            np.concatenate([self.gpus, other.gpus]),
        )

    def among(self, place: Ints, row: Ints, node: Ints, gpus: Ints) -> Rows:
        """These and further elements (F,), ascending by row and node, each before the element at its `place`."""
        new = place + np.arange(len(place))
        old = np.ones(len(self.node) + len(place), dtype=np.bool_)
        old[new] = False
        nodes, amounts = np.empty(len(old), dtype=np.int64), np.empty(len(old), dtype=np.int64)
        nodes[new], amounts[new] = node, gpus
        nodes[old], amounts[old] = self.node, self.gpus
        return Rows(self.starts + running_sum(np.bincount(row, minlength=len(self.starts) - 1)), nodes, amounts)

    def holding(self, gpus: Ints) -> Rows:
        """The same elements with other GPUs (E,); those of 0 are gone."""
        kept = gpus > 0
        if kept.all():
            return Rows(self.starts, self.node, gpus)
        return Rows(running_sum(kept)[self.starts], self.node[kept], gpus[kept])

    @cached_property
    def digest(self) -> npt.NDArray[np.uint64]:
        """(R,) a number for each row, equal for equal rows and for practically no others."""
        mixed = (self.node.astype(np.uint64) << np.uint64(24)) + self.gpus.astype(np.uint64)
        for factor in _MIX:
            mixed = (mixed ^ (mixed >> np.uint64(29))) * factor
        sums = np.zeros(len(mixed) + 1, dtype=np.uint64)
        np.cumsum(mixed, out=sums[1:])
        sums = sums[self.starts]
        return sums[1:] - sums[:-1]


def running_sum(values: npt.NDArray[np.integer[Any] | np.bool_]) -> Ints:
    """(V + 1,) the sum of all values before each place."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def make_rows(count: int, row: Ints, node: Ints, gpus: Ints) -> Rows:
    """`count` rows from elements in any order, no two at one place."""
    width = int(node.max(initial=0)) + 1
    order = np.argsort(row * width + node)
    starts = running_sum(np.bincount(row, minlength=count))
    return Rows(starts, node[order], gpus[order]).holding(gpus[order])


def within(group: Ints, gpus: Ints, limit: Ints) -> Ints:
    """(E,) what is left of the GPUs when each group takes no more than its `limit`, first come first served.

    Elements of one group lie side by side; `limit` is per element.
    """
    if not len(group):
        return gpus
    before = np.cumsum(gpus) - gpus
    later = np.where(group[1:] != group[:-1], before[1:], 0)
    before[1:] -= np.maximum.accumulate(later)
    return np.minimum(np.maximum(limit - before, 0), gpus)

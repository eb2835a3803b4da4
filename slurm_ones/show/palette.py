"""Colours of jobs, users and partitions in pictures. Neighbours differ even in grey and to colour-blind readers.

The style sheet has a set of colours for light pages and one for dark pages. Any two colours of a set differ for
colour-blind readers too (CIEDE2000 of 15 or more). `APART` lists which colours also differ in grey, and so may touch.
If there is no such colour left, neighbours get different patterns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K", bound=Hashable)

APART: tuple[frozenset[int], ...] = tuple(
    map(frozenset, ((3, 4, 5, 7), (2, 3, 4, 6), (1, 3, 4, 5, 7), (0, 1, 2, 5, 7), (0, 1, 2, 5, 6, 7), (0, 2, 3, 4, 6),
                    (1, 4, 5, 7), (0, 2, 3, 4, 6)))
)  # fmt: skip
"""Colours that may touch each colour, as indexes."""
COLOURS = len(APART)
_ALIKE = np.array([[one not in apart for one in range(COLOURS)] for apart in APART])
PATTERNS = 3
"""Number of patterns: plain, and two for neighbours with similar colours."""


def chosen(spans: Iterable[tuple[K, float, float]], before: Mapping[K, int]) -> dict[K, int]:
    """Choose a colour for each (key, start, end) of a stacked chart. Keys in `before` keep their colour.

    Spans are stacked in this order. A new key gets a colour that no key in the stack has, preferably one that may touch
    the span below it. If the stack has all colours, the key gets the one farthest below that may touch the span just
    below.
    """
    listed = list(spans)
    found = {key: before[key] for key, _, _ in listed if key in before}
    if len(found) == len(listed):
        return found
    used = Counter(found.values())
    there: list[tuple[float, int]] = []
    for key, start, end in listed:
        there = [one for one in there if one[0] > start]
        if key not in found:
            found[key] = _free([colour for _, colour in there], used)
            used[found[key]] += 1
        there.append((end, found[key]))
    return found


def whole(periods: Iterable[tuple[K, float, float]]) -> list[tuple[K, float, float]]:
    """Return (key, first start, last end) for each key in `periods`, in the order of the starts."""
    spans: dict[K, tuple[float, float]] = {}
    for key, start, end in periods:
        first, last = spans.get(key, (start, end))
        spans[key] = (min(first, start), max(last, end))
    return [(key, *span) for key, span in sorted(spans.items(), key=lambda item: item[1][0])]


def _free(below: Sequence[int], used: Counter[int]) -> int:
    newest = {colour: at for at, colour in enumerate(below)}
    free = frozenset(range(COLOURS)) - newest.keys()
    apart = APART[below[-1]] if below else free
    return min(apart & free or free or apart, key=lambda colour: (newest.get(colour, -1), used[colour], colour))


def patterns(colours: Sequence[int], holding: npt.NDArray[np.float64]) -> list[int]:
    """Choose a pattern for each of J rows of a stacked chart, so that rows that touch look different.

    `holding` is (J, M): the height of each row at each moment. Most rows have pattern 0, which is plain.
    """
    alike: dict[int, set[int]] = {}
    """Rows below each row that touch it and have a similar colour."""
    colour = np.array(colours, dtype=np.intp)
    for column in holding.T:
        rows = np.flatnonzero(column)
        low, high = rows[:-1], rows[1:]
        same = _ALIKE[colour[low], colour[high]]
        for j, k in zip(high[same].tolist(), low[same].tolist(), strict=True):
            alike.setdefault(j, set()).add(k)
    found = [0] * len(colours)
    for j in sorted(alike):
        taken = {found[k] for k in alike[j]}
        found[j] = next((pattern for pattern in range(PATTERNS) if pattern not in taken), 0)
    return found

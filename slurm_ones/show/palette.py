"""Colours of jobs, users and partitions in pictures: neighbours can be distinguished by everybody, and in grey.

The colours themselves are in the style sheet, one set for light pages and one for dark ones. Any two of a set differ,
also for people without red or green cones (CIEDE2000, 15 or more). Those of `APART` differ in grey too, so that they
may touch. Where all others are taken, two that touch have different patterns.
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
"""Colours that each colour may touch."""
COLOURS = len(APART)
_ALIKE = np.array([[one not in apart for one in range(COLOURS)] for apart in APART])
PATTERNS = 3
"""Plain, and two more for neighbours that no colours are left for."""


def chosen(spans: Iterable[tuple[K, float, float]], before: Mapping[K, int]) -> dict[K, int]:
    """A colour for each thing that is drawn from `start` to `end`: what it had `before`, else one that fits.

    The spans come in the order in which they are stacked. A new one gets a colour that may lie on the one below it. Of
    these it is one that is far below or nowhere as it begins, and least used.
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


def _free(below: Sequence[int], used: Counter[int]) -> int:
    """The colour for what is stacked on these: one that may touch the last of them, and is far below or nowhere."""
    allowed = APART[below[-1]] if below else range(COLOURS)
    newest = {colour: at for at, colour in enumerate(below)}
    return min(allowed, key=lambda colour: (newest.get(colour, -1), used[colour], colour))


def patterns(colours: Sequence[int], holding: npt.NDArray[np.float64]) -> list[int]:
    """A pattern for each row of a stack ((J, M): what it holds at each moment), so that none looks like one it touches.

    It is 0 (plain) for all whose colours differ enough.
    """
    alike: dict[int, set[int]] = {}
    """Rows below each row that it touches and looks like."""
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

"""Attention of one block of queries with one block of keys: the piece that every arrangement in a ring is made of.

A block's result is the pair (output, logsumexp), and two such pairs make one: Milakov and Gimelshein, 1805.02867;
Liu, Zaharia and Abbeel, Ring Attention, 2310.01889.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

SCORES = 1 << 22
"""Scores that are in memory at once, unless a single row of queries has more."""


@dataclass(frozen=True)
class Dropout:
    """Choice of the scores that are dropped: a function of the key and of their place in the whole sequences.

    So a mask is the same however the sequences are split over ranks, and again in the backward pass.
    """

    rate: float
    key: int
    """A number of 64 bits, another one in each call."""
    length: int
    """Tokens of a whole sequence."""


@dataclass(frozen=True)
class Place:
    """Place of a block's queries and keys, and what hides keys from queries."""

    rows: torch.Tensor
    """Positions of the queries in the whole sequence, (queries,)."""
    columns: torch.Tensor
    """Positions of the keys, (keys,)."""
    scale: float
    """Factor of the scores."""
    triangular: bool = False
    """True if a query sees only keys at its own position and before. Of a whole block: its queries and keys are then of
    the same tokens, in rising order."""
    real: torch.Tensor | None = None
    """Keys that are no padding, (batch, keys); None: all."""
    dropout: Dropout | None = None

    def hidden(self) -> torch.Tensor | None:
        """Return the mask of scores that do not count, to broadcast over (batch, heads, queries, keys); None if all
        count."""
        hidden = self.rows[:, None] < self.columns if self.triangular else None
        if self.real is not None:
            padding = ~self.real[:, None, None, :]
            hidden = padding if hidden is None else hidden | padding
        return hidden

    def factors(self, p: torch.Tensor) -> torch.Tensor | None:
        """Factors of dropout for the probabilities `p`, (batch, heads, queries, keys); None: nothing."""
        if self.dropout is None:
            return None
        batch, heads = p.shape[:2]
        rate, length = self.dropout.rate, self.dropout.length
        each = torch.arange(batch * heads, device=self.rows.device).view(batch, heads, 1, 1)
        kept = uniform((each * length + self.rows[:, None]) * length + self.columns, self.dropout.key) >= rate
        return kept.to(p.dtype) / (1 - rate)

    def slice(self, start: int, stop: int, seen: int) -> Place:
        """Place of these queries and the first keys."""
        real = None if self.real is None else self.real[:, :seen]
        return replace(self, rows=self.rows[start:stop], columns=self.columns[:seen], real=real)


class Above(NamedTuple):
    """Values of whole rows of queries that a block's backward pass needs, in `precise` type."""

    gradient: torch.Tensor
    """Gradient of the output, (batch, heads, queries, width)."""
    total: torch.Tensor
    """The logsumexp over all blocks, (batch, heads, queries)."""
    delta: torch.Tensor
    """The sum of gradient times output over the width, (batch, heads, queries)."""

    def rows(self, which: slice) -> Above:
        """Return the values of some queries."""
        return Above(*(one[:, :, which] for one in self))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (batch, heads, queries, width) and logsumexp of the scores (batch, heads, queries), in `precise` type.

    A query that sees no key of this block gets the output 0 and the logsumexp -inf.
    """
    outputs, sums = [], []
    k, v = precise(k), precise(v)
    for start, stop, seen in _chunks(q, k, place):
        part = place.slice(start, stop, seen)
        scores = _scores(precise(q[:, :, start:stop]), k[:, :, :seen], part)
        total = torch.logsumexp(scores, -1)
        p = scores.sub_(finite(total)[..., None]).exp_()
        if (factors := part.factors(p)) is not None:
            p = p * factors
        outputs.append(p @ v[:, :, :seen])
        sums.append(total)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place, above: Above
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parts of the gradients of q, k and v from the block, in `precise` type."""
    k, v = precise(k), precise(v)
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for start, stop, seen in _chunks(q, k, place):
        part, keys = place.slice(start, stop, seen), k[:, :, :seen]
        queries, (gradient, total, delta) = precise(q[:, :, start:stop]), above.rows(slice(start, stop))
        p = _scores(queries, keys, part).sub_(finite(total)[..., None]).exp_()
        dp = gradient @ v[:, :, :seen].mT
        if (factors := part.factors(p)) is None:
            dv[:, :, :seen] += p.mT @ gradient
        else:
            dv[:, :, :seen] += (p * factors).mT @ gradient
            dp *= factors
        ds = dp.sub_(delta[..., None]).mul_(p).mul_(place.scale)
        dq.append(ds @ keys)
        dk[:, :, :seen] += ds.mT @ queries
    return torch.cat(dq, 2), dk, dv


def merge(output: torch.Tensor, total: torch.Tensor, more: torch.Tensor, its_total: torch.Tensor) -> None:
    """Add another block's pair to the first one, in place."""
    both = torch.logaddexp(total, its_total)
    shift = finite(both)
    output.mul_((total - shift).exp_()[..., None]).add_(more * (its_total - shift).exp_()[..., None])
    total.copy_(both)


def finite(total: torch.Tensor) -> torch.Tensor:
    """Return the logsumexp with 0 in place of -inf, so that hidden scores weigh 0 and not NaN."""
    return total.masked_fill(total == -torch.inf, 0.0)


def precise(x: torch.Tensor) -> torch.Tensor:
    """The tensor in at least single precision."""
    return x if x.dtype == torch.float64 else x.float()


_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


def uniform(places: torch.Tensor, key: int) -> torch.Tensor:
    """Random numbers from 0 to 1 (exclusive), each a function only of its place and of the key.

    `places` are int64. The mixing is that of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    x = places * _STEP + key  # wraps around, as is meant
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    x = x ^ (x >> 31 & (1 << 33) - 1)
    return (x >> 40 & (1 << 24) - 1).float() * 2.0**-24


def _scores(q: torch.Tensor, k: torch.Tensor, place: Place) -> torch.Tensor:
    scores = (q @ k.mT).mul_(place.scale)
    hidden = place.hidden()
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _chunks(q: torch.Tensor, k: torch.Tensor, place: Place) -> Iterator[tuple[int, int, int]]:
    """Ranges of queries whose scores fit, and how many of the keys they may see."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    rows = max(1, SCORES // max(1, batch * heads * keys))
    for start in range(0, queries, rows):
        stop = min(queries, start + rows)
        yield start, stop, stop if place.triangular else keys

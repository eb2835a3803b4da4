"""Attention of one block of queries to one block of keys: the unit of all attention in a ring.

The result of a block is the pair (output, logsumexp), and two pairs can be merged into one: Milakov and Gimelshein,
1805.02867; Liu, Zaharia and Abbeel, Ring Attention, 2310.01889.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

SCORES = 1 << 22
"""Largest number of scores in memory at once, unless a single query's scores are more."""


@dataclass(frozen=True)
class Dropout:
    """Rule that selects the scores to drop, by `key` and their positions in the whole sequences. So a mask is the same
    in forward and backward pass, and for every split over ranks."""

    rate: float
    key: int
    """Random 64-bit number, different in each call of attention."""
    length: int
    """Number of tokens in a whole sequence."""


@dataclass(frozen=True)
class Place:
    """Positions of a block's queries and keys in the whole sequence, and masks that hide keys from queries."""

    rows: torch.Tensor
    """Positions of the queries in the whole sequence, (queries,)."""
    columns: torch.Tensor
    """Positions of the keys in the whole sequence, (keys,)."""
    scale: float
    triangular: bool = False
    """True if a query attends only to keys at its own and earlier positions. Queries and keys of the block are then the
    same tokens, in ascending order."""
    real: torch.Tensor | None = None
    """Mask (batch, keys) that is False for padding; None if there is no padding."""
    dropout: Dropout | None = None

    def hidden(self) -> torch.Tensor | None:
        """Return a mask that is True for hidden scores, to broadcast over (batch, heads, queries, keys); None if no
        score is hidden."""
        hidden = self.rows[:, None] < self.columns if self.triangular else None
        if self.real is not None:
            padding = ~self.real[:, None, None, :]
            hidden = padding if hidden is None else hidden | padding
        return hidden

    def factors(self, p: torch.Tensor) -> torch.Tensor | None:
        """Return the factors, (batch, heads, queries, keys), by which dropout multiplies the probabilities `p`; None
        without dropout."""
        if self.dropout is None:
            return None
        batch, heads = p.shape[:2]
        rate, length = self.dropout.rate, self.dropout.length
        each = torch.arange(batch * heads, device=self.rows.device).view(batch, heads, 1, 1)
        kept = uniform((each * length + self.rows[:, None]) * length + self.columns, self.dropout.key) >= rate
        return kept.to(p.dtype) / (1 - rate)

    def slice(self, start: int, stop: int, seen: int) -> Place:
        """Return the place of queries `start` to `stop` and the first `seen` keys."""
        real = None if self.real is None else self.real[:, :seen]
        return replace(self, rows=self.rows[start:stop], columns=self.columns[:seen], real=real)


class Above(NamedTuple):
    """Results over all keys for a block of queries, which the backward pass needs, in the type of `precise`."""

    gradient: torch.Tensor
    """Gradient of the output, (batch, heads, queries, width)."""
    total: torch.Tensor
    """Logsumexp over all keys, (batch, heads, queries)."""
    delta: torch.Tensor
    """Sum of gradient times output over the width, (batch, heads, queries)."""

    def rows(self, which: slice) -> Above:
        """Return the values for some of the queries."""
        return Above(*(one[:, :, which] for one in self))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (batch, heads, queries, width) and the logsumexp of the scores (batch, heads, queries), in the
    type of `precise`. A query that sees no keys of this block has output 0 and logsumexp -inf."""
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
    """Return this block's contributions to the gradients of q, k and v, in the type of `precise`."""
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
    """Merge another block's pair (`more`, `its_total`) into the pair (`output`, `total`), in place."""
    both = torch.logaddexp(total, its_total)
    shift = finite(both)
    output.mul_((total - shift).exp_()[..., None]).add_(more * (its_total - shift).exp_()[..., None])
    total.copy_(both)


def finite(total: torch.Tensor) -> torch.Tensor:
    """Return the logsumexp with 0 in place of -inf, so that hidden scores get the weight 0 and not NaN."""
    return total.masked_fill(total == -torch.inf, 0.0)


def precise(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in single precision, or in double precision if it is double."""
    return x if x.dtype == torch.float64 else x.float()


_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


def uniform(places: torch.Tensor, key: int) -> torch.Tensor:
    """Return random numbers in [0, 1), each determined by its value in `places` (int64) and the key. The mixing
    function is that of SplitMix64 (Steele, Lea and Flood, 2014)."""
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
    """Yield (first query, end, number of keys seen) for ranges of queries whose scores fit into memory (`SCORES`)."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    rows = max(1, SCORES // max(1, batch * heads * keys))
    for start in range(0, queries, rows):
        stop = min(queries, start + rows)
        yield start, stop, stop if place.triangular else keys

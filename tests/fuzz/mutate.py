"""Inputs that nobody wrote in good faith: sound ones changed in structure or bytes, and some never sound at all."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

LONGEST = 65_536
"""Bytes of an input."""

_RAW = "@raw%d@"
RAW = (
    b"[" * 3_000,
    b'{"a":' * 3_000,
    b"[" * 2_000 + b"]" * 2_000,
    b"9" * 5_000,
    b"-" + b"1" * 4_290,
    b"1e999",
    b"-1e-999",
    b"NaN",
    b"-Infinity",
    b"0x10",
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\xed\xa0\x80"',
    b'"\xff\xfe"',
    b'"\x00"',
    b"null,null",
    b"",
)
"""What JSON's own writer does not write."""

TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\x1b]0;owned\x07\x1b[2J",
    "\x9b31m",
    "\u202egpj.exe\u2066\u200b\ufeff",
    "\u2028\u2029\x85",
    "\ud800",
    "\udcff",
    "line\nline\r\n\tline",
    "[red]x[/red][/]",
    "<script>alert(1)</script>\"'&",
    "'; DROP TABLE jobs; --",
    '"); DELETE FROM jobs; --',
    "%s%n{0}{x!r}$\\frac{",
    "../../../../etc/shadow",
    "/proc/self/mem",
    "-rf",
    "²³٣𝟗",
    "1e5",
    "NaN",
    "true",
    "ones: gpus=1-16 batch=32-1024",
    "n[1-99999][1-99999]",
    "n[01-0]",
    "gres/gpu:a100=99999999999999999999",
    "=HYPERLINK(1)",
    "e\u0301" * 50,
    "x" * 1_001,
    "x" * 9_000,
    "a," * 4_000,
    "[" * 2_000,
)
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 127, 255, 65_536, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    -(2**63) - 1, 10**30, 10**308, 10**400, -(10**400), 0.5, -0.0, 5e-324, 1e308, -1e308, 1e19, float("nan"),
    float("inf"), float("-inf"),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, {"set": True}, {"number": []})
TOKENS = (
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
    b"\xff", b"\x80\x80", b"\xc0\xaf", b"\xef\xbb\xbf", b"\xf4\x90\x80\x80", b"\x00\x00", b"\n", b"\r", b"\n\n", b'"',
    b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":", b"=", b"|", b"#", b"-", b"..", b"9" * 400, b"1e400", b" " * 300,
    b"\n" * 2_000, b"{}\n" * 500, b"\x1b[8m", b"$(id)", b"`id`",
)  # fmt: skip

Rng = random.Random
Make = Callable[[Rng], bytes]


def nasty(rng: Rng) -> Any:
    """A value that some reader somewhere did not think of."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(NUMBERS)
    if kind < 0.7:
        return rng.choice(TEXTS)
    if kind < 0.85:
        return copy.deepcopy(rng.choice(OTHERS))
    if kind < 0.9:
        return rng.getrandbits(rng.choice((8, 16, 32, 60, 200)))
    return _RAW % rng.randrange(len(RAW))


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return found
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


def changed(value: Any, rng: Rng) -> Any:
    """A JSON value with some of its parts replaced, removed, renamed, exchanged, repeated or wrapped."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        places = _places(value, [])
        if not places:
            return nasty(rng)
        holder, key = rng.choice(places)
        what = rng.random()
        if what < 0.55:
            holder[key] = nasty(rng)
        elif what < 0.7:
            del holder[key]
        elif what < 0.8:
            other, theirs = rng.choice(places)
            # Of a container in itself there is no JSON.
            holder[key] = copy.deepcopy(other[theirs])
        elif what < 0.9:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"number": holder[key], "set": True}
        elif isinstance(holder, dict):
            holder[str(rng.choice(TEXTS))] = nasty(rng)
        else:
            holder *= rng.choice((2, 5))
    return nasty(rng) if rng.random() < 0.01 else value


def written(value: Any, rng: Rng) -> bytes:
    """A JSON value in bytes, what JSON cannot say included."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=(",", ":") if rng.random() < 0.5 else None)
    found = text.encode("utf-8", "surrogatepass")
    if b"@raw" in found:
        for i, raw in enumerate(RAW):
            found = found.replace(b'"%b"' % (_RAW % i).encode(), raw)
    return found


def damaged(data: bytes, rng: Rng, others: Sequence[bytes] = ()) -> bytes:
    """Bytes with some flipped, cut, repeated, moved, spliced or put in between."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 10))):
        size = len(found)
        at = rng.randrange(size + 1)
        end = min(size, at + rng.choice((1, 2, 4, 16, 200)))
        what = rng.randrange(8)
        if what == 0 and size:
            found[at % size] ^= 1 << rng.randrange(8)
        elif what == 1:
            del found[at:end]
        elif what == 2:
            found[at:at] = rng.choice(TOKENS)
        elif what == 3:
            found[at:end] = rng.choice(TOKENS)
        elif what == 4:
            found[at:at] = found[at:end] * rng.choice((1, 2, 50))
        elif what == 5 and rng.random() < 0.3:
            del found[at:]
        elif what == 6 and others:
            other = rng.choice(others)
            cut = rng.randrange(len(other) + 1)
            found[at:] = other[cut:]
        elif what == 7:
            found[at:at] = rng.randbytes(rng.choice((1, 3, 16)))
    return bytes(found[:LONGEST])


def of_json(seeds: Sequence[Any]) -> Make:
    """Inputs from sound JSON values."""
    texts = [json.dumps(seed).encode() for seed in seeds]

    def make(rng: Rng) -> bytes:
        kind = rng.random()
        if kind < 0.03:
            return rng.randbytes(rng.randrange(300))
        if kind < 0.3:
            return damaged(rng.choice(texts), rng, texts)
        found = written(changed(rng.choice(seeds), rng), rng)
        return damaged(found, rng, texts) if kind > 0.9 else found[:LONGEST]

    return make


def of_text(seeds: Sequence[bytes]) -> Make:

    def make(rng: Rng) -> bytes:
        return rng.randbytes(rng.randrange(300)) if rng.random() < 0.05 else damaged(rng.choice(seeds), rng, seeds)

    return make


def of_lines(make: Make, good: Sequence[bytes]) -> Make:
    """Files of several lines, good ones among the bad."""

    def lines(rng: Rng) -> bytes:
        found = [rng.choice(good) if rng.random() < 0.4 else make(rng) for _ in range(rng.choice((1, 2, 3, 6)))]
        return rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"")).join(found)[: LONGEST - 1] + rng.choice((b"\n", b""))

    return lines

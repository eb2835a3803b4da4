"""Slurm's compressed lists of hosts, expanded without calling `scontrol`."""

from __future__ import annotations

import re

_PART = re.compile(r"([^\[\],]*)(?:\[([0-9,\-]*)\])?")


def _split(text: str) -> list[str]:
    """`text` cut at the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"host list {text!r}: brackets do not match")
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"host list {text!r}: brackets do not match")
    return [*parts, text[start:]]


def _numbers(text: str, ranges: str) -> list[str]:
    """The members of `1,03-05` with their leading zeros."""
    found = []
    for piece in ranges.split(","):
        low, dash, high = piece.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"host list {text!r}: {piece!r} is neither a number nor a range")
        last = high if dash else low
        if int(last) - int(low) > 100_000:
            raise ValueError(f"host list {text!r}: {piece!r} is too long")
        found += [str(n).zfill(len(low)) for n in range(int(low), int(last) + 1)]
    return found


def expand(text: str) -> list[str]:
    """Host names of a list such as `n[1-3,5],gpu07` or `r[1-2]n[01-02]`, in Slurm's order.

    Raises ValueError, naming the part that is no host list.
    """
    hosts: list[str] = []
    for part in _split(text.strip()):
        names = [""]
        position = 0
        while position < len(part):
            match = _PART.match(part, position)
            if match is None or match.end() == position:
                raise ValueError(f"host list {text!r}: {part[position:]!r} is not understood")
            numbers = [""] if match[2] is None else _numbers(text, match[2])
            names = [name + match[1] + number for name in names for number in numbers]
            position = match.end()
        if names == [""]:
            raise ValueError(f"host list {text!r}: an empty name")
        hosts += names
    return hosts

"""Slurm's compressed lists of hosts, expanded without calling `scontrol`."""

from __future__ import annotations

import re

MOST = 100_000
"""Largest number of hosts in a list; no cluster has as many."""
LONGEST = 1 << 20
"""Largest number of characters of a list."""
LONGEST_NAME = 255
"""Largest number of characters of a host's name."""

_PART = re.compile(r"([^\[\],]*)(?:\[([0-9,\-]*)\])?")
_NUMBER = re.compile(r"[0-9]{1,18}")


def _split(text: str) -> list[str]:
    """Cut `text` at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"host list {text!r:.80}: brackets do not match")
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"host list {text!r:.80}: brackets do not match")
    return [*parts, text[start:]]


def _numbers(text: str, ranges: str) -> list[str]:
    """Expand ranges such as `1,03-05` to numbers with their leading zeros. `text` is the whole list, for errors."""
    found: list[str] = []
    for piece in ranges.split(","):
        low, dash, high = piece.partition("-")
        last = high if dash else low
        if not _NUMBER.fullmatch(low) or not _NUMBER.fullmatch(last):
            raise ValueError(f"host list {text!r:.80}: {piece!r:.40} is neither a number nor a range")
        if not 0 <= int(last) - int(low) < MOST - len(found):
            raise ValueError(f"host list {text!r:.80}: {piece!r:.40} is empty, or too many")
        found += [str(n).zfill(len(low)) for n in range(int(low), int(last) + 1)]
    return found


def expand(text: str) -> list[str]:
    """Return the host names of a list such as `n[1-3,5],gpu07` or `r[1-2]n[01-02]`, in Slurm's order. Raises ValueError
    for a list with more than `MOST` hosts, or with a malformed part."""
    if len(text) > LONGEST:
        raise ValueError(f"host list {text[:80]!r}…: longer than {LONGEST} characters")
    hosts: list[str] = []
    for part in _split(text.strip()):
        names = [""]
        position = 0
        while position < len(part):
            match = _PART.match(part, position)
            if match is None or match.end() == position:
                raise ValueError(f"host list {text!r:.80}: {part[position:]!r:.40} is not understood")
            numbers = [""] if match[2] is None else _numbers(text, match[2])
            if len(names) * len(numbers) > MOST - len(hosts):
                raise ValueError(f"host list {text!r:.80}: more than {MOST} hosts")
            if max(map(len, names)) + len(match[1]) + max(map(len, numbers)) > LONGEST_NAME:
                raise ValueError(f"host list {text!r:.80}: a name of more than {LONGEST_NAME} characters")
            names = [name + match[1] + number for name in names for number in numbers]
            position = match.end()
        if names == [""]:
            raise ValueError(f"host list {text!r:.80}: an empty name")
        hosts += names
    return hosts

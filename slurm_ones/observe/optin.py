"""Opting in: what a job's comment says it can take.

``ones: gpus=1-16 batch=256-4096`` makes a job elastic; `nodes=` instead of `gpus=` counts whole nodes; `batch=N`
keeps the global batch; `resize=off` asks for measuring alone; `array=blocks` says that the tasks of this job array are
blocks of one job; `size=8` asks for 8 GPUs, by hand. A comment that does not start with ``ones:`` is nobody's business
but its owner's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_GPUS = 100_000
MAX_BATCH = 2**31

_PREFIX = re.compile(r"\s*ones:", re.IGNORECASE)
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


class BadComment(ValueError):
    """The comment opts in but cannot be understood; the message names the bad word."""


@dataclass(frozen=True)
class OptIn:
    """What the owner allows. Ranges are inclusive; None where the comment does not say."""

    gpus: tuple[int, int] | None
    nodes: tuple[int, int] | None
    batch: tuple[int, int] | None
    resize: bool = True
    blocks: bool = False
    """The tasks of its array are blocks of one job."""
    size: int | None = None
    """GPUs that the job shall have, as soon as there is room and for as long as the comment says so."""


def _range(word: str, text: str, most: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise BadComment(f"{word!r}: expected a number or a range such as 1-16")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if not 1 <= low <= high <= most:
        raise BadComment(f"{word!r}: expected 1 <= first <= last <= {most}")
    return low, high


def parse_comment(comment: str) -> OptIn | None:
    """The opt-in that a comment holds, None where it holds none.

    Raises `BadComment` naming the word that is wrong, given twice, or contradicts another.
    """
    match = _PREFIX.match(comment)
    if match is None:
        return None
    found: dict[str, tuple[int, int]] = {}
    resize: bool | None = None
    blocks = False
    for word in comment[match.end() :].replace(",", " ").split():
        shown = "".join(c if c.isprintable() else "?" for c in word[:40])
        key, _, value = word.partition("=")
        if key in found or (key == "resize" and resize is not None):
            raise BadComment(f"{shown!r}: {key} is given twice")
        if key in ("gpus", "nodes", "size"):
            found[key] = _range(shown, value, MAX_GPUS)
        elif key == "batch":
            found[key] = _range(shown, value, MAX_BATCH)
        elif key == "resize":
            if value not in ("on", "off"):
                raise BadComment(f"{shown!r}: expected resize=on or resize=off")
            resize = value == "on"
        elif key == "array":
            if value != "blocks":
                raise BadComment(f"{shown!r}: expected array=blocks")
            if blocks:
                raise BadComment(f"{shown!r}: array is given twice")
            blocks = True
        else:
            raise BadComment(f"{shown!r}: expected gpus=, nodes=, batch=, resize=, array= or size=")
    if "gpus" in found and "nodes" in found:
        raise BadComment("gpus= and nodes= contradict each other: give one of them")
    if not {"gpus", "nodes"} & found.keys() and resize is not False:
        raise BadComment("neither gpus= nor nodes=: say how far the job may grow, such as gpus=1-16")
    size = _size(found)
    return OptIn(found.get("gpus"), found.get("nodes"), found.get("batch"), resize is not False, blocks, size)


def _size(found: dict[str, tuple[int, int]]) -> int | None:
    if "size" not in found:
        return None
    low, high = found["size"]
    if low != high:
        raise BadComment(f"'size={low}-{high}': expected one number of GPUs such as size=8")
    least, most = found.get("gpus", (low, low))
    if not least <= low <= most:
        raise BadComment(f"'size={low}': not within gpus={least}-{most}")
    return low


def with_size(comment: str, size: int | None) -> str:
    """The comment of a job that opted in with this size asked for, or with none."""
    words = [word for word in comment.split() if not word.strip(",").startswith("size=")]
    return " ".join([*words, *([] if size is None else [f"size={size}"])])

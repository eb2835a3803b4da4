"""Opting in: what a job's comment says it can take.

``ones: gpus=1-16 batch=256-4096`` makes a job elastic; `gpus=4-16:4` allows 4, 8, 12 and 16 alone, as Slurm writes the
steps of an array; `nodes=` instead of `gpus=` counts whole nodes; `batch=N` keeps the global batch; `resize=off` asks
for measuring alone; `array=blocks` says that the tasks of this job array are blocks of one job; `size=8` asks for 8
GPUs, by hand; `fuse=NAME` says that jobs of this sweep may be trained as one; `deadline=2026-12-01T18:00`, local time,
or `deadline=6h`, since its submission, says by when it shall have ended; `kinds=a100,v100`, or `kinds=any`, lets it
have GPUs of these types of Slurm's, and change between them.

A comment that does not start with ``ones:`` opts in to nothing, not even where those words follow other text: what a
comment says about ones, or quotes, is not what its owner allows, and a guess would change somebody's job. One that
nearly opts in is told to its owner, with the right line.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from datetime import datetime

MAX_GPUS = 100_000
MAX_BATCH = 2**31
MOST_KINDS = 16
ANY = "any"
"""In place of types of GPU: every type."""
KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
"""What a type of GPU may be called here; Slurm allows more, which such jobs are not asked for."""

_PREFIX = re.compile(r"\s*ones:", re.IGNORECASE)
_NEARLY = re.compile(
    r"(?<![\w/.-])ones?\s*[^\w\s]?\s*(?:gpus|nodes|batch|resize|array)\s*[=:]|(?<![\w/.-])ones\s*[:;\uff1a\ufe55\ua789\u2236]\s*\Z",
    re.IGNORECASE,
)
"""What nobody writes who does not mean to opt in."""
_WORD = re.compile(r"\b(gpus|nodes|batch|resize|array)\s*[=:]\s*(\w+)(?:\s*[-–—]\s*(\d+)(:\d+)?)?", re.IGNORECASE)
_EXAMPLE = "ones: gpus=1-16 batch=32-1024"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", re.ASCII)
_SEPARATORS = re.compile(r"(?:\s|,(?=\s|,|\Z|[a-z]+=))+")
"""Between words: spaces, or a comma that is not between types of GPU."""
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


_DURATION = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,7})m)?(?:(\d{1,9})s)?", re.ASCII)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d(?:T\d\d:\d\d(?::\d\d)?)?", re.ASCII)


@dataclass(frozen=True)
class Deadline:
    """When a job shall have ended."""

    seconds: float
    """Unix seconds, or seconds since its submission."""
    since_submission: bool

    def after(self, submitted: float) -> float:
        """Unix seconds, for a job that was submitted then."""
        return submitted + self.seconds if self.since_submission else self.seconds


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
    fuse: str = ""
    """The sweep whose jobs may be trained as one; empty: none."""
    deadline: Deadline | None = None
    """When it shall have ended."""
    step: int = 1
    """Of the range of GPUs every so many-th number, from the first on: what a strategy can use that nobody knows
    before the job's first run."""
    kinds: tuple[str, ...] = ()
    """Types of GPU that the job may have, `any` alone for all; empty: what it asked sbatch for."""


def _stepped(word: str, text: str) -> tuple[tuple[int, int], int]:
    """A range of GPUs, and its step."""
    whole, colon, step = text.partition(":")
    low, high = _range(word, whole, MAX_GPUS)
    if not colon:
        return (low, high), 1
    if re.fullmatch(r"[1-9]\d{0,5}", step, re.ASCII) is None or int(step) > max(high - low, 1):
        raise BadComment(f"{word!r}: expected a step within the range, such as 4-16:4 for 4, 8, 12 and 16")
    return (low, high), int(step)


def _range(word: str, text: str, most: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise BadComment(f"{word!r}: expected a number or a range such as 1-16")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if not 1 <= low <= high <= most:
        raise BadComment(f"{word!r}: expected 1 <= first <= last <= {most}")
    return low, high


def _deadline(word: str, text: str) -> Deadline:
    match = _DURATION.fullmatch(text)
    if match is not None and text:
        factors = (86400.0, 3600.0, 60.0, 1.0)
        return Deadline(sum(int(n) * f for n, f in zip(match.groups(), factors, strict=True) if n), True)
    if _MOMENT.fullmatch(text):
        with contextlib.suppress(ValueError, OverflowError, OSError):
            return Deadline(datetime.fromisoformat(text).timestamp(), False)
    raise BadComment(f"{word!r}: expected a time such as deadline=2026-12-01T18:00, or since submission deadline=6h30m")


def _words(text: str) -> list[str]:
    if "kinds=" in text:
        return [word for word in _SEPARATORS.split(text) if word]
    return text.replace(",", " ").split()


def _kinds(word: str, text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if not all(map(KIND.fullmatch, kinds)) or len(kinds) > MOST_KINDS or (ANY in kinds and len(kinds) > 1):
        raise BadComment(f"{word!r}: expected types of GPU as Slurm names them, such as kinds=a100,v100, or kinds=any")
    return kinds


def meant(comment: str) -> str:
    """The comment that its words would make if they were written right; an example where they would make none."""
    found = {
        one[1].lower(): one[2] + (f"-{one[3]}{one[4] or ''}" if one[3] else "")
        for one in _WORD.finditer(comment[:1000])
    }
    line = "ones: " + " ".join(f"{key}={value}" for key, value in found.items())
    try:
        return line if len(line) < 80 and _parse(line) is not None else _EXAMPLE
    except BadComment:
        return _EXAMPLE


def near_miss(comment: str) -> str:
    """The line that the owner of a comment which does not opt in probably means; empty where nothing speaks for that.

    To be shown, never to be acted on.
    """
    if _PREFIX.match(comment) or not _NEARLY.search(comment[:1000]):
        return ""
    return meant(comment)


def parse_comment(comment: str) -> OptIn | None:
    """The opt-in that a comment holds, None where it holds none.

    Raises `BadComment` naming the word that is wrong, given twice, or contradicts another.
    """
    try:
        return _parse(comment)
    except BadComment as error:
        right = meant(comment)
        if right == _EXAMPLE or re.search(r"\s[=-]|[=-]\s", comment[:1000]) is None:
            raise
        raise BadComment(f"{error}; without spaces: {right}") from None


def _parse(comment: str) -> OptIn | None:
    match = _PREFIX.match(comment)
    if match is None:
        return None
    found: dict[str, tuple[int, int]] = {}
    resize: bool | None = None
    blocks, fuse, deadline, step = False, "", None, 1
    kinds: tuple[str, ...] = ()
    for word in _words(comment[match.end() :]):
        shown = word[:40]
        if not shown.isprintable():
            shown = "".join(c if c.isprintable() else "?" for c in shown)
        key, _, value = word.partition("=")
        if key in found or (key == "resize" and resize is not None):
            raise BadComment(f"{shown!r}: {key} is given twice")
        if key == "gpus":
            found[key], step = _stepped(shown, value)
        elif key in ("nodes", "size"):
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
        elif key == "fuse":
            if _NAME.fullmatch(value) is None:
                raise BadComment(f"{shown!r}: expected a name of letters, digits, dots and dashes such as fuse=sweep1")
            if fuse:
                raise BadComment(f"{shown!r}: fuse is given twice")
            fuse = value
        elif key == "deadline":
            if deadline is not None:
                raise BadComment(f"{shown!r}: deadline is given twice")
            deadline = _deadline(shown, value)
        elif key == "kinds":
            if kinds:
                raise BadComment(f"{shown!r}: kinds is given twice")
            kinds = _kinds(shown, value)
        else:
            known = "gpus=, nodes=, batch=, resize=, array=, size=, fuse=, deadline= or kinds="
            raise BadComment(f"{shown!r}: expected {known}")
    if "gpus" in found and "nodes" in found:
        raise BadComment("gpus= and nodes= contradict each other: give one of them")
    if not {"gpus", "nodes"} & found.keys() and resize is not False:
        raise BadComment("neither gpus= nor nodes=: say how far the job may grow, such as gpus=1-16")
    size = _size(found, step)
    ranges = found.get("gpus"), found.get("nodes"), found.get("batch")
    return OptIn(*ranges, resize is not False, blocks, size, fuse, deadline, step, kinds)


def _size(found: dict[str, tuple[int, int]], step: int) -> int | None:
    if "size" not in found:
        return None
    low, high = found["size"]
    if low != high:
        raise BadComment(f"'size={low}-{high}': expected one number of GPUs such as size=8")
    least, most = found.get("gpus", (low, low))
    if not least <= low <= most:
        raise BadComment(f"'size={low}': not within gpus={least}-{most}")
    if (low - least) % step:
        raise BadComment(f"'size={low}': not in steps of {step} from {least}, as gpus={least}-{most}:{step} says")
    return low


def with_size(comment: str, size: int | None) -> str:
    """The comment of a job that opted in with this size asked for, or with none."""
    words = [word for word in comment.split() if not word.strip(",").startswith("size=")]
    return " ".join([*words, *([] if size is None else [f"size={size}"])])

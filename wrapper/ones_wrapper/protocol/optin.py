"""Opt-in of a job by its comment, and the sizes and options that the comment allows.

``ones: gpus=1-16 batch=256-4096`` makes a job elastic. The words after ``ones:`` are:

- `gpus=1-16`: smallest and largest number of GPUs. `gpus=4-16:4` allows only 4, 8, 12 and 16, as in Slurm's `--array`.
- `nodes=1-4`: the same in whole nodes, in place of `gpus=`.
- `batch=256-4096`: range of the global batch. `batch=N` fixes it; `batch=N+-10%`, or `N±10%`, is a range around N.
- `resize=off`: the job is only measured.
- `array=blocks`: the tasks of this job array are blocks of one job.
- `size=8`: the owner asks for 8 GPUs by hand.
- `fuse=NAME`: jobs with the same name are a sweep, and may be trained as one.
- `deadline=2026-12-01T18:00` (local time), or `deadline=6h` (since submission): time by which the job is to end.
- `kinds=a100,v100`, or `kinds=any`: types of GPU, as Slurm names them, between which the job may change.
- `guests=off`: no block of the job enters a preemptible queue.
- `guests=partition:scavenge`, or `guests=qos:NAME`: the job itself moves its further blocks to that queue while no
  companion decides for it.
- `cost=1.5`: the job may use 1.5 times the GPU-hours of its size at submission, if the site charges growth.
- `notify=https://HOST/PATH`: the job's events are posted to this address, if the site allows the host.

A comment that does not start with ``ones:`` is no opt-in, even if the word comes later: such a comment may quote an
opt-in, and a wrong guess would change another user's job. A comment that is nearly an opt-in is shown to its owner with
the correct line.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from ones_wrapper.protocol.choices import near

MAX_GPUS = 100_000
MAX_BATCH = 2**31
MOST_KINDS = 16
ANY = "any"
"""Word for all types of GPU."""
KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
"""Pattern of the GPU types that a comment may name. Types with other characters, which Slurm allows, cannot be
named."""

_PREFIX = re.compile(r"\s*ones:", re.IGNORECASE)
_NEARLY = re.compile(
    r"(?<![\w/.-])ones?\s*(?:[^\w\s]\s*)?(?:gpus|nodes|batch|resize|array)\s*[=:]|(?<![\w/.-])ones\s*[:;\uff1a\ufe55\ua789\u2236]\s*\Z",
    re.IGNORECASE,
)
"""Pattern of a comment whose author probably meant to opt in."""
_WORD = re.compile(
    r"\b(gpus|nodes|batch|resize|array)\s*[=:]\s*(\w+)(?:\s*[-–—]\s*(\d+)(:\d+)?|\s*((?:\+-|±)\s*\d+\s*%))?",
    re.IGNORECASE,
)
_EXAMPLE = "ones: gpus=1-16 batch=32-1024"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", re.ASCII)
_SEPARATORS = re.compile(r"(?:\s|,(?=\s|,|\Z|[a-z]+=))+")
"""Pattern of the text between words: spaces, and commas except those between types of GPU."""
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)
_BAND = re.compile(r"(\d{1,12})(?:\+-|±)(\d{1,2})%", re.ASCII)
_STEP = re.compile(r"[1-9]\d{0,5}", re.ASCII)
_QUEUE = re.compile(r"(partition|qos):([A-Za-z0-9_.-]{1,64})", re.ASCII)
_COST = re.compile(r"(?!0+(?:\.|\Z))\d{1,3}(\.\d{1,3})?", re.ASCII)
_ADDRESS = re.compile(r"(?!.*/\.\.)https?://[A-Za-z0-9.-]{1,100}(:\d{1,5})?/[A-Za-z0-9_./~=&?+-]{0,300}", re.ASCII)
_DURATION = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,7})m)?(?:(\d{1,9})s)?", re.ASCII)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d(?:T\d\d:\d\d(?::\d\d)?)?", re.ASCII)

Range = tuple[int, int]
"""Smallest and largest number, both included."""


@dataclass(frozen=True)
class Deadline:
    """Time by which a job is to end."""

    seconds: float
    """Unix time in seconds, or seconds since the job's submission."""
    since_submission: bool

    def after(self, submitted: float) -> float:
        """Return the deadline as Unix time in seconds, for a job submitted at the Unix time `submitted`."""
        return submitted + self.seconds if self.since_submission else self.seconds


class GuestQueue(NamedTuple):
    """Queue for a job's further blocks, named by the job's owner. Only the owner's processes move jobs to it, because
    an operator may use queues that are closed to the owner."""

    kind: str
    """Either `partition` or `qos`."""
    name: str


class BadComment(ValueError):
    """Error of a comment that opts in but cannot be understood; the message names the wrong word."""


@dataclass(frozen=True)
class OptIn:
    """Sizes and options that a job's owner allows. Ranges include both ends, and are None if the comment has no such
    range."""

    gpus: Range | None
    nodes: Range | None
    batch: Range | None
    resize: bool = True
    blocks: bool = False
    """True if the tasks of the job's array are blocks of one job."""
    size: int | None = None
    """Number of GPUs that the owner requests by hand, until the comment changes; None without a request."""
    fuse: str = ""
    """Name of the sweep whose jobs may be trained as one; empty if none."""
    deadline: Deadline | None = None
    """Time by which the job is to end; None for no deadline."""
    step: int = 1
    """Step between allowed numbers of GPUs, counted from the smallest. It replaces a strategy's limits until the job's
    first run reports these."""
    kinds: tuple[str, ...] = ()
    """Types of GPU that the job may have, or `any` for all; empty for the type in the job's request."""
    guests: bool | GuestQueue = True
    """True if blocks beyond the job's request may enter a preemptible queue. A `GuestQueue` names the queue to which
    the job itself moves them while no companion decides."""
    cost: float | None = None
    """Largest allowed ratio of the job's GPU-hours to the GPU-hours at the requested size; None for the site's
    limit."""
    notify: str = ""
    """Address to which the job's events are posted, if the site allows its host; empty if the user gave no address."""


class _NotUnderstood(ValueError):
    """Error of a wrong value; its message says what was expected."""


def _range(text: str, most: int) -> Range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise _NotUnderstood("a number or a range such as 1-16")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 1 <= low <= high <= most:
        raise _NotUnderstood(f"1 <= first <= last <= {most}")
    return low, high


def _batch(text: str) -> Range:
    band = _BAND.fullmatch(text)
    if band is None:
        return _range(text, MAX_BATCH)
    middle, percent = _range(band[1], MAX_BATCH)[0], int(band[2])
    if percent > 50:
        raise _NotUnderstood("a band of at most 50 % such as batch=2880+-10%")
    return max(1, -(-middle * (100 - percent) // 100)), min(MAX_BATCH, middle * (100 + percent) // 100)


def _stepped(text: str) -> tuple[Range, int]:
    """Return (range, step) of a range of GPUs with an optional step, such as `4-16:4`."""
    whole, colon, step = text.partition(":")
    low, high = _range(whole, MAX_GPUS)
    if colon and (_STEP.fullmatch(step) is None or int(step) > max(high - low, 1)):
        raise _NotUnderstood("a step within the range, such as 4-16:4 for 4, 8, 12 and 16")
    return (low, high), int(step or 1)


def _size(text: str) -> int:
    low, high = _range(text, MAX_GPUS)
    if low != high:
        raise _NotUnderstood("one number of GPUs such as size=8")
    return low


def _one_of(key: str, **words: bool) -> Callable[[str], bool]:
    def read(text: str) -> bool:
        if text not in words:
            raise _NotUnderstood(" or ".join(f"{key}={word}" for word in words))
        return words[text]

    return read


def _like(pattern: re.Pattern[str], expected: str, make: Callable[[str], Any] = str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if pattern.fullmatch(text) is None:
            raise _NotUnderstood(expected)
        return make(text)

    return read


def _deadline(text: str) -> Deadline:
    match = _DURATION.fullmatch(text)
    if match is not None and text:
        factors = (86400.0, 3600.0, 60.0, 1.0)
        return Deadline(sum(int(n) * f for n, f in zip(match.groups(), factors, strict=True) if n), True)
    if _MOMENT.fullmatch(text):
        with contextlib.suppress(ValueError, OverflowError, OSError):
            return Deadline(datetime.fromisoformat(text).timestamp(), False)
    raise _NotUnderstood("a time such as deadline=2026-12-01T18:00, or since submission deadline=6h30m")


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if not all(map(KIND.fullmatch, kinds)) or len(kinds) > MOST_KINDS or (ANY in kinds and len(kinds) > 1):
        raise _NotUnderstood("types of GPU as Slurm names them, such as kinds=a100,v100, or kinds=any")
    return kinds


def _guests(text: str) -> bool | GuestQueue:
    if text in ("on", "off"):
        return text == "on"
    match = _QUEUE.fullmatch(text)
    if match is None:
        raise _NotUnderstood("guests=on, guests=off, or a queue such as guests=partition:scavenge or guests=qos:NAME")
    return GuestQueue(match[1], match[2])


_VALUES: dict[str, Callable[[str], Any]] = {
    "gpus": _stepped,
    "nodes": lambda text: _range(text, MAX_GPUS),
    "batch": _batch,
    "resize": _one_of("resize", on=True, off=False),
    "array": _one_of("array", blocks=True),
    "size": _size,
    "fuse": _like(_NAME, "a name of letters, digits, dots and dashes such as fuse=sweep1"),
    "deadline": _deadline,
    "kinds": _kinds,
    "guests": _guests,
    "cost": _like(_COST, "a factor of at least 1 such as cost=1.5", float),
    "notify": _like(_ADDRESS, "an address such as notify=https://hooks.example.org/services/T1/B2"),
}
"""Parsers of the values in a comment, by key."""


def meant(comment: str) -> str:
    """Return the opt-in that a malformed comment probably means, or else an example."""
    found = {
        one[1].lower(): one[2] + (f"-{one[3]}{one[4] or ''}" if one[3] else "".join((one[5] or "").split()))
        for one in _WORD.finditer(comment[:1000])
    }
    line = "ones: " + " ".join(f"{key}={value}" for key, value in found.items())
    try:
        return line if len(line) < 80 and _parse(line) is not None else _EXAMPLE
    except BadComment:
        return _EXAMPLE


def near_miss(comment: str) -> str:
    """Return the correct opt-in for a comment that is nearly one, for people to read; empty for any other comment."""
    return meant(comment) if not _PREFIX.match(comment) and _NEARLY.search(comment[:1000]) else ""


@lru_cache(maxsize=1024)
def parse_comment(comment: str) -> OptIn | None:
    """Return the opt-in in a job's comment; None if the comment does not opt in. Raises `BadComment` if a word is
    wrong, given twice, or contradicts another word."""
    try:
        return _parse(comment)
    except BadComment as error:
        right = meant(comment)
        if right == _EXAMPLE or re.search(r"\s[=-]|[=-]\s", comment[:1000]) is None:
            raise
        raise BadComment(f"{error}; without spaces: {right}") from None


def _words(text: str) -> list[str]:
    if "kinds=" in text:
        return [word for word in _SEPARATORS.split(text) if word]
    return text.replace(",", " ").split()


def _shown(word: str) -> str:
    return repr("".join(c if c.isprintable() else "?" for c in word[:40]))


def _parse(comment: str) -> OptIn | None:
    match = _PREFIX.match(comment)
    if match is None:
        return None
    found: dict[str, Any] = {}
    for word in _words(comment[match.end() :]):
        key, _, value = word.partition("=")
        try:
            if key in found:
                raise BadComment(f"{_shown(word)}: {key} is given twice")
            found[key] = _VALUES[key](value)
        except KeyError:
            *keys, last = (f"{known}=" for known in _VALUES)
            hint = near(f"{key}=", (*keys, last))
            raise BadComment(f"{_shown(word)}: expected {', '.join(keys)} or {last}{hint}") from None
        except _NotUnderstood as expected:
            raise BadComment(f"{_shown(word)}: expected {expected}") from None
    if {"gpus", "nodes"} <= found.keys():
        raise BadComment("gpus= and nodes= contradict each other: give one of them")
    if not {"gpus", "nodes"} & found.keys() and found.get("resize", True):
        raise BadComment("neither gpus= nor nodes=: say how far the job may grow, such as gpus=1-16")
    gpus, step = found.pop("gpus", (None, 1))
    if "size" in found:
        _check_size(found["size"], gpus, step)
    blocks = found.pop("array", False)
    return OptIn(gpus, found.pop("nodes", None), found.pop("batch", None), blocks=blocks, step=step, **found)


def _check_size(size: int, gpus: Range | None, step: int) -> None:
    least, most = gpus or (size, size)
    if not least <= size <= most:
        raise BadComment(f"'size={size}': not within gpus={least}-{most}")
    if (size - least) % step:
        raise BadComment(f"'size={size}': not in steps of {step} from {least}, as gpus={least}-{most}:{step} says")


def with_size(comment: str, size: int | None) -> str:
    """Return an opt-in comment whose `size=` is this number of GPUs; for None, return it without `size=`."""
    kept = re.sub(r"(?<![^\s,:])size=[^\s,]*,?", "", comment)
    return " ".join([*kept.split(), *([] if size is None else [f"size={size}"])])

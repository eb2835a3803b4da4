"""Times on the command line: one grammar for every option and parameter that means a moment or a length of time."""

from __future__ import annotations

import datetime
import math
import re
import time

from slurm_ones.simulate import BadInput
from slurm_ones.text import plain

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_LENGTH = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", re.ASCII)
_SECONDS = re.compile(r"\d{1,12}(?:\.\d{1,9})?", re.ASCII)
HELP = "a date, a date and time, how long ago (7d, 36h), or Unix seconds"


def length(text: str, what: str = "") -> float:
    """Seconds of a length of time such as 36h, 7d or 2w. Raises `BadInput`, which begins with `what`."""
    found = _LENGTH.fullmatch(text.strip())
    if found is None:
        raise _bad(text, what, "is no length of time: write a number and s, m, h, d or w, such as 7d")
    return float(found[1]) * UNITS[found[2]]


def moment(text: str, what: str = "", now: float | None = None) -> float:
    """Unix seconds of a date such as 2026-11-22 or 2026-11-22T18:00 (local time, unless it names a zone), of a length
    of time before `now`, or of a number of seconds. Raises `BadInput`, which begins with `what`."""
    word = text.strip()
    if _LENGTH.fullmatch(word):
        return (time.time() if now is None else now) - length(word)
    if _SECONDS.fullmatch(word):
        return float(word)
    try:
        # Before 3.11 Python does not know Z.
        found = datetime.datetime.fromisoformat(re.sub("Z$", "+00:00", word)).timestamp()
    except (ValueError, OverflowError, OSError):
        found = math.nan
    if not math.isfinite(found):
        raise _bad(
            text,
            what,
            "is no time: write a date such as 2026-11-22 or 2026-11-22T18:00, how long ago such as 7d, or Unix seconds",
        )
    return found


def _bad(text: str, what: str, why: str) -> BadInput:
    return BadInput(f"{what}: {plain(text, 40)!r} {why}" if what else f"{plain(text, 40)!r} {why}")

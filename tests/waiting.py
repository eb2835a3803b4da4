"""Waiting for what comes by itself."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")


def until(
    found: Callable[[], T | None], what: str | Callable[[], object] = "", within_s: float = 60.0, look_s: float = 0.02
) -> T:
    """What it returns, once that is something; else `what` says what did not come, or is asked at the end."""
    end = monotonic() + within_s
    while not (now := found()):
        assert monotonic() < end, f"not within {within_s:.0f} s: {what() if callable(what) else what}"
        sleep(look_s)
    return now

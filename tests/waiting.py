"""Waiting for what comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    found: Callable[[], T | None], what: str | Callable[[], object] = "", within_s: float = 60.0, look_s: float = 0.02
) -> T:
    """What it returns, once that is something; else `what` says what did not come, or is asked at the end."""
    end = time.monotonic() + within_s
    while not (now := found()):
        assert time.monotonic() < end, f"not within {within_s:.0f} s: {what() if callable(what) else what}"
        time.sleep(look_s)
    return now

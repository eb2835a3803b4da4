"""What is said of a job's deadline."""

from __future__ import annotations

import time

from ones_db import PromiseRecord


def deadline(said: PromiseRecord) -> str:
    """Its deadline, and whether it is promised: `deadline 2026-12-01 18:00: promised on …, since …`."""
    word = "promised" if said.given else "not promised"
    return f"deadline {_moment(said.deadline)}: {word} ({_moment(said.time)}): {said.reason}"


def open_deadline(at: float) -> str:
    """A deadline of which nothing was said."""
    return f"deadline {_moment(at)}: nothing is promised yet; its speed has to be known first, and by a policy that can"


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))

"""Time that ranks wait for each other, set by the user: one limit for steps and for collectives."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

HANG_S = 1800.0
"""Default of ONES_HANG_S in seconds: longer than an evaluation between two epochs should take."""
_FOR_EVER = timedelta(days=365)


def limit_s(env: Mapping[str, str]) -> float:
    """Seconds that a rank may take from one step boundary to the next; 0 for no limit."""
    try:
        seconds = float(env.get("ONES_HANG_S") or HANG_S)
    except ValueError:
        return HANG_S
    return min(seconds, _FOR_EVER.total_seconds()) if seconds >= 0 else HANG_S


def collective(env: Mapping[str, str]) -> timedelta:
    """Time that a collective may take: one rank's evaluation makes the others wait. NCCL's own limit of 10 minutes
    would abort such waits."""
    return timedelta(seconds=limit_s(env)) or _FOR_EVER

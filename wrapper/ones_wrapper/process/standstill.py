"""Detection of this process's pauses, which must not count as other processes' silence."""

from __future__ import annotations

import time


class Standstill:
    """Detects pauses of this process, whose node was paused or whose job Slurm suspended. Other processes were paused
    or unreachable too, so this time does not count as their silence."""

    MOST_S = 2.0
    """Seconds between two calls of `look` above which the process counts as paused."""
    COUNTS_S = 0.5
    """Seconds of each pause that count nevertheless, so that a process that is always late still finds silent ones."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def look(self) -> float:
        """Return the seconds since the last call that do not count, if the process was paused; else 0. Call this
        several times a second."""
        last, self._last = self._last, time.monotonic()
        between = self._last - last
        return between - self.COUNTS_S if between > self.MOST_S else 0.0

"""Detection of pauses of this process, which must not count as silence of others."""

from __future__ import annotations

import time


class Standstill:
    """Detects that this process was paused: its node was, or Slurm had suspended the job. Others were paused too, or
    unreachable, so that time does not count as their silence."""

    MOST_S = 2.0
    """Seconds between two looks above which the process was paused."""
    COUNTS_S = 0.5
    """Seconds of each pause that count nevertheless, so that a process that is always late still finds silent ones."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def look(self) -> float:
        """Call it several times a second. Returns the seconds since the last call that do not count, if that was a
        pause; else 0.
        """
        last, self._last = self._last, time.monotonic()
        between = self._last - last
        return between - self.COUNTS_S if between > self.MOST_S else 0.0

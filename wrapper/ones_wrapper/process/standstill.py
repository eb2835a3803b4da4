"""Pauses of this process itself, which those who wait for signs of others have to know."""

from __future__ import annotations

import time


class Standstill:
    """Notices that this process was paused itself: its node was, or Slurm had suspended the job. Others were paused
    with it, or could not be reached, so that time does not count as their silence.
    """

    MOST_S = 2.0
    """Two looks that are further apart had a standstill between them."""
    COUNTS_S = 0.5
    """Part of each that counts all the same: who is always late finds at last what is silent."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def look(self) -> float:
        """Call it several times a second. Returns the seconds since the last call that do not count, if that was a
        pause; else 0.
        """
        last, self._last = self._last, time.monotonic()
        between = self._last - last
        return between - self.COUNTS_S if between > self.MOST_S else 0.0

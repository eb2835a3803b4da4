"""Whether this process itself stood still, which those who wait for signs of others have to know."""

from __future__ import annotations

import time


class Standstill:
    """Notices that this process stood still itself: its node did, or Slurm had suspended the job. Others stood still
    with it, or could not be heard, so none of that time counts as their silence.
    """

    MOST_S = 2.0
    """Two looks that are further apart had a standstill between them."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def look(self) -> float:
        """Call it several times a second. The seconds since the last call where that was a standstill, else 0."""
        last, self._last = self._last, time.monotonic()
        return self._last - last if self._last - last > self.MOST_S else 0.0

"""Detection of ranks that hang: each rank writes the time of its last step boundary into memory shared with its
launcher.

After the death of another rank, the loss of a network, or a deadlock, ranks may wait for ever. The detector ends hung
ranks, and training continues from the last checkpoint. The user sets one limit for both steps and collectives.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

HANG_S = 1800.0
"""Default of ONES_HANG_S in seconds: longer than an evaluation between two epochs should take."""
_FOR_EVER = timedelta(days=365)


def limit_s(env: Mapping[str, str]) -> float:
    """Return the longest time, in seconds, that a rank may take from one step boundary to the next; 0 for no limit."""
    try:
        seconds = float(env.get("ONES_HANG_S") or HANG_S)
    except ValueError:
        return HANG_S
    return min(seconds, _FOR_EVER.total_seconds()) if seconds >= 0 else HANG_S


def collective(env: Mapping[str, str]) -> timedelta:
    """Return the time limit of a collective, which must cover one rank's evaluation while other ranks wait. NCCL's own
    limit of 10 minutes is too short for that."""
    return timedelta(seconds=limit_s(env)) or _FOR_EVER


class Standstill:
    """Detection of pauses of this process, because its node or its job was suspended. Other processes may have paused,
    too: their silence in that time does not count."""

    MOST_S = 2.0
    """Largest number of seconds between two calls of `look` for which this process does not count as paused."""
    COUNTS_S = 0.5
    """Seconds of each pause that do count as silence. Otherwise a process that always calls `look` late would never
    find another process silent."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def look(self) -> float:
        """Return the seconds of a pause since the last call that do not count as silence; 0 without a pause. Call this
        several times a second."""
        last, self._last = self._last, time.monotonic()
        between = self._last - last
        return between - self.COUNTS_S if between > self.MOST_S else 0.0


class Heartbeats:
    """Time of each local rank's last beat, on the machine's monotonic clock; 0 for a rank that is not watched. The
    launcher makes this object before it forks the ranks. Each rank writes only its own entry, in one store
    instruction."""

    def __init__(self, ranks: int) -> None:
        self._beats = memoryview(mmap.mmap(-1, 8 * ranks)).cast("d")
        self._excused = [(0.0, 0.0)] * ranks
        """(last beat, seconds of pauses since then) for each rank."""

    def beat(self, local_rank: int, now: float) -> None:
        """Record that this rank was at a step boundary at the time `now`; 0 ends its watch."""
        self._beats[local_rank] = now

    def stood_still(self, now: float, seconds: float) -> None:
        """Do not count the `seconds` before `now` as silence of any rank, since all ranks were paused. Several pauses
        add up, since a scheduler may suspend jobs in turn."""
        for rank, beat in enumerate(self._beats):
            self._excused[rank] = beat, self._excuse(rank, beat) + min(seconds, now - beat)

    def hung(self, now: float, limit_s: float) -> list[int]:
        """Return the local ranks that reached no step boundary for more than `limit_s` seconds, not counting pauses of
        the machine. Empty if `limit_s` is 0."""
        if limit_s <= 0:
            return []
        silent = [beat and now - beat - self._excuse(rank, beat) for rank, beat in enumerate(self._beats)]
        return [rank for rank, seconds in enumerate(silent) if seconds > limit_s]

    def _excuse(self, rank: int, beat: float) -> float:
        before, seconds = self._excused[rank]
        return seconds if before == beat else 0.0


_own: tuple[Heartbeats, int] | None = None


def watch_rank(board: Heartbeats, local_rank: int) -> None:
    """Make `beat` and `pause` in this process write to the entry of this local rank."""
    global _own
    _own = (board, local_rank)


def beat() -> None:
    """Record that this rank is at a step boundary, or makes other progress. The first call starts the watch. Takes less
    than a microsecond. Does nothing in a rank without a detector."""
    if _own is not None:
        _own[0].beat(_own[1], time.monotonic())


def pause() -> None:
    """Stop watching until the next beat, because training has finished, or because the next action has no time
    limit."""
    if _own is not None:
        _own[0].beat(_own[1], 0.0)


def watch_this_process(limit_s: float, end: Callable[[], None]) -> None:
    """Watch this process without a node launcher (MPI): a thread calls `end` if the process hangs. The thread also runs
    while the main thread waits in a library."""
    if limit_s <= 0:
        return
    board = Heartbeats(1)
    watch_rank(board, 0)

    def look() -> None:
        still = Standstill()
        while os.getpid() == mine:
            time.sleep(min(1.0, limit_s / 4))
            now = time.monotonic()
            if stood_s := still.look():
                board.stood_still(now, stood_s)
            if board.hung(now, limit_s):
                end()
                return

    mine = os.getpid()
    threading.Thread(target=look, name="ones-watch", daemon=True).start()

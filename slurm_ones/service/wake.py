"""Requests for an early tick, after an order by hand.

A user requests a tick by setting the modification time of the companion's directory, in which users cannot create
files. After a few requests in a row, each interval has at most one additional tick.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slurm_ones.config import Settings

LOOK_S = 2.0
"""Seconds between two checks of the directory."""
GAP_S = 5.0
"""Shortest time from the end of a tick to a requested tick, in seconds."""
BURST = 5
"""Largest number of requested ticks in a row; after it, each interval has at most one."""


def wake(settings: Settings) -> bool:
    """Request an early tick. Return False if the companion's directory cannot be reached."""
    try:
        os.utime(settings.wake_folder or "")
    except OSError:
        return False
    return True


class Waking:
    """Thread that checks the directory for requests, so that a hanging file system does not stop the main loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, look_s: float = LOOK_S) -> None:
        self._folder: Path | None = None
        self._own = True
        self._clock = clock
        self._look_s = look_s
        self._changed: int | None = None
        self._asked = threading.Event()
        self._hurry = threading.Event()
        """Event that ends the wait before the next check."""
        self._closed = False
        self._left = float(BURST)
        self._counted = self._ticked = clock()
        self._thread = threading.Thread(target=self._run, name="wake", daemon=True)

    def start(self) -> Waking:
        self._thread.start()
        return self

    def use(self, settings: Settings) -> None:
        """Check the directory that these settings name, from now on."""
        self._folder, self._own = settings.wake_folder, settings.scope == "own"
        self._hurry.set()

    def begins(self) -> None:
        """Drop all requests so far, because a tick begins."""
        self._asked.clear()

    def ended(self) -> None:
        """Record that a tick has ended."""
        self._ticked = self._clock()

    def due(self, interval_s: float) -> bool:
        """Return True if a requested tick may begin now, and count it towards the limit."""
        now = self._clock()
        self._left = min(BURST, self._left + max(now - self._counted, 0.0) / interval_s)
        self._counted = now
        if not self._asked.is_set() or now - self._ticked < GAP_S or self._left < 1:
            return False
        self._left -= 1
        return True

    def close(self) -> None:
        self._closed = True
        self._hurry.set()

    def look(self) -> None:
        """Check the directory's modification time once."""
        folder, changed = self._folder, None
        if folder is not None:
            with suppress(OSError):
                changed = _changed(folder, self._own)
        if None not in (changed, self._changed) and changed != self._changed:
            self._asked.set()
        self._changed = changed

    def _run(self) -> None:
        while not self._closed:
            self.look()
            self._hurry.wait(self._look_s)
            self._hurry.clear()


def _changed(folder: Path, own: bool) -> int | None:
    """Return the directory's modification time in ns; None if it is another user's. Create a missing directory."""
    with suppress(FileExistsError):
        # Of an operator's companion, the publisher makes the folder around it.
        folder.mkdir(parents=own)
        folder.chmod(0o700 if own else 0o722)
    # NFS asks the server at an open, and believes its cache at a stat.
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
    finally:
        os.close(opened)
    return found.st_mtime_ns if found.st_uid == os.geteuid() else None

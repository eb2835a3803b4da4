"""An order by hand brings the next tick forward.

The time of change of a directory of the companion's is the whole message. Users may touch it (write permission without
search permission: nobody can put a file there). Who keeps touching it gets one tick more an interval after a few.
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
"""Between two looks at the directory."""
GAP_S = 5.0
"""Time from the end of a tick to one that was brought forward."""
BURST = 5
"""Ticks that may be brought forward at once; after them one an interval."""


def wake(settings: Settings) -> bool:
    """Ask the companion for a tick soon; returns whether it can be asked."""
    try:
        os.utime(settings.wake_folder or "")
    except OSError:
        return False
    return True


class Waking:
    """Thread that watches the directory for requests of a tick; a thread, since a file system may hang."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, look_s: float = LOOK_S) -> None:
        self._folder: Path | None = None
        self._own = True
        self._clock = clock
        self._look_s = look_s
        self._changed: int | None = None
        self._asked = threading.Event()
        self._hurry = threading.Event()
        """Ends the wait between two looks."""
        self._closed = False
        self._left = float(BURST)
        self._counted = self._ticked = clock()
        self._thread = threading.Thread(target=self._run, name="wake", daemon=True)

    def start(self) -> Waking:
        self._thread.start()
        return self

    def use(self, settings: Settings) -> None:
        """Watch the directory that these settings name, beginning at once, so that no later request is missed."""
        self._folder, self._own = settings.wake_folder, settings.scope == "own"
        self._hurry.set()

    def begins(self) -> None:
        """Forget requests: the tick that begins now serves them."""
        self._asked.clear()

    def ended(self) -> None:
        """Note the time at which a tick ended."""
        self._ticked = self._clock()

    def due(self, interval_s: float) -> bool:
        """Tell whether a requested tick is to begin now, and count it if so."""
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
        """Read the directory's time of change once."""
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
    """Return the nanoseconds of the directory's last change; None if it is another user's. Make it if it is missing."""
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

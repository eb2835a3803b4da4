"""The stop file as people make and remove it, written down with who did."""

from __future__ import annotations

import pwd
from pathlib import Path

from ones_db import ActionRecord, Store


class StopFile:
    """What was last seen of the file."""

    def __init__(self, path: Path, store: Store) -> None:
        self._path = path
        self._store = store
        self._there = False

    def look(self, now: float) -> None:
        """Write down that somebody made the file, or that it is gone.

        Who removed it leaves no trace. A companion that starts again finds the same file, which is the same action.
        """
        try:
            found = self._path.stat()
        except OSError:
            if self._there:
                self._store.add_action(ActionRecord(now, "", "stop file removed", str(self._path)))
            self._there = False
            return
        if not self._there:
            made = ActionRecord(found.st_mtime, _login(found.st_uid), "stop file made", str(self._path))
            self._store.add_action(made)
        self._there = True


def _login(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

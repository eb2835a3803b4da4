"""The lead over an SQLite database: an advisory lock (`flock`) on a file beside it, one for each cluster.

The kernel frees it when its holder is gone. A holder that is stopped keeps it: nobody can act in its place, nor can
two ever act. The file is never deleted, since whoever waits for it would wait for one that nobody else finds.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Engine

from ones_db import leaders
from ones_db.engine import transaction
from ones_db.errors import NotLeader, StoreError
from ones_db.records import LeaderRecord


class FileSeat:
    """The lock file `DATABASE.CLUSTER.lead`, mode 600. `engine` writes the database."""

    def __init__(self, database: Path, engine: Engine, cluster: str, key: int) -> None:
        # By its real name, however it was named: two that lead must meet at one file.
        self.path = Path(f"{database.resolve()}.{quote(cluster, safe='')}.lead")
        self._engine = engine
        self._cluster = key
        self._file: int | None = None

    def take(self) -> bool:
        self.free()
        file = self._opened()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError as error:
            os.close(file)
            raise StoreError(f"{self.path}: cannot be locked: {error.strerror}") from None
        # Somebody may have put another file there between the two; the next call finds that one.
        if not self._in_place(file):
            os.close(file)
            return False
        self._file = file
        return True

    def check(self, term: int) -> None:
        file = self._file
        if file is None or not self._in_place(file):
            raise NotLeader(f"{self.path}: the lead is lost: another file has taken the place of the lock, or none")
        try:
            with transaction(self._engine) as connection:
                leaders.check_term(connection, self._cluster, term)
        except NotLeader:
            raise
        except StoreError as error:
            raise NotLeader(f"nobody can say whether this companion leads: {error}") from error

    def beat(self, term: int, now: float) -> bool:
        with transaction(self._engine, write=True) as connection:
            return leaders.beat(connection, self._cluster, term, now)

    def free(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def oust(self, leader: LeaderRecord) -> bool:
        """Nobody can take a lock from a process but by ending it, which is not ours to do."""
        return False

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise StoreError(
                f"{self.path}: the lock of those who lead cannot be opened: {error.strerror}; it must be a file of "
                "the companion's own account, in a directory that it may write to"
            ) from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise StoreError(f"{self.path}: no plain file; the lock of those who lead must be one")
        return file

    def _in_place(self, file: int) -> bool:
        """Whether the opened file is the one that others find."""
        try:
            there = self.path.lstat()
        except OSError:
            return False
        mine = os.fstat(file)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

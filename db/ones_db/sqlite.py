"""SQLite: one file with a write-ahead log (WAL). A transaction that writes locks it when it begins."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Dialect, Engine, Table, create_engine, event, text
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import NullPool, QueuePool

from ones_db import backend
from ones_db.backend import UPGRADE, Mode, SchemaError, StoreBusy, StoreError

GRAIN_S = 0.1
"""Upper bound on the resolution of modification times, in seconds. Two writes within it may leave the same time."""
RETRY_S = 0.02
"""Seconds between tries to switch to the write-ahead log. SQLite itself tries only once."""
_MODES = {"read": "ro", "watch": "ro", "write": "rw", "upgrade": "rwc"}
"""Mode in SQLite's URI for each `Mode`. `rwc` creates the file."""


_BUSY = "locked by another process for {busy_s:.0f} s; is a second companion writing it?"
_ERRORS: tuple[tuple[str, type[StoreError], str], ...] = (
    ("locked", StoreBusy, _BUSY),
    ("busy", StoreBusy, _BUSY),
    ("unable to open", StoreError, "cannot be opened; check that the directory exists and that you may write in it"),
    ("readonly", StoreError, "you may not write it; check the owner and mode of the file and its directory"),
    ("disk is full", StoreError, "no space is left on its disk; nothing of this call was stored"),
    ("not a database", SchemaError, "not an SQLite database; name another file"),
    ("no such table", SchemaError, f"{{words}}; run `{UPGRADE}`"),
)
"""(Text in SQLite's error, class of our error, our message)."""


class SQLite(backend.Backend):
    """An SQLite database in one file."""

    def __init__(self, url: URL) -> None:
        """Take the file from the URL. Raises `StoreError` if the URL names none."""
        if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
            raise StoreError(f"'{url}' names no file; write sqlite:///PATH")
        self.path = Path(url.database).absolute()
        self.place = str(self.path)

    def prepare(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path.parent}: cannot be created: {error.strerror}") from None

    def exists(self) -> bool:
        """See `Backend.exists`. Raises `StoreError` if this user may not read the directory."""
        try:
            return self.path.exists() and (not self.path.is_file() or self.path.stat().st_size > 0)
        except PermissionError:
            raise StoreError(f"{self.path}: closed to you; check the owner and mode of its directory") from None

    def stamp(self) -> object:
        """See `Backend.stamp`. Raises OSError if the file does not exist."""
        found = [self.path.stat()]
        with suppress(FileNotFoundError):
            found.append(Path(f"{self.path}-wal").stat())
        if time.time() - max(one.st_mtime for one in found) < GRAIN_S:
            return None
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)

    def engine(self, mode: Mode) -> Engine:
        """See `Backend.engine`. A write-ahead log lets writers and readers work without waiting for each other.

        Each commit flushes the log. So a power failure cannot undo a record on which the companion has acted.
        """

        def connect() -> sqlite3.Connection:
            # SQLAlchemy hands a connection to one thread at a time. BEGIN is ours: see `_begin`.
            return sqlite3.connect(
                f"{self.path.as_uri()}?{self._query(mode)}",
                uri=True,
                timeout=backend.BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )

        # To connect takes longer than to read a little: SQLite then reads the schema, and prepares what it is asked.
        kept = mode in ("write", "upgrade") or (mode == "watch" and os.access(self.path.parent, os.W_OK))
        pool = QueuePool if kept else NullPool
        options = {"ones_backend": self}
        engine = create_engine("sqlite://", creator=connect, poolclass=pool, execution_options=options)

        @event.listens_for(engine, "connect")
        def _connected(connection: Any, record: Any) -> None:
            # Rebuilding a table drops the old one: with foreign keys in force that would fail, so an upgrade checks
            # them afterwards.
            connection.execute(f"PRAGMA foreign_keys = {'OFF' if mode == 'upgrade' else 'ON'}")
            record.info["file"] = self._file()
            if mode in ("read", "watch"):
                connection.execute("PRAGMA query_only = ON")
            else:
                _begin_log(connection)
                connection.execute("PRAGMA synchronous = FULL")

        @event.listens_for(engine, "checkout")
        def _taken(connection: Any, record: Any, proxy: Any) -> None:
            # Rows in a file that is gone would be lost with the process.
            if record.info["file"] != self._file():
                raise DisconnectionError("the file was deleted or replaced")

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            # A transaction that will write takes its lock first: one that read before could not be granted it
            # later.
            writes = connection.get_execution_options().get("ones_write", False)
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        return engine

    def _file(self) -> object:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _query(self, mode: Mode) -> str:
        """Return the part of SQLite's URI after the question mark.

        To read a file with a write-ahead log, SQLite needs two more files, which a reader without write access to the
        directory cannot create. Without a log there is no writer, and such a reader opens the file as `immutable`.
        """
        log = Path(f"{self.path}-wal")
        alone = mode in ("read", "watch") and not os.access(self.path.parent, os.W_OK) and not log.exists()
        return "mode=ro&immutable=1" if alone else f"mode={_MODES[mode]}"

    def explained(self, error: DBAPIError) -> StoreError:
        words = str(error.orig)
        for part, kind, meant in _ERRORS:
            if part in words:
                return kind(f"{self.path}: {meant.format(words=words, busy_s=backend.BUSY_S)}")
        return StoreError(f"{self.path}: {words}")

    def back_up(self, revision: str) -> str:
        """Copy the file in its directory, durably. The copy is consistent even if a companion writes meanwhile."""
        path, stamp = self.path, time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        copy = path.with_name(f"{path.name}.{revision}-{stamp}.bak")
        unfinished = copy.with_name(f".{copy.name}.{os.getpid()}")
        try:
            unfinished.touch(mode=0o600)  # who opened it now could read it later, whatever mode it gets
            whole = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
            with closing(whole), closing(sqlite3.connect(unfinished)) as target:
                whole.backup(target)
            unfinished.chmod(path.stat().st_mode & 0o777)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.rename(copy)
        except (OSError, sqlite3.Error) as error:
            unfinished.unlink(missing_ok=True)
            raise StoreError(f"{path}: cannot be copied to {copy} before the upgrade: {error}") from error
        return str(copy)

    def orphans(self, connection: Connection) -> list[str]:
        return [str(tuple(row)) for row in connection.execute(text("PRAGMA foreign_key_check"))]

    insert = staticmethod(insert)

    def add_rows(self, connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """See `Backend.add_rows`. The driver gets plain rows, because naming each value costs more than storing it."""
        if rows:
            connection.exec_driver_sql(_insertion(table, connection.dialect), list(rows))


def _begin_log(connection: sqlite3.Connection) -> None:
    """Switch the file to a write-ahead log. It needs exclusive access, for which SQLite itself does not wait."""
    until = time.monotonic() + backend.BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(RETRY_S)


@cache
def _insertion(table: Table, dialect: Dialect) -> str:
    return str(insert(table).on_conflict_do_nothing().compile(dialect=dialect))

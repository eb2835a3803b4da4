"""Opening the database file: settings of each connection, transactions, and errors in words."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from ones_db.errors import SchemaError, StoreBusy, StoreError

BUSY_S = 30.0
"""How long a call waits for another process's write to end."""

UPGRADE = "slurm-ones db upgrade"


def database_file(url: str) -> Path:
    """The file that a database URL names; raises `StoreError` where it names none."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreError(
            f"{url!r} is not a database URL; write sqlite:///PATH, or sqlite:////PATH from the root"
        ) from None
    if parsed.get_backend_name() != "sqlite":
        shown = parsed.render_as_string(hide_password=True)
        raise StoreError(f"{shown}: this version stores in SQLite alone; write sqlite:///PATH")
    if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
        raise StoreError(f"{url!r} names no file; write sqlite:///PATH")
    return Path(parsed.database).absolute()


def open_engine(path: Path, mode: str, *, foreign_keys: bool = True) -> Engine:
    """An engine over the file. `mode` is SQLite's: ro, rw, or rwc, which creates it.

    Writers use a write-ahead log, so that they never wait for readers nor readers for them, and flush it at
    each commit: what the companion does to a job may rest only on what would survive a power cut.
    """

    def connect() -> sqlite3.Connection:
        # SQLAlchemy hands a connection to one thread at a time. BEGIN is ours: see `_begin`.
        return sqlite3.connect(
            f"{path.as_uri()}?{_query(path, mode)}",
            uri=True,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool if mode == "ro" else QueuePool)

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, record: Any) -> None:
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        if mode == "ro":
            connection.execute("PRAGMA query_only = ON")
        else:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that will write takes its lock first: one that read before could not be granted it
        # later.
        writes = connection.get_execution_options().get("ones_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _query(path: Path, mode: str) -> str:
    """The part of SQLite's URI after the question mark.

    Reading needs the log's two files, which SQLite makes in the directory when no writer has them open. A
    reader who may not write there can do without only while there is no log, which `immutable` promises;
    hence a connection for each transaction of a reader, which asks anew.
    """
    alone = mode == "ro" and not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
    return "mode=ro&immutable=1" if alone else f"mode={mode}"


@contextmanager
def transaction(engine: Engine, path: Path, *, write: bool = False) -> Iterator[Connection]:
    """One transaction; what is in it is durable when the block is left, or nothing of it happened."""
    try:
        with engine.connect().execution_options(ones_write=write) as connection, connection.begin():
            yield connection
    except DBAPIError as error:
        raise explained(error, path) from error
    except OverflowError as error:
        raise StoreError(f"{path}: a number beyond 64 bits cannot be stored: {error}") from error


def explained(error: DBAPIError, path: Path) -> StoreError:
    """The driver's error in words that say what to do."""
    words = str(error.orig)
    if "locked" in words or "busy" in words:
        return StoreBusy(f"{path}: locked by another process for {BUSY_S:.0f} s; is a second companion writing it?")
    if "unable to open" in words:
        return StoreError(f"{path}: cannot be opened; check that the directory exists and that you may write in it")
    if "readonly" in words:
        return StoreError(f"{path}: you may not write it; check the owner and mode of the file and its directory")
    if "not a database" in words:
        return SchemaError(f"{path}: not an SQLite database; name another file")
    if "no such table" in words:
        return SchemaError(f"{path}: {words}; run `{UPGRADE}`")
    return StoreError(f"{path}: {words}")

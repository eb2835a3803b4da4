"""Interface of each kind of database for what SQLAlchemy does not cover, and the package's errors."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError


class StoreError(Exception):
    """A call to the database failed, and nothing of the call was stored. The message says why."""


class SchemaError(StoreError):
    """The database is absent, another program's, or of another schema. The message says what to run."""


class StoreBusy(StoreError):
    """Another process kept the database locked for longer than `BUSY_S`; the call may be repeated."""


class StoreLost(StoreError):
    """The server cannot be reached, or went away during the call. The call may be repeated: the store connects again,
    and stores nothing twice if the lost call was durable already."""


class NotLeader(StoreError):
    """Another companion of the cluster leads, or may lead by now; the caller must not act."""


class UnknownRecord(StoreError):
    """The job, run, decision or resize that the call names is not in the store."""


class ResizeConflict(StoreError):
    """The job has another open resize, or the resize that the call names has ended."""


BUSY_S = 30.0
"""Longest wait of a call for another process's write to end, seconds."""

UPGRADE = "slurm-ones db upgrade"

Mode = Literal["read", "watch", "write", "upgrade"]
"""Purpose of an engine's connections: read once, read repeatedly, write, or change the schema."""

TOO_LARGE = "a number beyond 64 bits cannot be stored"


def this_process() -> str:
    """Return the name under which this process leads: host:process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Backend(Protocol):
    """One database of one kind, made by `ones_db.engine.backend_of`; no other function knows which kinds exist. Bodies
    are those of a kind that needs nothing there."""

    place: str
    """Place of the database for messages: a path, or a URL without the password."""

    def prepare(self) -> None:
        """Create what a new database needs, such as a directory; raises `StoreError` if the place is unusable."""

    def exists(self) -> bool:
        """Tell whether the database exists, with tables or without; a server that is away says so when it is asked."""
        return True

    def stamp(self) -> object:
        """Return, without a query, a value that changes with each write; None if only a query could show a write."""
        return None

    def engine(self, mode: Mode) -> Engine:
        """Return an engine for this purpose; its connections have the settings that `Store`'s contract needs."""

    def options(self, write: bool) -> Mapping[str, Any]:
        """Return SQLAlchemy's execution options for a transaction that writes or only reads."""
        return {}

    def explained(self, error: DBAPIError) -> StoreError:
        """Return the driver's error as a `StoreError` that says what to do."""

    def back_up(self, revision: str) -> str | None:
        """Copy the whole database before an upgrade from this revision, and return the place of the copy; None if
        copies are the administrator's business."""
        return None

    def orphans(self, connection: Connection) -> list[str]:
        """Return rows whose parents are missing; empty if the database enforced foreign keys in this transaction."""
        return []

    def insert(self, table: Table) -> Any:
        """Return an INSERT with the dialect's own `on_conflict` clauses."""

    def add_rows(self, connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert many rows as fast as the driver can; rows whose key is stored already stay as they are.

        Each row has a value for every column of the table, in the table's order.
        """

    def renumber(self, connection: Connection, table: Table) -> None:
        """Let the table generate keys above the highest stored key, after rows were inserted with keys of their own."""
        return

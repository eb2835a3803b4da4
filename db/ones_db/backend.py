"""Interface to each kind of database beyond what SQLAlchemy covers, and the package's errors."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError


class StoreError(Exception):
    """The database could not do what was asked; nothing of the failed call was stored. The message says why."""


class SchemaError(StoreError):
    """The database is absent, older or newer than this version, or not ours; the message says what to run."""


class StoreBusy(StoreError):
    """Another process kept the database locked for too long; the call may be repeated."""


class StoreLost(StoreError):
    """The server cannot be reached, or went away during the call. The call may be repeated: it connects again, and
    changes nothing if the lost call was durable already."""


class NotLeader(StoreError):
    """Another companion of the cluster leads, or may lead by now; this one must not act."""


class UnknownRecord(StoreError):
    """The job, run, decision or resize that the call names is not in the store."""


class ResizeConflict(StoreError):
    """The job has another resize open, or the resize that the call names has ended."""


BUSY_S = 30.0
"""Time that a call waits for another process's write to end."""

UPGRADE = "slurm-ones db upgrade"

Mode = Literal["read", "watch", "write", "upgrade"]
"""Purpose of connections: reading, repeated reading, writing, or changing the schema."""

TOO_LARGE = "a number beyond 64 bits cannot be stored"


def this_process() -> str:
    """Name of this process as a leader: host:process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Backend(Protocol):
    """One database of one kind. `ones_db.engine.backend_of` finds it; nothing else knows which kinds there are."""

    place: str
    """Its place, as people may read it: a path, or a URL without its password."""

    def prepare(self) -> None:
        """Create what a new database needs, such as its directory; raises `StoreError` if the place cannot be used."""

    def exists(self) -> bool:
        """Tell whether there is a database, with tables or without."""

    def stamp(self) -> object:
        """Return a value that changes with each write, without a query; None if only a query would tell."""

    def engine(self, mode: Mode) -> Engine:
        """Return an engine whose connections have the settings that the store's contract needs."""

    def options(self, write: bool) -> Mapping[str, Any]:
        """Return the connection options for one transaction."""

    def explained(self, error: DBAPIError) -> StoreError:
        """Return the driver's error as a `StoreError` that says what to do."""

    def back_up(self, revision: str) -> str | None:
        """Copy the whole database before its upgrade, and return the place; None if copies are the administrator's
        business."""

    def orphans(self, connection: Connection) -> list[str]:
        """Return rows whose parents are missing, if the database did not enforce foreign keys in this transaction."""

    def insert(self, table: Table) -> Any:
        """An INSERT with the `on_conflict` clauses that SQLAlchemy has for each dialect."""

    def add_rows(self, connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert many rows as fast as the driver can; those whose key is there stay as they are.

        Each has a value for every column of the table, in its order.
        """

    def renumber(self, connection: Connection, table: Table) -> None:
        """Continue the table's generated keys above the highest, after rows were inserted with their own."""

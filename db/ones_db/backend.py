"""Needs of the package in each kind of database, beyond what SQLAlchemy covers for all, and its errors."""

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
    """Another process kept the database locked for longer than the store waits; the call may be repeated."""


class StoreLost(StoreError):
    """The server cannot be reached, or went away during the call. The call may be repeated: the next one connects
    again, and where the server had just made the lost one durable, it changes nothing."""


class NotLeader(StoreError):
    """Another companion of the cluster leads, or may lead by now: nothing may be done in its place."""


class UnknownRecord(StoreError):
    """The job, run, decision or resize that the call names is not in the store."""


class ResizeConflict(StoreError):
    """The job has another resize open, or the resize that the call names has ended."""


BUSY_S = 30.0
"""Time that a call waits for another process's write to end."""

UPGRADE = "slurm-ones db upgrade"

Mode = Literal["read", "watch", "write", "upgrade"]
"""Purpose of connections: only reading; the same again and again; a store that writes; making or changing the
tables."""

TOO_LARGE = "a number beyond 64 bits cannot be stored"


def this_process() -> str:
    """Name of this process as a leader: host:process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Backend(Protocol):
    """One database of one kind. `ones_db.engine.backend_of` finds it; nothing else knows which kinds there are."""

    place: str
    """Its place, as people may read it: a path, or a URL without its password."""

    def prepare(self) -> None:
        """Make what `upgrade` finds nothing without; raises `StoreError` if the place is of no use."""

    def exists(self) -> bool:
        """Tell whether there is a database, with tables or without."""

    def stamp(self) -> object:
        """Stamp that is another one after each write, found without asking the database; None if only the database
        knows."""

    def engine(self, mode: Mode) -> Engine:
        """Connections to it, each with the settings that the store's contract rests on."""

    def options(self, write: bool) -> Mapping[str, Any]:
        """Options of a connection for one transaction."""

    def explained(self, error: DBAPIError) -> StoreError:
        """The driver's error in words that say what to do."""

    def back_up(self, revision: str) -> str | None:
        """Keep a copy of the whole database before its upgrade, and say where; None if that is the site's."""

    def orphans(self, connection: Connection) -> list[str]:
        """Rows whose parents are missing, where the database itself did not watch over them in this transaction."""

    def insert(self, table: Table) -> Any:
        """An INSERT with the `on_conflict` clauses that SQLAlchemy has for each dialect."""

    def add_rows(self, connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert many rows as fast as the driver can; those whose key is there stay as they are.

        Each has a value for every column of the table, in its order.
        """

    def renumber(self, connection: Connection, table: Table) -> None:
        """Let the table's own keys go on behind the highest, after rows came with theirs."""

"""Interface of each kind of database, for what SQLAlchemy does not do itself; and the errors of this package."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError


class StoreError(Exception):
    """Error: a call to the database failed, and stored nothing. The message says why."""


class SchemaError(StoreError):
    """Error: the database does not exist, is another program's, or has another schema. The message says what to run."""


class StoreBusy(StoreError):
    """Error: another process kept the database locked for longer than `BUSY_S`. The call may be repeated."""


class StoreLost(StoreError):
    """Error: the server cannot be reached, or was lost during the call. The call may be repeated.

    The store then connects again. If the lost call did store its rows, they are not stored twice.
    """


class NotLeader(StoreError):
    """Error: another companion of the cluster may lead by now, so the caller must not act."""


class UnknownRecord(StoreError):
    """Error: the job, run, decision or resize that a call names is not in the store."""


class ResizeConflict(StoreError):
    """Error: the job already has an open resize, or the resize that a call names has ended."""


BUSY_S = 30.0
"""Seconds for which a call waits while another process writes."""

UPGRADE = "slurm-ones db upgrade"

Mode = Literal["read", "watch", "write", "upgrade"]
"""Use of an engine's connections: read once, read repeatedly, write, or change the schema."""

TOO_LARGE = "a number beyond 64 bits cannot be stored"


def this_process() -> str:
    """Return the name of this process in the table of leaders, host:process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Backend(Protocol):
    """One database of one kind. `ones_db.engine.backend_of` makes it; other code does not know which kinds there are.

    Methods with a body are defaults. A kind of database overrides them if it needs more.
    """

    place: str
    """Path of the database, or its URL without the password, for messages."""

    def prepare(self) -> None:
        """Create what a new database needs, such as a directory. Raises `StoreError` if that is impossible."""

    def exists(self) -> bool:
        """Return True if the database exists, even without tables. An unreachable server counts as existing."""
        return True

    def stamp(self) -> object:
        """Return a value that changes with each write, without a query; None if only a query could show that."""
        return None

    def engine(self, mode: Mode) -> Engine:
        """Return an engine for this use. Its connections have the settings that the contract of `Store` needs."""

    def options(self, write: bool) -> Mapping[str, Any]:
        """Return SQLAlchemy's execution options for a transaction that writes, or that only reads."""
        return {}

    def explained(self, error: DBAPIError) -> StoreError:
        """Return an error of the driver as a `StoreError` whose message says what to do."""

    def back_up(self, revision: str) -> str | None:
        """Copy the whole database before an upgrade from this schema revision. Return the place of the copy.

        None means that no copy is made, because that is the admin's task.
        """
        return None

    def orphans(self, connection: Connection) -> list[str]:
        """Return rows whose parent rows are missing; empty if the database checks foreign keys itself."""
        return []

    def insert(self, table: Table) -> Any:
        """Return an INSERT statement that has the database's own `on_conflict` clauses."""

    def add_rows(self, connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert many rows as fast as the driver can. If a row's key is stored already, the stored row stays.

        Each row has a value for every column of the table, in the table's order.
        """

    def renumber(self, connection: Connection, table: Table) -> None:
        """Make the table generate keys above the largest stored one, after rows were inserted with their keys."""
        return

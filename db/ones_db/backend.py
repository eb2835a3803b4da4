"""Interface of a database, for what SQLAlchemy does differently on SQLite and PostgreSQL, and this package's errors."""

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

    The store then connects again. A repeated call stores no row twice.
    """


class NotLeader(StoreError):
    """Error: this companion no longer leads its cluster, or cannot be sure that it does, so it must not act."""


class UnknownRecord(StoreError):
    """Error: the job, run, decision or resize that a call names is not in the store."""


class ResizeConflict(StoreError):
    """Error: the job already has an open resize, or the resize that a call names has ended."""


BUSY_S = 30.0
"""Longest wait of a call while another process writes, in seconds. Then `StoreBusy` is raised."""

UPGRADE = "slurm-ones db upgrade"

Mode = Literal["read", "watch", "write", "upgrade"]
"""Use of an engine: `read` once, `watch` (read repeatedly), `write`, or `upgrade` the schema."""

TOO_LARGE = "a number beyond 64 bits cannot be stored"


def this_process() -> str:
    """Return this process as host:process id, its name in the table `leaders`."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Backend(Protocol):
    """A database on SQLite or PostgreSQL, made by `ones_db.engine.backend_of`. Methods with a body are defaults."""

    place: str
    """Path of the database, or its URL without the password, for messages."""

    def prepare(self) -> None:
        """Create what a new database needs, such as a directory. Raises `StoreError` if that is impossible."""

    def exists(self) -> bool:
        """Return True if the database exists, even without tables. An unreachable server counts as existing."""
        return True

    def stamp(self) -> object:
        """Return a value that changes with each write to the database, found without a query; None if it is unknown."""
        return None

    def engine(self, mode: Mode) -> Engine:
        """Return an engine for this use. Its connections have the settings that the contract of `Store` needs."""

    def options(self, write: bool) -> Mapping[str, Any]:
        """Return SQLAlchemy's execution options for a transaction. With `write` False, it only reads."""
        return {}

    def explained(self, error: DBAPIError) -> StoreError:
        """Return an error of the driver as a `StoreError` whose message says what to do."""

    def back_up(self, revision: str) -> str | None:
        """Copy the whole database before its schema `revision` is upgraded. Return the path of the copy.

        None means that no copy was made: databases on a server are copied by the admin.
        """
        return None

    def orphans(self, connection: Connection) -> list[str]:
        """Return rows that refer to missing rows; empty if the database itself refuses such rows."""
        return []

    def insert(self, table: Table) -> Any:
        """Return SQLAlchemy's INSERT for this kind of database, which has methods such as `on_conflict_do_nothing`."""

    def add_rows(self, connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert many rows as fast as the driver can. If a row's key is stored already, the stored row stays.

        Each row has a value for every column of the table, in the table's order.
        """

    def renumber(self, connection: Connection, table: Table) -> None:
        """Set the table's next generated key above its largest key, after rows were inserted with their keys."""
        return

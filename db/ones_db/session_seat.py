"""The lead over a PostgreSQL database: an advisory lock of a session of its own.

The server frees it when the session ends: at once when its process is gone; when its host is gone, or it hangs, as soon
as one that stands by ends the session.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ones_db import leaders
from ones_db.backend import Backend
from ones_db.engine import backend_behind
from ones_db.errors import NotLeader, StoreError
from ones_db.records import LeaderRecord

T = TypeVar("T")

# Two numbers make the key: the table's own, which tells one schema from another, and the cluster's.
_KEY = "(to_regclass('leaders')::oid::int8 << 32) | :cluster"
_TRY = text(f"SELECT pg_backend_pid(), pg_try_advisory_lock({_KEY})")
_CHECK = text(
    "SELECT pg_backend_pid() AS pid, leaders.term, leaders.holder"
    " FROM (SELECT 1) always LEFT JOIN leaders ON cluster_id = :cluster"
)
_HOLDERS = """
    SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND classid = to_regclass('leaders')::oid AND objid = CAST(:cluster AS oid)"""
# Also its other sessions: one that hangs in the middle of a write keeps all others from writing.
_OUST = text(f"""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND (pid IN ({_HOLDERS}) OR (application_name = :named AND application_name <> :mine))
    AND EXISTS (SELECT 1 FROM leaders WHERE cluster_id = :cluster AND term = :term AND beat = :beat)""")


class SessionSeat:
    """`engine` makes connections of the lock's own; `named` is what a holder's sessions are called."""

    def __init__(self, engine: Engine, key: int, named: Callable[[str], str], mine: str) -> None:
        self._engine = engine
        self._backend: Backend = backend_behind(engine)
        self._cluster = key
        self._named = named
        self._mine = mine
        self._connection: Connection | None = None
        self._pid: int | None = None
        """Of the session that has the lock."""
        self._using = threading.Lock()

    def take(self) -> bool:
        with self._using:
            try:
                pid, got = self._in_session(lambda c: c.execute(_TRY, {"cluster": self._cluster}).one())
            except DBAPIError as error:
                self._end()
                raise self._backend.explained(error) from error
            self._pid = int(pid) if got else None
            return bool(got)

    def check(self, term: int) -> None:
        place = self._backend.place
        with self._using:
            if self._pid is None:
                raise NotLeader(f"{place}: the lead is lost: its session has ended")
            try:
                found = self._in_session(lambda c: c.execute(_CHECK, {"cluster": self._cluster}).one())
            except DBAPIError as error:
                self._end()
                raise NotLeader(f"the lead is lost with its session: {self._backend.explained(error)}") from error
            if found.pid != self._pid:
                raise NotLeader(f"{place}: the lead is lost: a proxy has put us in another session; connect without it")
            if found.term != term:
                raise NotLeader(
                    f"{place}: the lead of term {term} is lost: {found.holder or 'nobody'} leads since, in term "
                    f"{found.term}"
                )

    def beat(self, term: int, now: float) -> bool:
        with self._using:
            if self._pid is None:
                return False
            try:
                return self._in_session(lambda c: leaders.beat(c, self._cluster, term, now))
            except DBAPIError as error:
                if error.connection_invalidated:
                    self._end()
                raise self._backend.explained(error) from error

    def free(self) -> None:
        with self._using:
            self._end()

    def oust(self, leader: LeaderRecord) -> bool:
        about: dict[str, Any] = {"cluster": self._cluster, "term": leader.term, "beat": leader.beat}
        about |= {"named": self._named(leader.holder), "mine": self._mine}
        with self._using:
            try:
                return bool(self._in_session(lambda c: c.execute(_OUST, about).all()))
            except DBAPIError as error:
                self._end()
                raise StoreError(
                    f"{self._backend.place}: {leader.holder} hangs and its session cannot be ended; end it there, or "
                    f"kill the process: {self._backend.explained(error)}"
                ) from error

    def _in_session(self, ask: Callable[[Connection], T]) -> T:
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with self._connection.begin():
            return ask(self._connection)

    def _end(self) -> None:
        """End the session, and the lock with it."""
        connection, self._connection, self._pid = self._connection, None, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                # It would go back to the engine's pool otherwise, and live on.
                connection.invalidate()
                connection.close()

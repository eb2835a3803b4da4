"""Who leads the companions of one cluster: a lock that dies with its holder, and a term that fences it.

The lock says who may lead; each kind of database has one of its own. Whoever has it begins a term, one above the last.
Who was paused, or cut off, and has lost the lock without knowing finds a newer term, or the lock gone, before it next
writes (`leaders.check_term`) or acts (`LeaderLock.check`).
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ones_db import leaders
from ones_db.backend import Backend, this_process
from ones_db.engine import backend_behind, backend_of, transaction
from ones_db.errors import NotLeader, StoreError
from ones_db.leaders import LeaderRecord
from ones_db.postgres import named
from ones_db.sqlite import SQLite
from ones_db.store import Store

T = TypeVar("T")

FREED_S = 5.0
"""How long a server takes at most to end a session that it was told to end."""

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
_END_SESSIONS = text(f"""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND (pid IN ({_HOLDERS}) OR (application_name = :named AND application_name <> :mine))
    AND EXISTS (SELECT 1 FROM leaders WHERE cluster_id = :cluster AND term = :term AND beat = :beat)""")


class LeaderLock:
    """One candidate for the lead of a cluster. May be used by several threads; does not survive a fork."""

    def __init__(self, url: str, cluster: str) -> None:
        """Takes nothing yet. Raises what `Store.open` raises."""
        with Store.open(url, cluster) as store:
            self._cluster = store.key
        backend = backend_of(url)
        self.place = backend.place
        self.holder = this_process()
        self.term: int | None = None
        """Of this candidate while it leads, as far as it knows."""
        self._engine = backend.engine("write")
        self._lock = _lock_of(backend, cluster, self._cluster)

    def take(self, now: float) -> int | None:
        """Take the lead if nobody has it; returns the new term, None where another one leads.

        `now` is stored, Unix seconds. Raises `StoreError` where the database cannot be asked.
        """
        if self.term is not None:
            self._lose()
        if not self._lock.take():
            return None
        try:
            with transaction(self._engine, write=True) as connection:
                self.term = leaders.begin_term(connection, self._cluster, self.holder, now)
        except BaseException:
            self._lock.release()
            raise
        return self.term

    def check(self) -> None:
        """Raise `NotLeader` unless this candidate leads at this moment: the lock is still its own, and its term the
        newest. Where the database cannot be asked it does not lead either."""
        term = self.term
        if term is None:
            raise NotLeader(f"{self.place}: this companion does not lead")
        try:
            self._lock.check(term)
        except NotLeader:
            self._lose()
            raise

    def beat(self, now: float) -> None:
        """Send a heartbeat: the standbys know by it that this candidate runs. Raises `NotLeader` as `check` does, or
        `StoreError` where this could not be stored."""
        term = self.term
        if term is None or not self._lock.beat(term, now):
            raise NotLeader(f"{self.place}: this companion does not lead")

    def leave(self, now: float) -> None:
        """Give the lead back. Raises `StoreError` where that could not be stored; the lead is free all the same."""
        term, self.term = self.term, None
        try:
            if term is not None:
                with transaction(self._engine, write=True) as connection:
                    leaders.end_term(connection, self._cluster, term, now)
        finally:
            self._lock.release()

    def leader(self) -> LeaderRecord | None:
        """Who leads, or did last, by what is written down."""
        with transaction(self._engine) as connection:
            return leaders.leader(connection, self._cluster)

    def take_over(self, leader: LeaderRecord, now: float) -> int | None:
        """Take the lead from a leader that hangs: returns the new term, None where that cannot be done.

        Nothing happens unless that leader leads and has sent no heartbeat since. Raises `StoreError` where the database
        does not let us.
        """
        if not self._lock.take_over(leader):
            return None
        until = time.monotonic() + FREED_S
        while (term := self.take(now)) is None and time.monotonic() < until:
            time.sleep(0.02)
        return term

    def close(self) -> None:
        """Let go of the lock, if it is held, and of the database."""
        self._lose()
        self._engine.dispose()

    def __enter__(self) -> LeaderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lose(self) -> None:
        self.term = None
        self._lock.release()


class Lock(Protocol):
    """A lock that one process has at a time, of all that lead one cluster over one database. It is free as soon as its
    holder is gone, however that ended."""

    def take(self) -> bool:
        """Take it if it is free; returns whether this one has it. Raises `StoreError` where it cannot be asked for."""

    def check(self, term: int) -> None:
        """Raise `NotLeader` unless this one has it at this moment, and that term is the newest."""

    def beat(self, term: int, now: float) -> bool:
        """Write down that its holder lives, and return whether that term is the newest. Raises `StoreError`."""

    def release(self) -> None:
        """Give it up, if this one has it. Raises nothing."""

    def take_over(self, leader: LeaderRecord) -> bool:
        """End the sessions of a holder that hangs, if it still is what `leader` says; returns whether anything can be
        ended here. Raises `StoreError` where we may not."""


def _lock_of(backend: Backend, cluster: str, key: int) -> Lock:
    """The lock that fits the database, for a cluster (its name, and its clusters.id), not taken yet."""
    engine = backend.engine("write")
    return FileLock(backend.path, engine, cluster, key) if isinstance(backend, SQLite) else SessionLock(engine, key)


class FileLock:
    """Over SQLite: an advisory lock (`flock`) on the file `DATABASE.CLUSTER.lead`, mode 600, one for each cluster.

    The kernel frees it when its holder is gone. A holder that is stopped keeps it: nobody can act in its place, nor
    can two ever act. The file is never deleted, since whoever waits for it would wait for one that nobody else finds.
    """

    def __init__(self, database: Path, engine: Engine, cluster: str, key: int) -> None:
        # By its real name, however it was named: two that lead must meet at one file.
        self.path = Path(f"{database.resolve()}.{quote(cluster, safe='')}.lead")
        self._engine = engine
        self._cluster = key
        self._file: int | None = None

    def take(self) -> bool:
        self.release()
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

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def take_over(self, leader: LeaderRecord) -> bool:
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


class SessionLock:
    """Over PostgreSQL: an advisory lock of a session of its own, whose connections `engine` makes.

    The server frees it when the session ends: at once when its process is gone; when its host is gone, or it hangs, as
    soon as one that stands by ends the session.
    """

    def __init__(self, engine: Engine, key: int) -> None:
        self._engine = engine
        self._backend: Backend = backend_behind(engine)
        self._cluster = key
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

    def release(self) -> None:
        with self._using:
            self._end()

    def take_over(self, leader: LeaderRecord) -> bool:
        about: dict[str, Any] = {"cluster": self._cluster, "term": leader.term, "beat": leader.beat}
        about |= {"named": named(leader.holder), "mine": named(this_process())}
        with self._using:
            try:
                return bool(self._in_session(lambda c: c.execute(_END_SESSIONS, about).all()))
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

"""Leadership among a cluster's companions: a lock that is freed when its holder ends, and terms that fence writes.

The lock decides who may lead; each kind of database has its own. A companion that gets the lock begins a term, whose
number is one above the last term's. A companion that was paused or cut off may lose the lock without noticing. So
`engine.check_term` checks the term before each write, and `LeaderLock.check` before each action on Slurm.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ones_db.backend import Backend, NotLeader, StoreError, this_process
from ones_db.engine import LeaderRecord, add_or_replace, backend_of, check_term, leader_of, transaction
from ones_db.postgres import named
from ones_db.sqlite import SQLite
from ones_db.store import Store
from ones_db.tables import LEADERS

FREED_S = 5.0
"""Longest wait for a PostgreSQL server to end a session, in seconds."""

# Two numbers make the key: the table's own, which tells one schema from another, and the cluster's.
_KEY = "(to_regclass('leaders')::oid::int8 << 32) | :cluster"
_TRY = text(f"SELECT pg_backend_pid(), pg_try_advisory_lock({_KEY})")
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


class LeaderLock(AbstractContextManager["LeaderLock"]):
    """Leadership of a cluster, as one process seeks or holds it. Its threads may share it; a forked child may not."""

    def __init__(self, url: str, cluster: str) -> None:
        """Prepare, but do not take the lead. Raises the same errors as `Store.open`."""
        with Store.open(url, cluster) as store:
            self._cluster = store.key
        backend = backend_of(url)
        self.place = backend.place
        self.holder = this_process()
        self.term: int | None = None
        """Number of the term, as far as this process knows; None if it does not lead."""
        self._engine = backend.engine("write")
        file = FileLock(backend.path, self._engine, cluster) if isinstance(backend, SQLite) else None
        self._lock: Lock = file or SessionLock(backend, self._cluster)

    def take(self, now: float, hung: LeaderRecord | None = None) -> int | None:
        """Take the lead if it is free. Return the new term, or None if another companion leads.

        `hung` is the last known record of a leader that sends no heartbeats. If it is still the stored record, the lead
        is taken from that leader, which only PostgreSQL can do. `now`, in Unix seconds, becomes the start of the term.
        Raises `StoreError` if the database cannot be reached or refuses.
        """
        if self.term is not None:
            self._lose()
        if not self._lock.take(hung):
            return None
        try:
            with transaction(self._engine, write=True) as connection:
                before = leader_of(connection, self._cluster)
                term = 1 if before is None else before.term + 1
                row = {"cluster_id": self._cluster, "term": term, "holder": self.holder, "since": now, "beat": now}
                add_or_replace(connection, LEADERS, ("cluster_id",), [row])
        except BaseException:
            self._lock.release()
            raise
        self.term = term
        return term

    def check(self) -> None:
        """Raise `NotLeader` if this process lost the lock, there is a newer term, or the database does not answer."""
        term = self.own_term()
        try:
            with self._lock.held() as connection:
                check_term(connection, self._cluster, term)
        except StoreError as error:
            self._lose()
            if isinstance(error, NotLeader):
                raise
            raise NotLeader(f"this companion cannot check that it still leads: {error}") from error

    def beat(self, now: float) -> None:
        """Store a heartbeat, by which standbys see that this process runs. Raises `NotLeader` and `StoreError`."""
        term = self.own_term()
        with self._lock.held(write=True) as connection:
            check_term(connection, self._cluster, term)
            connection.execute(self._row(term).values(beat=now))

    def leave(self, now: float) -> None:
        """Give up the lead. Raises `StoreError` if the term's end could not be stored; the lock is free even then."""
        term, self.term = self.term, None
        try:
            if term is not None:
                with transaction(self._engine, write=True) as connection:
                    connection.execute(self._row(term).values(holder="", beat=now))
        finally:
            self._lock.release()

    def leader(self) -> LeaderRecord | None:
        """Return the companion that leads or led last; None if there was never one."""
        with transaction(self._engine) as connection:
            return leader_of(connection, self._cluster)

    def close(self) -> None:
        """Release the lock, if this process has it, and close all connections."""
        self._lose()
        self._engine.dispose()

    def __exit__(self, *_: object) -> None:
        self.close()

    def own_term(self) -> int:
        """Return the number of this process's term. Raises `NotLeader` if it does not lead, as far as it knows."""
        if self.term is None:
            raise NotLeader(f"{self.place}: this companion does not lead")
        return self.term

    def _row(self, term: int) -> Any:
        return LEADERS.update().where(LEADERS.c.cluster_id == self._cluster, LEADERS.c.term == term)

    def _lose(self) -> None:
        self.term = None
        self._lock.release()


class Lock(Protocol):
    """Lock for leading one cluster. One process at a time holds it, and it is free once that process has ended."""

    def take(self, hung: LeaderRecord | None = None) -> bool:
        """Take the lock if it is free; return True if this process has it now. Raises `StoreError`.

        If `hung` is still the stored leader, its database sessions are ended first.
        """

    def held(self, *, write: bool = False) -> AbstractContextManager[Connection]:
        """Context of a transaction for the lock's holder. Raises `NotLeader` if this process is not the holder."""

    def release(self) -> None:
        """Release the lock if this process holds it; raise no error."""


class FileLock:
    """Lock for SQLite: `flock` on a file `DATABASE.CLUSTER.lead` (mode 600), freed by the kernel at its holder's end.

    A suspended holder (SIGSTOP) keeps the lock, and is not killed, so two companions never act at once. The file is
    never deleted: one process could then hold a lock on the deleted file, and another on a new file.
    """

    def __init__(self, database: Path, engine: Engine, cluster: str) -> None:
        # By its real name, however it was named: two that lead must meet at one file.
        self.path = Path(f"{database.resolve()}.{quote(cluster, safe='')}.lead")
        self._engine = engine
        self._file: int | None = None

    def take(self, hung: LeaderRecord | None = None) -> bool:
        self.release()
        if hung is not None:
            return False
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

    @contextmanager
    def held(self, *, write: bool = False) -> Iterator[Connection]:
        file = self._file
        if file is None or not self._in_place(file):
            raise NotLeader(f"{self.path}: the lead is lost: the lock file was deleted or replaced")
        with transaction(self._engine, write=write) as connection:
            yield connection

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise StoreError(
                f"{self.path}: the leader's lock cannot be opened: {error.strerror}; it must be a file of "
                "the companion's own account, in a directory that it may write to"
            ) from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise StoreError(f"{self.path}: not a plain file, which the leader's lock must be")
        return file

    def _in_place(self, file: int) -> bool:
        """Return True if this open file is still the one at the lock's path."""
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(file))
        except OSError:
            return False


class SessionLock:
    """Lock for PostgreSQL: an advisory lock in a database session of its own.

    The server frees the lock when the session ends. If the holder's process ends, the session ends at once. If the
    holder hangs or its host is down, a standby ends the session.
    """

    def __init__(self, backend: Backend, key: int) -> None:
        self._engine = backend.engine("write")
        self._backend = backend
        self._cluster = key
        self._connection: Connection | None = None
        self._pid: int | None = None
        """The server's process id for the session that holds the lock; None without the lock."""
        self._using = threading.Lock()

    def take(self, hung: LeaderRecord | None = None) -> bool:
        with self._using:
            if hung is not None and not self._end_sessions(hung):
                return False
            until = time.monotonic() + FREED_S
            while not (got := self._try()) and hung is not None and time.monotonic() < until:
                time.sleep(0.02)
            return got

    @contextmanager
    def held(self, *, write: bool = False) -> Iterator[Connection]:
        lost = f"{self._backend.place}: the lead is lost"
        with self._using:
            if self._pid is None:
                raise NotLeader(f"{lost}: its session has ended")
            try:
                with self._session() as connection:
                    if connection.scalar(text("SELECT pg_backend_pid()")) != self._pid:
                        raise NotLeader(f"{lost}: a proxy has put us in another session; connect without it")
                    yield connection
            except DBAPIError as error:
                why = self._backend.explained(error)
                if error.connection_invalidated:
                    self._end()
                    raise NotLeader(f"the lead is lost with its session: {why}") from error
                raise why from error

    def release(self) -> None:
        with self._using:
            if self._pid is not None:
                # The server notices the end of a session only some time later.
                with suppress(SQLAlchemyError), self._session() as connection:
                    connection.execute(text("SELECT pg_advisory_unlock_all()"))
            self._end()

    def _try(self) -> bool:
        try:
            with self._session() as connection:
                pid, got = connection.execute(_TRY, {"cluster": self._cluster}).one()
        except DBAPIError as error:
            self._end()
            raise self._backend.explained(error) from error
        self._pid = int(pid) if got else None
        return bool(got)

    def _end_sessions(self, hung: LeaderRecord) -> bool:
        """End the database sessions of a holder that hangs; return True if there were any."""
        about: dict[str, Any] = {"cluster": self._cluster, "term": hung.term, "beat": hung.beat}
        about |= {"named": named(hung.holder), "mine": named(this_process())}
        try:
            with self._session() as connection:
                return bool(connection.execute(_END_SESSIONS, about).all())
        except DBAPIError as error:
            self._end()
            raise StoreError(
                f"{self._backend.place}: {hung.holder} hangs and its session cannot be ended; end it there, or kill "
                f"the process: {self._backend.explained(error)}"
            ) from error

    @contextmanager
    def _session(self) -> Iterator[Connection]:
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with self._connection.begin():
            yield self._connection

    def _end(self) -> None:
        connection, self._connection, self._pid = self._connection, None, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                # It would go back to the engine's pool otherwise, and live on.
                connection.invalidate()
                connection.close()

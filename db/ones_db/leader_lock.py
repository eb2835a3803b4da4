"""The lead among the companions of one cluster: a lock that dies with its holder, and a term that fences it.

The lock says who may lead; each database has one of its own kind. Whoever has it begins a term, one above the last.
Who was paused, or cut off, and has lost the lock without knowing finds a newer term, or the lock gone, before it next
writes (`leaders.check_term`) or acts (`LeadLock.check`).
"""

from __future__ import annotations

import time
from types import TracebackType

from ones_db import leaders
from ones_db.backend import Seat, this_process
from ones_db.engine import backend_of, transaction
from ones_db.errors import NotLeader
from ones_db.records import LeaderRecord
from ones_db.store import Store

FREED_S = 5.0
"""How long a server takes at most to end a session that it was told to end."""


class LeadLock:
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
        self._seat: Seat = backend.seat(cluster, self._cluster)

    def take(self, now: float) -> int | None:
        """Take the lead if nobody has it; returns the new term, None where another one leads.

        `now` is written down, Unix seconds. Raises `StoreError` where nobody can say.
        """
        if self.term is not None:
            self._lose()
        if not self._seat.take():
            return None
        try:
            with transaction(self._engine, write=True) as connection:
                self.term = leaders.begin_term(connection, self._cluster, self.holder, now)
        except BaseException:
            self._seat.free()
            raise
        return self.term

    def check(self) -> None:
        """Raise `NotLeader` unless this candidate leads at this moment: the lock is still its own, and its term the
        newest. Where the database cannot be asked it does not lead either."""
        term = self.term
        if term is None:
            raise NotLeader(f"{self.place}: this companion does not lead")
        try:
            self._seat.check(term)
        except NotLeader:
            self._lose()
            raise

    def beat(self, now: float) -> None:
        """Let those who stand by know that this candidate lives. Raises `NotLeader` as `check` does, or `StoreError`
        where this could not be stored."""
        term = self.term
        if term is None or not self._seat.beat(term, now):
            raise NotLeader(f"{self.place}: this companion does not lead")

    def leave(self, now: float) -> None:
        """Give the lead back; raises `StoreError` where nobody could be told, once it is free all the same."""
        term, self.term = self.term, None
        try:
            if term is not None:
                with transaction(self._engine, write=True) as connection:
                    leaders.end_term(connection, self._cluster, term, now)
        finally:
            self._seat.free()

    def leader(self) -> LeaderRecord | None:
        """Who leads, or did last, by what is written down."""
        with transaction(self._engine) as connection:
            return leaders.leader(connection, self._cluster)

    def oust(self, leader: LeaderRecord, now: float) -> int | None:
        """Take the lead from a leader that hangs: returns the new term, None where that cannot be done.

        Nothing happens unless that leader leads and was not heard of since. Raises `StoreError` where the database
        does not let us.
        """
        if not self._seat.oust(leader):
            return None
        until = time.monotonic() + FREED_S
        while (term := self.take(now)) is None and time.monotonic() < until:
            time.sleep(0.02)
        return term

    def close(self) -> None:
        """Let go of the lock, if it is held, and of the database."""
        self._lose()
        self._engine.dispose()

    def __enter__(self) -> LeadLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lose(self) -> None:
        self.term = None
        self._seat.free()

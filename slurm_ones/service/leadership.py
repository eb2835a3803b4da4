"""Leader election among companions that share a database: one leads, all others stand by."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ones_db import LeaderRecord, NotLeader, StoreError
from ones_db.leader import LeaderLock

log = logging.getLogger(__name__)

POLLS, HEARTBEATS = 10, 5
"""Numbers of polls by a standby, and of heartbeats by the leader, in `takeover_s` seconds."""
POLL_S = 5.0
"""Longest wait between two polls of a standby, in seconds."""


class Election:
    """Leader election. In this base class, for simulations and tests, the companion always leads."""

    wait_s = 0.0
    """Seconds between two polls of a standby."""

    def take(self) -> bool:
        """Return True if this companion leads, after taking the lead if no companion has it.

        The first call after the lead was lost returns False, so that the caller drops what it remembers of jobs. Raises
        `StoreError` if the database does not answer.
        """
        return True

    def leave(self) -> None:
        """Give up the lead; raise no error."""


class Leadership(Election):
    """Leader election for one cluster, by a lock in the shared database (`ones_db.leader`).

    A thread of the leader sends heartbeats. If they stop, a standby ends the leader's database sessions, if the
    database can, and takes over. Each standby measures the time since the last heartbeat by its own clock `monotonic`;
    `clock` gives the times to store.
    """

    def __init__(
        self,
        lock: LeaderLock,
        takeover_s: float,
        *,
        say: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to take over after `takeover_s` seconds without a heartbeat. `say` gets a line at each change of
        leader."""
        self.wait_s = min(takeover_s / POLLS, POLL_S)
        self._lock = lock
        self._takeover_s = takeover_s
        self._say = say
        self._clock = clock
        self._monotonic = monotonic
        self._leads = False
        self._heartbeat: _Heartbeat | None = None
        self._seen: LeaderRecord | None = None
        """Newest record of the leader, first seen at `_seen_at` and last read at `_polled_at`."""
        self._seen_at = self._polled_at = 0.0
        self._said: tuple[str, int] | None = None

    @property
    def term(self) -> int:
        """Number of this companion's term. Raises `NotLeader` if this companion does not lead."""
        return self._lock.own_term()

    def check(self) -> None:
        """Raise `NotLeader` if the database does not confirm that this companion leads now."""
        self._lock.check()

    def take(self) -> bool:
        if self._leads:
            try:
                self._lock.check()
                return True
            except NotLeader as error:
                log.warning("%s", error)
                self._step_down()
                return False
        term = self._lock.take(self._clock())
        if term is None:
            term = self._stand_by()
        if term is None:
            return False
        self._leads, self._seen, self._said = True, None, None
        self._heartbeat = _Heartbeat(self._lock, self._takeover_s / HEARTBEATS, self._clock)
        self._say(f"leads, in term {term}: it decides about the jobs here")
        return True

    def leave(self) -> None:
        self._step_down()
        try:
            self._lock.leave(self._clock())
        except StoreError as error:
            log.warning("%s; the lead is free all the same", error)

    def _step_down(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._heartbeat, self._leads = None, False

    def _stand_by(self) -> int | None:
        """Check the leader's heartbeat. If it is late, take over and return the new term; otherwise return None."""
        leader, now = self._lock.leader(), self._monotonic()
        # While this one was stopped itself it could not poll.
        was_stopped = now - self._polled_at > self._takeover_s
        self._polled_at = now
        if leader is None:
            # The first one of all has its lock, and is not written down yet.
            self._say_once("stands by", 0, "stands by: another companion leads")
            return None
        if self._seen != leader or was_stopped:
            self._seen, self._seen_at = leader, now
            self._say_once("stands by", leader.term, f"stands by: {leader.holder or 'another companion'} leads")
            return None
        if now - self._seen_at < self._takeover_s:
            return None
        term = self._lock.take(self._clock(), leader)
        if term is not None:
            log.warning(
                "%s sent no heartbeat for %.0f s and does not lead any more", leader.holder, now - self._seen_at
            )
        elif leader.holder:
            host, _, pid = leader.holder.rpartition(":")
            self._say_once(
                "hangs",
                leader.term,
                f"stands by: {leader.holder} sent no heartbeat for {now - self._seen_at:.0f} s and still has the lead; "
                f"it is stopped or hangs. To let this companion lead, run on {host}: kill -9 {pid}",
            )
        return term

    def _say_once(self, what: str, term: int, line: str) -> None:
        if self._said != (what, term):
            self._said = (what, term)
            self._say(line)


class _Heartbeat:
    """Thread that stores the leader's heartbeats."""

    def __init__(self, lock: LeaderLock, every_s: float, clock: Callable[[], float]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(lock, every_s, clock), name="lead", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; wait at most one second for its end, which a hanging database may delay."""
        self._stop.set()
        self._thread.join(1.0)

    def _beat(self, lock: LeaderLock, every_s: float, clock: Callable[[], float]) -> None:
        while not self._stop.wait(every_s):
            try:
                lock.beat(clock())
            except NotLeader:
                # Whoever is about to act finds out too.
                return
            except StoreError as error:
                log.info("the heartbeat for standbys could not be stored: %s", error)

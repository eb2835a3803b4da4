"""Choice among several companions over one database: one is the leader, the others stand by."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ones_db import LeaderRecord, NotLeader, StoreError
from ones_db.leader import LeaderLock

log = logging.getLogger(__name__)

POLLS, HEARTBEATS = 10, 5
"""Numbers of polls of a standby, and of heartbeats of a leader, within the take-over time."""
POLL_S = 5.0
"""The longest wait between two polls."""


class Election(Protocol):
    """Methods that `daemon.Daemon` needs of it."""

    wait_s: float
    """Seconds that a standby waits before it polls again."""

    def take(self) -> bool:
        """Tell whether this companion leads: still, or from now on where no other one does.

        Where it led and has lost the lead it says so once, also where it could have it back at once: what it remembers
        may no longer be so. Raises `StoreError` where the database cannot be asked.
        """

    def leave(self) -> None:
        """Let another one lead. Raises nothing."""


class NoElection:
    """There is no other companion: in simulations and tests."""

    wait_s = 0.0

    def take(self) -> bool:
        return True

    def leave(self) -> None:
        """No other one waits for it."""


class Leadership:
    """The lead of one cluster, shared by all companions over one database (`ones_db.leader`).

    A thread of the leader sends heartbeats, however long a tick takes: a process without them is gone, stopped or cut
    off. A standby then ends its sessions, where the database can, and takes over. Time is counted by the standby's own
    clock (`monotonic`), so no two clocks need to agree; `clock` gives the times that are stored.
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
        """`takeover_s` is the longest time between two heartbeats of a leader; `say` gets a line whenever the leader
        changes."""
        self.wait_s = min(takeover_s / POLLS, POLL_S)
        self._lock = lock
        self._takeover_s = takeover_s
        self._say = say
        self._clock = clock
        self._monotonic = monotonic
        self._leads = False
        self._heartbeat: _Heartbeat | None = None
        self._seen: LeaderRecord | None = None
        """The leader's newest record, when it was first seen, and when this one last polled."""
        self._seen_at = self._polled_at = 0.0
        self._said: tuple[str, int] | None = None

    @property
    def term(self) -> int:
        """Term of this companion. Raises `NotLeader` if it does not lead."""
        if self._lock.term is None:
            raise NotLeader(f"{self._lock.place}: this companion does not lead")
        return self._lock.term

    def check(self) -> None:
        """Raise `NotLeader` unless this companion leads at this moment, as the database has it."""
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
        self._say(f"leads, in term {term}")
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
        """Wait for the leader's next heartbeat; the new term where none came for too long and this one took over."""
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
            log.warning("%s sent no heartbeat for %.0f s, and leads no more", leader.holder, now - self._seen_at)
        elif leader.holder:
            host, _, pid = leader.holder.rpartition(":")
            self._say_once(
                "hangs",
                leader.term,
                f"stands by: {leader.holder} sent no heartbeat for {now - self._seen_at:.0f} s and still has the lead; "
                f"it is stopped or hangs. To let this one lead, on {host}: kill -9 {pid}",
            )
        return term

    def _say_once(self, what: str, term: int, line: str) -> None:
        if self._said != (what, term):
            self._said = (what, term)
            self._say(line)


class _Heartbeat:
    """A thread that sends heartbeats: the others know by them that this process runs."""

    def __init__(self, lock: LeaderLock, every_s: float, clock: Callable[[], float]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(lock, every_s, clock), name="lead", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that waits for the database ends when that has answered."""
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

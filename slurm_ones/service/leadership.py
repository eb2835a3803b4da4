"""Which of several companions over one database acts: one leads, and the others stand by."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ones_db import LeaderRecord, NotLeader, StoreError
from ones_db.leader_lock import LeaderLock

log = logging.getLogger(__name__)

POLLS, HEARTBEATS = 10, 5
"""How often within the take-over time one that stands by looks, and one that leads is heard of."""
POLL_S = 5.0
"""The longest wait of one that stands by."""


class Election(Protocol):
    """What `daemon.Daemon` needs of it."""

    wait_s: float
    """How long a companion that stands by waits before it asks again."""

    def take(self) -> bool:
        """Whether this one leads: still, or from now on where nobody else does.

        Where it led and has lost the lead it says so once, also where it could have it back at once: what it remembers
        may no longer be so. Raises `StoreError` where nobody can say.
        """

    def leave(self) -> None:
        """Let another one lead. Raises nothing."""


class NoElection:
    """There is no other companion: in simulations and tests."""

    wait_s = 0.0

    def take(self) -> bool:
        return True

    def leave(self) -> None:
        """Nobody waits for it."""


class Leadership:
    """The lead of one cluster, shared by all companions over one database (`ones_db.leader_lock`).

    One that leads is heard of by a thread, however long its tick takes: a process that is not is gone, stopped or cut
    off. One that stands by then ends its sessions, where the database can, and leads. Time is counted by the clock of
    the one that waits (`monotonic`), so no two clocks need agree; `clock` is what is written down.
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
        """`takeover_s` is how long a leader may not be heard of; `say` is told who leads, when that changes."""
        self.wait_s = min(takeover_s / POLLS, POLL_S)
        self._lock = lock
        self._takeover_s = takeover_s
        self._say = say
        self._clock = clock
        self._monotonic = monotonic
        self._leads = False
        self._heartbeat: _Heartbeat | None = None
        self._heard: LeaderRecord | None = None
        """The leader as it was heard of last, when that was, and when it was last looked for."""
        self._heard_at = self._looked_at = 0.0
        self._said: tuple[str, int] | None = None

    @property
    def term(self) -> int:
        """That of this companion. Raises `NotLeader` where it does not lead."""
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
        self._leads, self._heard, self._said = True, None, None
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
        """Listen for the leader; the new term where it was not heard of for too long, and had to yield."""
        leader, now = self._lock.leader(), self._monotonic()
        # While this one was stopped itself it could not listen.
        deaf = now - self._looked_at > self._takeover_s
        self._looked_at = now
        if leader is None:
            return None
        if self._heard != leader or deaf:
            self._heard, self._heard_at = leader, now
            self._tell("stands by", leader, f"stands by: {leader.holder or 'another companion'} leads")
            return None
        if now - self._heard_at < self._takeover_s:
            return None
        term = self._lock.take_over(leader, self._clock())
        if term is not None:
            log.warning("%s was not heard of for %.0f s, and leads no more", leader.holder, now - self._heard_at)
        elif leader.holder:
            host, _, pid = leader.holder.rpartition(":")
            self._tell(
                "hangs",
                leader,
                f"stands by: {leader.holder} was not heard of for {now - self._heard_at:.0f} s and still has the lead; "
                f"it is stopped or hangs. To let this one lead, on {host}: kill -9 {pid}",
            )
        return term

    def _tell(self, what: str, leader: LeaderRecord, line: str) -> None:
        """Say the line, once a leader."""
        if self._said != (what, leader.term):
            self._said = (what, leader.term)
            self._say(line)


class _Heartbeat:
    """A thread that lets the others know that this process lives."""

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
                # Whoever is about to act finds it out too.
                return
            except StoreError as error:
                log.info("the heartbeat for standbys could not be stored: %s", error)

"""Main loop of the companion: it ticks once an interval, and advances open resizes in between.

Several companions may run over one database. Only the leader ticks; all others stand by.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ones_db import NotLeader, StoreError
from slurm_ones.act.transitions import HOLDS_JOB, NEEDS_COMPANION
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import ConfigError
from slurm_ones.service.leadership import Election
from slurm_ones.service.wake import LOOK_S, Waking
from slurm_ones.slurm.client import Unreachable

log = logging.getLogger(__name__)

PING_S = 10.0
"""Longest time between two pings of the watchdog, in seconds."""


class Stop(Protocol):
    """Request to stop, for which `Daemon.run` can wait: a `threading.Event`, or the simulator's in virtual time."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool:
        """Wait for this many seconds, or until the stop is requested."""


class SignalStop:
    """Request to stop that a signal handler may set at any moment.

    `threading.Event` could deadlock: a handler may interrupt the main thread while `Event.wait` holds the event's lock,
    for which `Event.set` then waits.
    """

    def __init__(self) -> None:
        self._set = False
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def wake_at_signals(self) -> None:
        """End a wait at each signal that has a handler, even if the signal came just before the wait. Main thread
        only."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def set(self) -> None:
        """Request the stop."""
        self._set = True
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def is_set(self) -> bool:
        """Return True once the stop is requested."""
        return self._set

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the request or a signal; return True if the stop is requested."""
        if not self._set and self._poll.poll(1000 * timeout):
            with suppress(BlockingIOError):
                os.read(self._read, 4096)
        return self._set


class Daemon:
    """Loop in which a companion ticks while it leads, until it is stopped.

    `make` returns a new companion with its own store: at the start, after a reload, and after the lead was lost and
    taken again. `watchdog_ping` is called before each tick, and at least every `PING_S` seconds while the loop waits.
    `jitter` returns a random factor for each wait between ticks, which `waking` may end early. `sleep` replaces
    `Stop.wait` once a stop is requested, since `Stop.wait` then returns at once.
    """

    def __init__(
        self,
        make: Callable[[], Companion],
        *,
        lead: Election | None = None,
        watchdog_ping: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
        jitter: Callable[[], float] = lambda: 1.0,
        waking: Waking | None = None,
    ) -> None:
        self._make = make
        self._lead = lead or Election()
        self._watchdog_ping = watchdog_ping
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._waking = waking
        self._companion: Companion | None = None
        self._wait = 0.0
        self._reload = False

    def reload(self) -> None:
        """Request a new companion with new settings before the next tick. A signal handler may call this.

        The present wait ends at its next watchdog ping. If `make` raises `ConfigError`, the old companion stays.
        """
        self._reload = True

    def run(self, stop: Stop, on_tick: Callable[[Tick], None] = lambda tick: None, *, ticks: int = 0) -> None:
        """Tick until `stop` is set. Between ticks, advance open resizes.

        If `ticks` is given, end after this number of ticks, failed ones included, or at once if another companion
        leads. Before such an end, advance resizes until none needs a companion, within a time limit.

        A tick fails if controller or database is unreachable. Then the wait before the next tick doubles. It is at most
        ten intervals; while resizes are open, at most one interval.

        At its end, a leader releases the jobs that it holds, within `resize.leave_s` seconds, and ends deferrals.
        Raises the `ConfigError` of `make`, unless an earlier companion still leads.
        """
        left = ticks
        try:
            while True:
                self._ping()
                companion = self._leading(stop)
                # Checked after the lead: a companion that has just lost it must not release the new leader's jobs.
                if stop.is_set() or (ticks and companion is None):
                    break
                if companion is not None:
                    left -= 1
                    self._tick(companion, stop, on_tick, last=left == 0)
                    if left == 0:
                        break
            if self._companion is not None:
                if ticks:
                    self._finish(self._companion, stop)
                self._leave(self._companion)
        finally:
            self._drop()
            self._lead.leave()

    def _leading(self, stop: Stop) -> Companion | None:
        """Return the companion if it leads. Otherwise wait for the next poll and return None."""
        try:
            if self._lead.take():
                return self._newest()
            self._drop()
        except (Unreachable, StoreError) as error:
            log.error("%s; trying to take the lead again in %.0f s", error, self._lead.wait_s)
        # A reload is for one that leads: whoever takes the lead is made of the newest settings anyway.
        again, self._reload = self._reload and self._companion is not None, False
        self._pause(stop, self._lead.wait_s)
        self._reload = self._reload or again
        return None

    def _newest(self) -> Companion:
        old = self._companion
        if old is not None and not self._reload:
            return old
        self._reload = False
        try:
            self._companion = self._make()
        except ConfigError as error:
            if old is None:
                raise
            log.error("%s; the old settings stay in force", error)
            return old
        except (Unreachable, StoreError):
            self._reload = old is not None
            raise
        self._wait = self._companion.settings.interval_s
        if old is not None and old is not self._companion:
            old.close()
        return self._companion

    def _drop(self) -> None:
        if self._companion is not None:
            self._companion.close()
        self._companion = None

    def _tick(self, companion: Companion, stop: Stop, on_tick: Callable[[Tick], None], *, last: bool) -> None:
        """Run one tick, and wait after it unless it is the `last`."""
        try:
            if self._waking is not None:
                self._waking.begins()
            on_tick(companion.tick())
            if self._waking is not None:
                self._waking.ended()
            self._wait = companion.settings.interval_s
            if not last:
                self._between(companion, stop, self._wait * self._jitter())
        except NotLeader as error:
            # The next round finds that another one leads.
            log.warning("%s", error)
        except (Unreachable, StoreError) as error:
            log.error("%s%s", error, self._next_try(companion, last))
            self._pause(stop, 0.0 if last else self._wait * self._jitter())
        except Exception:
            # One odd job must not leave everybody else's resizes unfinished.
            log.exception("this tick failed%s", self._next_try(companion, last))
            self._pause(stop, 0.0 if last else self._wait * self._jitter())

    def _next_try(self, companion: Companion, last: bool) -> str:
        self._wait = self._back_off(companion, self._wait)
        return "" if last else f"; trying again in {self._wait:.0f} s"

    def _back_off(self, companion: Companion, wait: float) -> float:
        """Return the wait before the next tick, in seconds: twice `wait`, but at most ten intervals, or one interval
        while resizes are open."""
        try:
            most = 1 if companion.resizing else 10
        except StoreError:
            # The database cannot say whether one does.
            most = 1
        return min(wait * 2, most * companion.settings.interval_s)

    def _finish(self, companion: Companion, stop: Stop) -> None:
        """Advance resizes until none needs a companion, or until a time limit."""
        settings = companion.settings.resize
        late = self._time_limit(settings.drain_timeout_s + settings.leave_s)
        try:
            while (left := companion.advance(only=NEEDS_COMPANION)) and not stop.is_set():
                if late():
                    log.warning("%d resizes under way are left to the companion's next start", left)
                    return
                self._pause(stop, settings.advance_s)
        except NotLeader:
            return  # `_leave` says so
        except (Unreachable, StoreError) as error:
            log.error("%s; the companion's next start finishes what is under way", error)

    def _leave(self, companion: Companion) -> None:
        """Advance resizes until the companion holds no job, or until a time limit. Then end all deferrals."""
        settings = companion.settings.resize
        late = self._time_limit(settings.leave_s)
        try:
            while companion.advance(only=HOLDS_JOB) and not late():
                self._ping()
                self._sleep(min(settings.advance_s, 1.0))
            companion.leave()
        except NotLeader as error:
            log.warning("%s; the companion that leads now finishes what is under way", error)
        except (Unreachable, StoreError) as error:
            log.error(
                "%s; the next start finishes what is under way, and deferred jobs start later by themselves", error
            )

    def _time_limit(self, seconds: float) -> Callable[[], bool]:
        """Return a function that returns True after these seconds, or at most twice as many if the clock is set
        back."""
        until = self._clock() + seconds

        def late() -> bool:
            nonlocal until
            until = min(until, (now := self._clock()) + seconds)
            return now >= until

        return late

    def _between(self, companion: Companion, stop: Stop, seconds: float) -> None:
        until = self._clock() + seconds
        while not (stop.is_set() or self._reload) and (now := self._clock()) < until:
            # No longer than this, should the clock have been set back.
            until = min(until, now + seconds)
            under_way = companion.advance()
            pause = min(until - now, companion.settings.resize.advance_s) if under_way else until - now
            if self._woken(companion, stop, pause) or not under_way:
                return

    def _woken(self, companion: Companion, stop: Stop, seconds: float) -> bool:
        """Wait for this many seconds; return True as soon as a requested early tick is due."""
        if self._waking is None:
            self._pause(stop, seconds)
            return False
        while seconds > 0 and not (stop.is_set() or self._reload):
            if self._waking.due(companion.settings.interval_s):
                return True
            part = min(seconds, LOOK_S)
            self._pause(stop, part)
            seconds -= part
        return False

    def _pause(self, stop: Stop, seconds: float) -> None:
        """Wait for this many seconds, or until a stop or a reload is requested."""
        longest = seconds if self._watchdog_ping is None else PING_S
        while seconds > 0 and not (stop.is_set() or self._reload):
            part = min(seconds, longest)
            stop.wait(part)
            seconds -= part
            self._ping()

    def _ping(self) -> None:
        if self._watchdog_ping is not None:
            self._watchdog_ping()

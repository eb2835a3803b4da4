"""The daemon's loop: tick after tick, resizes taken further in between, and a stop that leaves no job held.

Of several companions over one database one does so, and the others stand by.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from ones_db import NotLeader, StoreError
from slurm_ones.act.transitions import HOLDS_JOB, NEEDS_COMPANION
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import ConfigError
from slurm_ones.service.leadership import Election, NoElection
from slurm_ones.service.wake import LOOK_S, Waking
from slurm_ones.slurm.client import Unreachable

log = logging.getLogger(__name__)

PING_S = 10.0
"""The longest wait between two pings."""


class Stop(Protocol):
    """Wait and stop of `Daemon.run`: `threading.Event`, or a simulator's, in whose `wait` its time passes."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool:
        """Wait this many seconds, or until it is set."""


class Daemon:
    """Lets a companion tick until it is stopped, while it leads.

    `make` makes it, over a store of its own: for the start, after a reload and whenever the lead is taken again. What a
    companion remembers is true only as long as nobody else writes. `watchdog_ping` is called before each tick and in
    waits, at least each `PING_S` seconds; without one, nothing cuts a wait short. `clock` gives the time, and `sleep`
    lets it pass where `Stop.wait` no longer does, after the stop. `jitter` is drawn for each tick, and stretches the
    wait for the next. `waking` may end that wait.
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
        self._lead = lead or NoElection()
        self._watchdog_ping = watchdog_ping
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._waking = waking
        self._companion: Companion | None = None
        self._wait = 0.0
        self._reload = False

    def reload(self) -> None:
        """Before the next tick, which comes at the next ping, make the companion again; where `make` raises
        `ConfigError`, the old one stays. May be called by a signal's handler."""
        self._reload = True

    def run(self, stop: Stop, on_tick: Callable[[Tick], None] = lambda tick: None, *, ticks: int = 0) -> None:
        """Tick until `stop` is set; between ticks, take resizes under way further.

        With `ticks` it ends after that many, whether or not they failed: another run follows some minutes later. First
        it takes resizes to a state in which a job waits for nobody, for as long as a drain and a release may take. If
        another companion leads, it ends at once.

        An unreachable controller or database costs the tick: the next one comes after a wait that doubles up to ten
        intervals, or after one while resizes are under way. A companion that does not lead asks for the lead each
        `Election.wait_s` seconds and does nothing else.
        Before it returns, one that leads releases the jobs that it holds, for as long as `resize.leave_s`, and lets
        those start that it keeps from starting. Raises the `ConfigError` of a `make` that has no older companion to
        fall back on.
        """
        left = ticks
        try:
            while True:
                self._ping()
                companion = self._leading(stop)
                # Only now, so that one whose lead was taken meanwhile does not leave in another's place.
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
        """The companion that is to tick now; after a wait None, where another one leads or the database cannot be
        asked."""
        try:
            if self._lead.take():
                return self._newest()
            self._drop()
        except (Unreachable, StoreError) as error:
            log.error("%s; asking who leads again in %.0f s", error, self._lead.wait_s)
        # A reload is for one that leads: whoever takes the lead is made of the newest settings anyway.
        self._reload = False
        self._pause(stop, self._lead.wait_s)
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
            log.error("%s; the settings before stay in force", error)
            return old
        self._wait = self._companion.settings.interval_s
        if old is not None and old is not self._companion:
            old.close()
        return self._companion

    def _drop(self) -> None:
        """Close the companion: what it remembers is true only while this one leads."""
        if self._companion is not None:
            self._companion.close()
        self._companion = None

    def _tick(self, companion: Companion, stop: Stop, on_tick: Callable[[Tick], None], *, last: bool) -> None:
        """One tick, and the wait after it, which the last one does not need."""
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
        """Words for the time of the tick after one that failed: in `_wait` seconds."""
        self._wait = self._back_off(companion, self._wait)
        return "" if last else f"; trying again in {self._wait:.0f} s"

    def _back_off(self, companion: Companion, wait: float) -> float:
        """The wait after a tick failed, the last one having been `wait` seconds; short while a job may stand in a hold
        of ours."""
        try:
            most = 1 if companion.resizing else 10
        except StoreError:
            # The database cannot say whether one does.
            most = 1
        return min(wait * 2, most * companion.settings.interval_s)

    def _finish(self, companion: Companion, stop: Stop) -> None:
        """Take those resizes further that need a companion, until there are none."""
        settings = companion.settings.resize
        until = self._clock() + settings.drain_timeout_s + settings.leave_s
        try:
            while (left := companion.advance(only=NEEDS_COMPANION)) and not stop.is_set():
                if self._clock() >= until:
                    log.warning("%d resizes under way are left to the next run", left)
                    return
                self._pause(stop, settings.advance_s)
        except NotLeader:
            return  # `_leave` says so
        except (Unreachable, StoreError) as error:
            log.error("%s; the next run finishes what is under way", error)

    def _leave(self, companion: Companion) -> None:
        """Take the resizes whose jobs stand in a hold of ours past their release, and end all deferrals."""
        settings = companion.settings.resize
        until = self._clock() + settings.leave_s
        try:
            while companion.advance(only=HOLDS_JOB) and self._clock() < until:
                self._ping()
                self._sleep(min(settings.advance_s, 1.0))
            companion.leave()
        except NotLeader as error:
            log.warning("%s; what is under way is for whoever leads", error)
        except (Unreachable, StoreError) as error:
            log.error("%s; the next start finishes what is under way, and jobs kept from starting do so later", error)

    def _between(self, companion: Companion, stop: Stop, seconds: float) -> None:
        until = self._clock() + seconds
        while not (stop.is_set() or self._reload) and (left := until - self._clock()) > 0:
            # No longer than this, should the clock have been set back.
            left = min(left, seconds)
            under_way = companion.advance()
            pause = min(left, companion.settings.resize.advance_s) if under_way else left
            if self._woken(companion, stop, pause) or not under_way:
                return

    def _woken(self, companion: Companion, stop: Stop, seconds: float) -> bool:
        """Wait, and tell whether somebody asked for the next tick meanwhile."""
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
        """Wait so long, or until the stop or a reload."""
        longest = seconds if self._watchdog_ping is None else PING_S
        while seconds > 0 and not (stop.is_set() or self._reload):
            part = min(seconds, longest)
            stop.wait(part)
            seconds -= part
            self._ping()

    def _ping(self) -> None:
        if self._watchdog_ping is not None:
            self._watchdog_ping()

"""The companion's life: tick after tick, further with resizes in between, and a leave that holds nobody."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from ones_db import StoreError
from slurm_ones.companion import Companion, Tick
from slurm_ones.slurm.client import Unreachable

log = logging.getLogger(__name__)


class Stop(Protocol):
    """How `Daemon.run` waits, and is told to stop: `threading.Event`, or a simulator's, in whose `wait` its time
    passes."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool:
        """Wait so many seconds, or until it is set."""


class Daemon:
    """Lets one companion tick until it is stopped.

    `clock` gives the time and `sleep` lets it pass where `Stop.wait` no longer does, after the stop.
    """

    def __init__(
        self,
        companion: Companion,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._companion = companion
        self._settings = companion.settings
        self._clock = clock
        self._sleep = sleep

    def run(self, stop: Stop, on_tick: Callable[[Tick], None] = lambda tick: None) -> None:
        """Tick until `stop` is set; between ticks, take resizes under way further.

        An unreachable controller or database costs the tick: the next one comes after a wait that doubles up to ten
        intervals, or after one while resizes are under way.
        Before it returns it releases the jobs that it holds, for as long as `resize.leave_s`, and lets those start that
        it keeps from starting.
        """
        wait = self._settings.interval_s
        while not stop.is_set():
            try:
                tick = self._companion.tick()
                on_tick(tick)
                wait = self._settings.interval_s
                self._between(stop, wait)
            except (Unreachable, StoreError) as error:
                wait = self._back_off(wait)
                log.error("%s; trying again in %.0f s", error, wait)
                stop.wait(wait)
            except Exception:
                # One odd job must not leave everybody else's resizes unfinished.
                wait = self._back_off(wait)
                log.exception("this tick failed; the next one comes in %.0f s", wait)
                stop.wait(wait)
        self._leave()

    def _back_off(self, wait: float) -> float:
        """The wait after one of `wait` seconds was in vain; short while a job may stand in a hold of ours."""
        try:
            most = 1 if self._companion.resizing else 10
        except StoreError:
            # Nobody knows whether one does.
            most = 1
        return min(wait * 2, most * self._settings.interval_s)

    def _leave(self) -> None:
        """Take the resizes whose jobs stand in a hold of ours past their release, and end all deferrals."""
        until = self._clock() + self._settings.resize.leave_s
        try:
            while self._companion.advance(held_only=True) and self._clock() < until:
                self._sleep(min(self._settings.resize.advance_s, 1.0))
            self._companion.leave()
        except (Unreachable, StoreError) as error:
            log.error("%s; the next start finishes what is under way, and jobs kept from starting do so later", error)

    def _between(self, stop: Stop, seconds: float) -> None:
        until = self._clock() + seconds
        while not stop.is_set() and (left := until - self._clock()) > 0:
            # No longer than this, should the clock have been set back.
            left = min(left, seconds)
            if self._companion.advance():
                stop.wait(min(left, self._settings.resize.advance_s))
            else:
                stop.wait(left)
                return

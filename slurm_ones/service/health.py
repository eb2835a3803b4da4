"""How the companion is, told to whom it concerns: systemd, `slurm-ones status` and, where asked for, Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from ones_db import HealthRecord, Store, StoreError
from slurm_ones.companion import Tick
from slurm_ones.config import Settings
from slurm_ones.service.logs import Last
from slurm_ones.service.systemd import Notifier

log = logging.getLogger(__name__)


class Gauges(Protocol):
    """Figures for a monitoring system."""

    def ticked(self, now: float, tick: Tick) -> None: ...

    def failed(self) -> None: ...


class Health:
    """Of one companion, from tick to tick and from error to error.

    What cannot be stored is no reason to stop: `status` then says how old it is. `clock` gives the time.
    """

    def __init__(
        self,
        notifier: Notifier,
        last: Last,
        *,
        gauges: Gauges | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._notifier = notifier
        self._last = last
        self._gauges = gauges
        self._clock = clock
        self._store: Store | None = None
        self._record = HealthRecord(0.0, "", 0.0)
        self._told = 0.0
        """When the newest error was that was told already."""

    def leads(self, store: Store, settings: Settings) -> None:
        """A companion was made over that store, which is written to from now on."""
        self._store = store
        self._record = self._record._replace(mode=settings.mode, interval_s=settings.interval_s)
        self._write()

    def ticked(self, tick: Tick) -> None:
        """A tick ended well."""
        running = [e for e in tick.observation.elastic.values() if e.job.running]
        self._record = self._record._replace(
            tick_time=self._clock(),
            tick_s=tick.seconds,
            running=len(running),
            waiting=len(tick.observation.elastic) - len(running),
            gpus=sum(e.shape.gpus for e in running),
        )
        if self._gauges is not None:
            self._gauges.ticked(self._clock(), tick)
        self._notifier.status(words(tick))
        self._write()

    def pulse(self) -> None:
        """A turn of the loop: feeds the watchdog, and tells of an error that is new."""
        self._notifier.alive()
        if self._last.time > self._told:
            self._told = self._last.time
            if self._gauges is not None:
                self._gauges.failed()
            self._notifier.status(self._last.text)
            self._write()

    def _write(self) -> None:
        error, at = (self._last.text, self._last.time) if self._last.time else ("", None)
        self._record = self._record._replace(time=self._clock(), error=error, error_time=at)
        if self._store is not None:
            try:
                self._store.see_health(self._record)
            except StoreError as failed:
                log.warning("how the companion is could not be stored: %s", failed)


def words(tick: Tick) -> str:
    """A tick in a line."""
    jobs = tick.observation.elastic.values()
    running = [e for e in jobs if e.job.running]
    begun = ", ".join(f"job {c.job_id} {c}" for c in tick.begun)
    return (
        f"{len(running)} elastic jobs run on {sum(e.shape.gpus for e in running)} GPUs, {len(jobs) - len(running)} wait"
        f" ({tick.seconds:.2f} s)" + (f"; begun: {begun}" if begun else "")
    )

"""Health of the companion, as reported to systemd, to `slurm-ones status`, and to Prometheus if the settings ask for
it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING

from ones_db import HealthRecord, Store, StoreError
from slurm_ones.companion import Tick
from slurm_ones.config import Settings
from slurm_ones.service.logs import LastErrorHandler

if TYPE_CHECKING:
    from slurm_ones.service.metrics import Metrics, Phases

log = logging.getLogger(__name__)

PING_SHARE = 1 / 4
"""Interval between watchdog pings, as a share of systemd's limit; systemd recommends at most one half."""
LONGEST = 200
"""Longest status line, in characters."""


class Notifier:
    """Client of the service manager by sd_notify(3): it sends NAME=VALUE lines to the socket that the environment
    names.

    Without a service manager it sends nothing. It never waits and raises no errors.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Take sd_notify's variables out of the environment, so that Slurm's commands do not inherit them."""
        address = environment.pop("NOTIFY_SOCKET", "")
        allowed = environment.pop("WATCHDOG_USEC", "")
        meant = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        # A leading @ stands for an abstract socket.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        self._every_s = int(allowed) / 1e6 * PING_SHARE if allowed.isdecimal() and meant == str(os.getpid()) else None
        self._fed = float("-inf")

    @property
    def listens(self) -> bool:
        """True if the environment names a service manager."""
        return self._socket is not None

    def ready(self, words: str) -> None:
        """Report that the companion is ready, after its start or after `reloading`."""
        self._send("READY=1", f"STATUS={_line(words)}")

    def status(self, words: str) -> None:
        """Set the text that `systemctl status` shows."""
        self._send(f"STATUS={_line(words)}")

    def reloading(self) -> None:
        """Report that the companion reads its settings again. `ready` ends this state."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, words: str, within_s: float) -> None:
        """Report that the companion is ending, and ask systemd to wait `within_s` seconds for it."""
        self._send("STOPPING=1", f"STATUS={_line(words)}", f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}")

    def alive(self) -> None:
        """Ping systemd's watchdog if a ping is due. A loop may call this as often as it likes."""
        now = time.monotonic()
        if self._every_s is not None and now - self._fed >= self._every_s:
            self._fed = now
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)


def _line(words: str) -> str:
    return " ".join(words.split())[:LONGEST]


class Health:
    """Health of one companion, stored at each tick and each error. Failures to store it are ignored."""

    def __init__(self, notifier: Notifier, last: LastErrorHandler, *, metrics: Metrics | None = None) -> None:
        self._notifier = notifier
        self._last = last
        self._metrics = metrics
        self._store: Store | None = None
        self._record = HealthRecord(0.0, "", 0.0)
        self._reported = 0
        """Number of logged errors that are counted already."""

    def leads(self, store: Store, settings: Settings) -> None:
        """Store health records in `store` from now on, because this companion leads."""
        self._store = store
        self._record = self._record._replace(mode=settings.mode, interval_s=settings.interval_s)
        if self._metrics is not None:
            self._metrics.leads(settings)
        self._write()

    def ticked(self, tick: Tick) -> None:
        """Store the time, duration and job counts of a successful tick."""
        running = [e for e in tick.observation.elastic.values() if e.job.running]
        self._record = self._record._replace(
            tick_time=time.time(),
            tick_s=tick.seconds,
            running=len(running),
            waiting=len(tick.observation.elastic) - len(running),
            gpus=sum(e.shape.gpus for e in running),
        )
        if self._metrics is not None:
            self._measure(self._metrics, tick)
        self._notifier.status(summary(tick))
        self._write()

    def _measure(self, metrics: Metrics, tick: Tick) -> None:
        try:
            metrics.ticked(time.time(), tick, self._phases(metrics))
        except Exception:
            # No figure is worth a tick.
            log.exception("the metrics for Prometheus lack this tick")

    def _phases(self, metrics: Metrics) -> Phases:
        """Return the duration of each phase by resize id, for resizes that ended at the previous tick."""
        due = metrics.due
        if not due or self._store is None:
            return {}
        try:
            return self._store.resize_phases(due)
        except StoreError as error:
            log.warning("the metrics lack the phases of %d resizes: %s", len(due), error)
            return {}

    def watchdog_ping(self) -> None:
        """Ping the watchdog, and store a new error if there is one."""
        self._notifier.alive()
        new = self._last.count - self._reported
        if new:
            self._reported += new
            if self._metrics is not None:
                self._metrics.failed(new)
            self._notifier.status(self._last.text)
            self._write()

    def _write(self) -> None:
        error, at = (self._last.text, self._last.time) if self._last.time else ("", None)
        self._record = self._record._replace(time=time.time(), error=error, error_time=at)
        if self._store is not None:
            try:
                self._store.record_health(self._record)
            except StoreError as failed:
                log.warning("the companion's health could not be stored: %s", failed)


def summary(tick: Tick) -> str:
    """Return a one-line summary of a tick."""
    jobs = tick.observation.elastic.values()
    running = [e for e in jobs if e.job.running]
    begun = ", ".join(f"job {c.job_id} {c}" for c in tick.begun)
    gpus = sum(e.shape.gpus for e in running)
    return (
        f"elastic jobs running: {len(running)} on {gpus} GPU{'s' * (gpus != 1)}, waiting: {len(jobs) - len(running)}"
        f" ({tick.seconds:.2f} s)" + (f"; begun: {begun}" if begun else "")
    )

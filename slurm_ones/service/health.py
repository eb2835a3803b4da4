"""The companion's health, for systemd, `slurm-ones status` and, where the settings ask for it, Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ones_db import HealthRecord, Store, StoreError
from slurm_ones.companion import Tick
from slurm_ones.config import ConfigError, Settings
from slurm_ones.service.logs import LastErrorHandler
from slurm_ones.service.systemd import Notifier

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""Prometheus finds the metrics at this machine alone."""


class Health:
    """Health of one companion, updated at each tick and each error.

    Where it cannot be stored the companion goes on, and `status` says how old the record is. `clock` gives the time.
    """

    def __init__(
        self,
        notifier: Notifier,
        last: LastErrorHandler,
        *,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._notifier = notifier
        self._last = last
        self._metrics = metrics
        self._clock = clock
        self._store: Store | None = None
        self._record = HealthRecord(0.0, "", 0.0)
        self._reported = 0.0
        """Time of the newest error that was reported."""

    def leads(self, store: Store, settings: Settings) -> None:
        """A companion leads over that store, which is written to from now on."""
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
        if self._metrics is not None:
            self._metrics.ticked(self._clock(), tick)
        self._notifier.status(summary(tick))
        self._write()

    def watchdog_ping(self) -> None:
        """Feed the watchdog, and report an error that is new."""
        self._notifier.alive()
        if self._last.time > self._reported:
            self._reported = self._last.time
            if self._metrics is not None:
                self._metrics.failed()
            self._notifier.status(self._last.text)
            self._write()

    def _write(self) -> None:
        error, at = (self._last.text, self._last.time) if self._last.time else ("", None)
        self._record = self._record._replace(time=self._clock(), error=error, error_time=at)
        if self._store is not None:
            try:
                self._store.record_health(self._record)
            except StoreError as failed:
                log.warning("the companion's health could not be stored: %s", failed)


def summary(tick: Tick) -> str:
    """A tick in one line."""
    jobs = tick.observation.elastic.values()
    running = [e for e in jobs if e.job.running]
    begun = ", ".join(f"job {c.job_id} {c}" for c in tick.begun)
    return (
        f"{len(running)} elastic jobs run on {sum(e.shape.gpus for e in running)} GPUs, {len(jobs) - len(running)} wait"
        f" ({tick.seconds:.2f} s)" + (f"; begun: {begun}" if begun else "")
    )


class Metrics:
    """Gauges and counters of one companion; raises `ImportError` where prometheus-client is not installed."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        # Nothing of the process itself: that is systemd's to tell.
        self.registry = CollectorRegistry()
        here: dict[str, Any] = {"namespace": "slurm_ones", "registry": self.registry}
        self._time = Gauge("last_tick_timestamp_seconds", "end of the last tick that was not in vain", **here)
        self._took = Gauge("last_tick_seconds", "what the last tick took", **here)
        self._running = Gauge("running_jobs", "elastic jobs that run", **here)
        self._waiting = Gauge("waiting_jobs", "elastic jobs that wait", **here)
        self._gpus = Gauge("gpus", "GPUs on which elastic jobs run", **here)
        self._ticks = Counter("ticks", "ticks that were not in vain", **here)
        self._begun = Counter("resizes_begun", "resizes begun, or advised", **here)
        self._errors = Counter("errors", "errors that were logged", **here)

    def ticked(self, now: float, tick: Tick) -> None:
        """Take in a tick that ended at `now`, Unix seconds."""
        running = [e for e in tick.observation.elastic.values() if e.job.running]
        self._time.set(now)
        self._took.set(tick.seconds)
        self._running.set(len(running))
        self._waiting.set(len(tick.observation.elastic) - len(running))
        self._gpus.set(sum(e.shape.gpus for e in running))
        self._ticks.inc()
        self._begun.inc(len(tick.begun))

    def failed(self) -> None:
        """Count an error."""
        self._errors.inc()


def serve(port: int) -> Metrics:
    """Serve http://127.0.0.1:port/metrics from a thread, as long as the process lives. Raises `ConfigError`."""
    try:
        from prometheus_client import start_http_server

        metrics = Metrics()
        start_http_server(port, addr=HOST, registry=metrics.registry)
    except ImportError:
        raise ConfigError("metrics_port: prometheus-client is not installed: pip install prometheus-client") from None
    except OSError as error:
        raise ConfigError(f"metrics_port: port {port} of {HOST}: {error.strerror}") from None
    return metrics

"""The companion's figures for Prometheus, at a port of this machine alone."""

from __future__ import annotations

from typing import Any

from slurm_ones.companion import Tick
from slurm_ones.config import ConfigError

HOST = "127.0.0.1"


class Figures:
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


def serve(port: int) -> Figures:
    """Figures at http://127.0.0.1:port/metrics, from a thread, as long as the process lives. Raises `ConfigError`."""
    try:
        from prometheus_client import start_http_server

        figures = Figures()
        start_http_server(port, addr=HOST, registry=figures.registry)
    except ImportError:
        raise ConfigError("metrics_port: prometheus-client is not installed: pip install prometheus-client") from None
    except OSError as error:
        raise ConfigError(f"metrics_port: port {port} of {HOST}: {error.strerror}") from None
    return figures

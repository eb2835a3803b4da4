"""HTTP server of the figures in `metrics`, with limits on concurrent requests and on their duration."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import disable_created_metrics, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from slurm_ones.config import ConfigError
from slurm_ones.service.metrics import Metrics

AT_ONCE = 8
"""Most concurrent requests; further connections are closed at once."""
SILENT_S = 5.0
"""Longest silence of a client, s: neither sending nor reading."""
LONGEST_S = 20.0
"""Longest duration of a connection, s."""


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def setup(self) -> None:
        super().setup()
        # Whoever sends a byte now and then is never silent for long.
        self._end = threading.Timer(LONGEST_S, self._cut)
        self._end.daemon = True
        self._end.start()

    def _cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        self._end.cancel()
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since anybody who reaches the port could fill the log."""


class _Server(ThreadingWSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any, **named: Any) -> None:
        self._places = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(*args, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread could be started, which would have given the place back.
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, since a client that disconnects is no error of the companion."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def serve(address: str, port: int) -> Metrics:
    """Serve http://address:port/metrics from a thread, as long as the process lives. Raises `ConfigError`."""
    # When a series began would double their number.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    metrics = Metrics()
    kind = _Server6 if ":" in address else _Server
    try:
        server = make_server(address, port, make_wsgi_app(metrics.registry), kind, handler_class=_Handler)
    except OSError as error:
        raise ConfigError(f"metrics_port: port {port} of {address}: {error.strerror}") from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return metrics

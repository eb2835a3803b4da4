"""Serving the page: how many connections there may be, and for how long one may keep the server waiting."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 1_200
"""At once; more are refused."""
PATIENCE_S = 10.0
"""Who has neither asked for something, nor read anything of an answer, for so long up to twice that, is cut off."""


class Bounded(H11Protocol):
    """A connection of which none of the `CONNECTIONS` is held for nothing: uvicorn itself waits without end for the
    first request, and for one that was begun."""

    _unread = 0
    _idle = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._look_later()

    def _look_later(self) -> None:
        self.loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        if self not in self.connections:
            return
        unread = self.transport.get_write_buffer_size()
        stuck = unread > 0 and unread == self._unread
        waits = self.cycle is None or self.cycle.response_complete
        idle = waits and not unread
        if stuck or (idle and self._idle):
            # What was not read is thrown away: a polite end would wait for it.
            self.transport.abort()
            return
        self._unread, self._idle = unread, idle
        self._look_later()

    def handle_events(self) -> None:
        """See uvicorn."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._idle = False


OPTIONS: dict[str, Any] = {
    "http": Bounded,
    "ws": "none",
    "log_level": "warning",
    "limit_concurrency": CONNECTIONS,
    "timeout_keep_alive": 5,
    # Browsers that listen would keep it from ending.
    "timeout_graceful_shutdown": 2,
    "server_header": False,
}
"""Of uvicorn."""

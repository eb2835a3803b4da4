"""Limits on a server's connections. Idle connections are closed, and no client can use up all connections.

A connection is a stranger until a request on it is authenticated. Its peer is a local user, found in the kernel's
socket table, or otherwise an address. A peer may have at most `STRANGERS` strangers; more are closed at once. If all
`CONNECTIONS` are in use, the peer with the most strangers loses its oldest ones. So no peer can keep others out.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 1_200
"""Largest number of open connections."""
STRANGERS = 256
"""Largest number of strangers of one peer: connections without an authenticated request."""
HEADER_S = 5.0
"""Seconds after which a connection is closed if it has not sent its first request's header."""
PATIENCE_S = 10.0
"""Seconds between two checks. A connection is closed if two checks in a row find it idle, or its answer unread."""
AT_A_TIME = 16
"""Divisor: 1 / `AT_A_TIME` of `CONNECTIONS` are closed at a time, since finding one takes as long as finding many."""
COUNT_S = 0.1
"""Seconds for which a count of strangers is used."""
REFUSED_AT_ONCE = 64
"""Largest number of new connections that are closed before the server turns to other work."""
SOCK_DIAG, BY_FAMILY, REQUEST = 4, 20, 1
ALL_STATES, NO_COOKIE, UID_AT = 0xFFFFFFFF, b"\xff" * 8, 16 + 4 + 48 + 12
"""Constants of sock_diag(7); `UID_AT` is the offset of the user id in the kernel's answer."""
ANSWER_S = 0.1
"""Longest wait for the kernel's answer, in seconds."""
LOOPBACK = ("127.", "::1", "::ffff:127.")
"""Prefixes of loopback addresses."""
ADMITTED = "slurm_ones.admitted"
"""Key in the ASGI scope of an authenticated request."""


class UnambiguousLength:
    """Middleware that refuses requests with both Content-Length and Transfer-Encoding.

    If a proxy used the other header, a part of the body could pass for a second request (request smuggling).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"transfer-encoding", b"content-length"} <= names:
            answer = PlainTextResponse("both Content-Length and Transfer-Encoding\n", 400, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the id of the local user at the `client` end of a connection; None if unknown (sock_diag(7))."""
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as kernel:
            kernel.settimeout(ANSWER_S)
            ends = [socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (client, server)]
            asked = struct.pack("!HH16s16s", client[1], server[1], *ends) + struct.pack("=I8s", 0, NO_COOKIE)
            asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + asked
            kernel.sendto(struct.pack("=IHHII", 16 + len(asked), BY_FAMILY, REQUEST, 1, 0) + asked, (0, 0))
            answer = kernel.recv(4096)
        if struct.unpack_from("=IH", answer)[1] != BY_FAMILY:
            return None
        return int(struct.unpack_from("=I", answer, UID_AT)[0])
    except (OSError, struct.error, ValueError):
        return None


def peer_of(client: tuple[str, int], server: tuple[str, int | None]) -> str:
    """Return the peer of a connection: a local user, or otherwise an address."""
    host = client[0]
    uid = user_of(client, (server[0], server[1] or 0)) if host.startswith(LOOPBACK) else None
    return host if uid is None else f"uid {uid}"


class BoundedSocket(socket.socket):
    """Listening socket that accepts at most `STRANGERS` strangers from a peer."""

    def __init__(self, listening: socket.socket, connections: set[Any]) -> None:
        """Replace the socket `listening`. `connections` is the server's set of open connections."""
        super().__init__(listening.family, listening.type, listening.proto, listening.detach())
        self._connections = connections
        self._strangers, self._counted_at = Counter[str](), 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection of a peer with fewer than `STRANGERS` strangers. Close connections before it."""
        if (now := time.monotonic()) > self._counted_at + COUNT_S:
            self._counted_at, self._strangers = now, Counter(one.peer for one in self._connections if one.stranger)
        for _ in range(REFUSED_AT_ONCE):
            connection, client = super().accept()
            peer = peer_of(client, connection.getsockname())
            if self._strangers[peer] < STRANGERS:
                self._strangers[peer] += 1
                return connection, client
            connection.close()
        raise BlockingIOError  # as if none waited


class Bounded(H11Protocol):
    """HTTP connection with time limits. uvicorn has no such limits."""

    began: float
    """Time at which the connection was made, by the monotonic clock."""
    peer = ""
    _unread = 0
    _idle = False
    _admitted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.began = time.monotonic()
        self.peer = peer_of(self.client or ("", 0), self.server or ("", 0))
        if len(self.connections) > CONNECTIONS:
            self._make_place()
        self.loop.call_later(HEADER_S, self._look_for_header)
        self.loop.call_later(PATIENCE_S, self._look)

    @property
    def stranger(self) -> bool:
        """True until a request on this connection is authenticated."""
        self._admitted = self._admitted or ADMITTED in (self.scope or {})
        return not self._admitted

    def _make_place(self) -> None:
        strangers = [one for one in self.connections if isinstance(one, Bounded) and one.stranger]
        counts = Counter(one.peer for one in strangers if one is not self)
        most = max(counts, key=lambda peer: counts[peer], default="")
        oldest = sorted((one for one in strangers if one.peer == most and one is not self), key=lambda one: one.began)
        for one in oldest[: 1 + CONNECTIONS // AT_A_TIME]:
            self.connections.discard(one)
            one.transport.abort()

    def _look_for_header(self) -> None:
        if self.cycle is None and self in self.connections:
            self.transport.abort()

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
        self.loop.call_later(PATIENCE_S, self._look)

    def handle_events(self) -> None:
        before = self.cycle
        # The scope is that of the newest request.
        _ = self.stranger
        super().handle_events()
        if self.cycle is not before:
            self._idle = False


OPTIONS: dict[str, Any] = {
    "http": Bounded,
    "ws": "none",
    "loop": "asyncio",  # uvloop accepts past `BoundedSocket`
    # Anybody who reaches the port could fill the log with warnings of bad requests.
    "log_level": "error",
    # Beyond it there are no strangers to take a place from.
    "limit_concurrency": CONNECTIONS + 1,
    "timeout_keep_alive": 5,
    # Browsers that listen would keep it from ending.
    "timeout_graceful_shutdown": 2,
    "server_header": False,
}
"""Options for uvicorn's server."""

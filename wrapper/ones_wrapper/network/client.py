"""A connection to a store of this job (`server`). Needs only the standard library."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable

from ones_wrapper.network.frames import READ, FrameError, Frames, fields, frame, hang_up, parts_of
from ones_wrapper.network.proof import prove
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import HOST, MEET

ANSWER_S = 5.0
"""Seconds without an answer after which a store counts as lost."""
IDLE_S = 10.0
"""Seconds without a request after which a connection may be closed; the next request opens it again."""
_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()
_clients_lock = threading.Lock()


class StoreLostError(ConnectionError):
    """Error: the store does not answer, or has ended."""


class StoreClient:
    """A connection to one place of a store, which threads use in turn. The store also pushes values over it."""

    def __init__(
        self, host: str, port: int, secret: JobSecret, role: str, place: str, timeout_s: float = ANSWER_S
    ) -> None:
        """Connect. Raises `StoreLostError` if no store of this job answers there within `timeout_s`."""
        self.host, self.port, self.place = host, port, place
        self._secret, self.role = secret, role
        self._lock, self._frames = threading.Lock(), Frames()
        self.news: dict[bytes, bytes] = {}
        """Newest value of each key whose kind is followed."""
        self._closed, self._follows, self._asked_at = False, False, time.monotonic()
        self._socket: socket.socket | None = None
        self._connect(timeout_s)
        with _clients_lock:
            _clients.add(self)

    def _connect(self, timeout_s: float) -> socket.socket:
        try:
            self._socket = connection = socket.create_connection((self.host, self.port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove(connection, self._secret, self.role, self.place, timeout_s)
        except OSError as error:
            self.close()
            raise StoreLostError(f"{self.host}:{self.port}: {error}") from None
        return connection

    def fileno(self) -> int:
        """Return the connection's file descriptor. Raises ValueError if it is closed."""
        if (connection := self._socket) is None:
            raise ValueError("this connection to the store is closed")
        return connection.fileno()

    def key(self, *purpose: str) -> bytes:
        """Return a key for this purpose, bound to this place."""
        return self._secret.key(*purpose, self.place)

    def close(self, end: Callable[[socket.socket], None] = hang_up) -> None:
        """Close the connection for good. A forked process only closes its copy of the socket."""
        self._closed = True
        connection, self._socket = self._socket, None
        if connection is not None:
            end(connection)

    def rest(self) -> None:
        """Close the connection until the next request, if it was unused for `IDLE_S` seconds. Keeps a connection of a
        place's host, and one over which values are pushed."""
        if self.role == HOST or self._follows or not self._lock.acquire(blocking=False):
            return
        try:
            if self._socket is not None and time.monotonic() - self._asked_at > IDLE_S:
                if self.role == MEET:
                    self._ask(frame(fields(b"rest")), ANSWER_S)
                connection, self._socket, self._frames = self._socket, None, Frames()
                hang_up(connection)
        except StoreLostError:
            return  # the next request raises it
        finally:
            self._lock.release()

    def ask(self, what: str, *parts: bytes, wait_s: float = 0.0) -> list[bytes]:
        """Send a request; return the fields of the answer. The store may take `wait_s` seconds for it.

        Raises `StoreLostError`, TimeoutError if keys are missing after `wait_s`, and ValueError for a request that the
        store refuses.
        """
        with self._lock:
            answer, *found = self._ask(frame(fields(what.encode(), *parts)), wait_s + ANSWER_S)
        if answer == b"late":
            raise TimeoutError(f"{', '.join(key.decode(errors='replace') for key in found[:3])} did not come in time")
        if answer != b"ok":
            raise ValueError(found[0].decode(errors="replace") if found else "the store refuses")
        return found

    def follow(self, *kinds: str) -> None:
        """Subscribe to kinds of keys: `news` has their values, now and after each change. The kind is the part of a key
        before its dash. Raises `StoreLostError`."""
        self._follows = True
        found = self.ask("follow", *(kind.encode() for kind in kinds))
        self.news.update(zip(found[::2], found[1::2], strict=True))

    def listen(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for a pushed value, and put it into `news`. Raises `StoreLostError`."""
        poll = select.poll()
        try:
            poll.register(self, select.POLLIN)
        except ValueError:  # another thread has just closed it
            raise StoreLostError("this connection to the store is closed") from None
        if not poll.poll(1000 * timeout_s):
            return
        with self._lock:
            try:
                self._receive(0.0)
                self._take()
            except BlockingIOError:  # another thread read it while waiting for an answer
                return
            except (OSError, FrameError) as error:
                self.close()
                raise StoreLostError(str(error)) from None

    def _ask(self, message: bytes, timeout_s: float) -> list[bytes]:
        try:
            if self._closed:
                raise StoreLostError("this connection to the store is closed")
            connection = self._socket or self._connect(ANSWER_S)
            self._asked_at = time.monotonic()
            connection.settimeout(timeout_s)
            connection.sendall(message)
            while (answer := self._take()) is None:
                self._receive(timeout_s)
            self._take()  # values that were pushed after the answer
            return answer
        except (OSError, FrameError) as error:
            self.close()  # a late answer would be taken for the next request's
            late = isinstance(error, TimeoutError)
            raise StoreLostError(f"no answer within {timeout_s:g} s" if late else str(error)) from None

    def _receive(self, timeout_s: float) -> None:
        if (connection := self._socket) is None:
            raise StoreLostError("this connection to the store is closed")
        connection.settimeout(timeout_s)
        if not (data := connection.recv(READ)):
            raise StoreLostError("the store closed the connection")
        self._frames.feed(data)

    def _take(self) -> list[bytes] | None:
        """Return the next answer among the received bytes, or None. Put values that were pushed before it into
        `news`."""
        while (body := self._frames.take()) is not None:
            parts = parts_of(body) or [b""]
            if parts[0] != b"news":
                return parts
            self.news[parts[1]] = parts[2]
        return None


def rest_idle() -> None:
    """Close this process's idle connections to stores; the next request opens one again."""
    with _clients_lock:
        clients = list(_clients)
    for client in clients:
        client.rest()


def _in_child() -> None:
    """Close all clients in a forked process, whose copies would keep the connections open when the parent dies."""
    global _clients_lock
    _clients_lock = threading.Lock()  # another thread may have held it
    for client in list(_clients):
        client.close(socket.socket.close)


os.register_at_fork(after_in_child=_in_child)

"""A connection to a store of this job (`server`). The standard library alone."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from contextlib import suppress

from ones_wrapper.network.frames import FrameError, Frames, fields, frame, hang_up, parts_of
from ones_wrapper.network.proof import prove
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import MEET, MEMBER

ANSWER_S = 5.0
"""A store that does not answer within this time is lost."""
_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


class StoreLostError(ConnectionError):
    """The store does not answer, or ended."""


class StoreClient:
    """One thread's connection, as a rule: a thread that waits holds up the others."""

    def __init__(
        self, host: str, port: int, secret: JobSecret, role: str, place: str, timeout_s: float = ANSWER_S
    ) -> None:
        """Raises `StoreLostError` if nothing of this job answers there within the time."""
        self.host, self.port, self.place = host, port, place
        self._secret, self._role = secret, role
        self._lock, self._frames = threading.Lock(), Frames()
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove(self._socket, secret, role, place, timeout_s)
        except OSError as error:
            self.close()
            raise StoreLostError(f"{host}:{port}: {error}") from None
        _clients.add(self)

    def again(self) -> StoreClient:
        """Another connection to the same place. Raises `StoreLostError`."""
        return StoreClient(self.host, self.port, self._secret, MEET if self._role == MEET else MEMBER, self.place)

    def key(self, *purpose: str) -> bytes:
        """A key that is bound to this place and a purpose."""
        return self._secret.key(*purpose, self.place)

    def close(self) -> None:
        """Hang up."""
        connection, self._socket = self._socket, None
        if connection is not None:
            hang_up(connection)

    def close_in_child(self) -> None:
        """A process that was forked holds nobody's connection open."""
        connection, self._socket = self._socket, None
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def ask(self, what: str, *parts: bytes, wait_s: float = 0.0) -> list[bytes]:
        """What the store answers to a request, which it may think about for `wait_s`. Raises `StoreLostError`,
        TimeoutError for keys that did not come, and ValueError for what it does not understand.
        """
        with self._lock:
            answer, *found = self._ask(frame(fields(what.encode(), *parts)), wait_s + ANSWER_S)
        if answer == b"late":
            raise TimeoutError(f"{', '.join(key.decode(errors='replace') for key in found[:3])} did not come in time")
        if answer != b"ok":
            raise ValueError(found[0].decode(errors="replace") if found else "the store refuses")
        return found

    def _ask(self, message: bytes, timeout_s: float) -> list[bytes]:
        connection = self._socket
        if connection is None:
            raise StoreLostError("this connection to the store is closed")
        try:
            connection.settimeout(timeout_s)
            connection.sendall(message)
            while (body := self._frames.take()) is None:
                if not (data := connection.recv(1 << 18)):
                    raise StoreLostError("the store closed the connection")
                self._frames.feed(data)
            return parts_of(body) or [b""]
        except (OSError, FrameError) as error:
            self.close()  # an answer that comes late would be taken for another's
            late = isinstance(error, TimeoutError)
            raise StoreLostError(f"no answer within {timeout_s:g} s" if late else str(error)) from None


def _in_child() -> None:
    """Their end tells that the parent died."""
    for client in list(_clients):
        client.close_in_child()


os.register_at_fork(after_in_child=_in_child)

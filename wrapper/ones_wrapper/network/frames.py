"""Framing of messages on a connection: a length in four bytes, then the body. Each field in the body has a length,
too."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_LENGTH = struct.Struct("!I")
MOST = 64 << 20
"""Largest number of bytes of a message between processes that have proved themselves."""

READ = 1 << 16
"""Bytes of one read. With 128 KiB or more, glibc would map and unmap memory for each buffer."""


class FrameError(ValueError):
    """Raised for bytes that are no message."""


def hang_up(connection: socket.socket) -> None:
    """Shut a connection down, so that the peer sees the end even if a forked process still holds the socket."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def frame(body: bytes) -> bytes:
    """Return a message as it is sent: its length, then the body."""
    return _LENGTH.pack(len(body)) + body


def fields(*parts: bytes) -> bytes:
    """Join the parts of a message into one body."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def parts_of(body: bytes) -> list[bytes]:
    """Return the parts that `fields` joined. Raises `FrameError`."""
    found, at = [], 0
    while at < len(body):
        if at + _LENGTH.size > len(body):
            raise FrameError("a field's length is cut off")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + length > len(body):
            raise FrameError("a field is cut off")
        found.append(body[at : at + length])
        at += length
    return found


class Frames:
    """Buffer that splits received bytes into messages. Its memory grows with the received bytes, not with an announced
    length."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        """Largest number of bytes of a message."""
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes. Raises `FrameError` as soon as a message is too long."""
        self._bytes += data
        self._next()

    def take(self) -> bytes | None:
        """Return the next whole message; None while there is none. Raises `FrameError`."""
        length = self._next()
        if length is None or len(self._bytes) < _LENGTH.size + length:
            return None
        body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
        del self._bytes[: _LENGTH.size + length]
        return body

    @property
    def empty(self) -> bool:
        """True if all bytes received so far were taken as whole messages."""
        return not self._bytes

    def _next(self) -> int | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self.most:
            raise FrameError(f"a message of {length} bytes, and {self.most} are the most")
        return int(length)

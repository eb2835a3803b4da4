"""Lets in callers that prove themselves, and keeps all others from holding anything: neither a thread, nor memory, nor
a connection for longer than a proof may take.
"""

from __future__ import annotations

import errno
import ipaddress
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ones_wrapper.network.frames import FrameError, Frames, frame
from ones_wrapper.network.proof import MOST_UNPROVEN, PROOF_S, Challenge, ProofError
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.process.log import log

UNPROVEN = 256
"""Connections that have not proved anything, at most; of more the oldest goes, of whoever has the most."""
_AT_ONCE = 64
"""Connections taken before those that are there are served."""
_NAMED = 100
"""Addresses that are named in the log, at most."""


def listen(host: str) -> socket.socket:
    """Listen at this node's address, on a port that the system picks.

    A node whose own name leads only to itself, as some distributions set it up, listens at all of its addresses. The
    others know it by another one.
    """
    literal = _is_literal(host)
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            if literal or not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
                with suppress(OSError):
                    return socket.create_server((str(place[0]), 0), family=family, backlog=512)
    return socket.create_server(("", 0), backlog=512)


def _is_literal(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost"


@dataclass(frozen=True)
class Caller:
    """A connection that was let in."""

    connection: socket.socket
    role: str
    place: str


@dataclass
class _Stranger:
    connection: socket.socket
    address: str
    until: float
    frames: Frames
    challenge: Challenge | None = None


class Door:
    """One listening socket."""

    def __init__(self, listener: socket.socket, secret: JobSecret, refuse: Callable[[str, str], str]) -> None:
        """`refuse` takes role and place of a proven caller, and returns the reason to refuse it; empty lets it in."""
        self._listener, self._secret, self._refuse = listener, secret, refuse
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[int, _Stranger] = {}
        """Callers by file descriptor, the oldest first."""
        self._of: Counter[str] = Counter()
        self._named: set[str] = set()

    @property
    def port(self) -> int:
        """Port on which it listens."""
        return int(self._listener.getsockname()[1])

    def fileno(self) -> int:
        """Readable when there is something to `look` at."""
        return self._selector.fileno()

    def sockets(self) -> list[socket.socket]:
        """All that it holds, for a child process to close."""
        return [self._listener, *(one.connection for one in list(self._strangers.values()))]

    def next_s(self) -> float | None:
        """Return the seconds until the oldest unproven caller's time is over; None without any."""
        oldest = next(iter(self._strangers.values()), None)
        return max(0.0, oldest.until - time.monotonic()) if oldest else None

    def look(self, timeout_s: float = 0.0) -> list[Caller]:
        """Serve waiting callers, for which it waits up to `timeout_s`; return those that are let in now."""
        found = []
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (stranger := self._strangers.get(key.fd)) is not None and (caller := self._serve(stranger)):
                found.append(caller)
        now = time.monotonic()
        for stranger in list(self._strangers.values()):
            if stranger.until > now:
                break
            self._hang_up(stranger, f"it proved nothing within {PROOF_S:g} s")
        return found

    def close(self) -> None:
        """Listen no longer; callers that were let in stay."""
        for stranger in list(self._strangers.values()):
            self._forget(stranger)
            stranger.connection.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room()
                return
            connection.setblocking(False)
            if len(self._strangers) >= UNPROVEN:
                most = self._of.most_common(1)[0][0]
                oldest = next(one for one in self._strangers.values() if one.address == most)
                self._hang_up(oldest, f"it has more than {UNPROVEN} connections that prove nothing")
            stranger = _Stranger(connection, str(address[0]), time.monotonic() + PROOF_S, Frames(MOST_UNPROVEN))
            self._strangers[connection.fileno()] = stranger
            self._of[stranger.address] += 1
            self._selector.register(connection, selectors.EVENT_READ)

    def _make_room(self) -> None:
        """Hang up on the oldest unproven caller, or sleep a moment, since no file descriptors are left."""
        if oldest := next(iter(self._strangers.values()), None):
            self._hang_up(oldest, "there are no file descriptors left")
        else:
            time.sleep(0.05)

    def _serve(self, stranger: _Stranger) -> Caller | None:
        try:
            if not (data := stranger.connection.recv(4096)):
                raise ProofError("it went before it had proved anything")
            stranger.frames.feed(data)
            body = stranger.frames.take()
            if body is not None and stranger.challenge is None:
                stranger.challenge = Challenge(self._secret, body)
                stranger.connection.send(frame(stranger.challenge.answer))
                body = stranger.frames.take()
            if body is None or stranger.challenge is None:
                return None
            if not stranger.challenge.met_by(body) or not stranger.frames.empty:
                raise ProofError("it does not have this job's secret")
        except BlockingIOError:
            return None
        except (OSError, FrameError) as error:
            self._hang_up(stranger, str(error))
            return None
        self._forget(stranger)
        role, place = stranger.challenge.role, stranger.challenge.place
        why = self._refuse(role, place)
        try:
            stranger.connection.send(frame(why.encode()))
        except OSError:
            why = "it is gone"
        if why:
            stranger.connection.close()
        return None if why else Caller(stranger.connection, role, place)

    def _hang_up(self, stranger: _Stranger, why: str) -> None:
        self._forget(stranger)
        stranger.connection.close()
        if stranger.address not in self._named and len(self._named) < _NAMED:
            self._named.add(stranger.address)
            log(f"a connection from {stranger.address} was refused: {why}; training goes on, and later ones from "
                "there are not named")  # fmt: skip

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection.fileno()]
        self._of[stranger.address] -= 1
        if not self._of[stranger.address]:
            del self._of[stranger.address]

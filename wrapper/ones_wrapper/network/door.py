"""Authentication of callers at a listening socket.

An unproven caller holds no thread, and hardly any memory. Its connection is closed when the time for its proof is over.
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
"""Largest number of connections without a proof. Above it, the oldest one of the address that has the most is
closed."""
_AT_ONCE = 64
"""Largest number of connections that are accepted in a row before earlier callers are served."""
_NAMED = 100
"""Largest number of addresses that are named in the log."""


def listen(host: str) -> socket.socket:
    """Return a socket that listens at this node's name or address `host`, on a free port.

    In some distributions the name resolves only to the loopback address. Then the socket listens at all addresses,
    since other nodes resolve the name to another one.
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
    """Connection of a caller that has proved that it has the secret."""

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
    """A listening socket, and the callers that have not proved themselves yet."""

    def __init__(self, listener: socket.socket, secret: JobSecret, refuse: Callable[[str, str], str]) -> None:
        """`refuse` returns the reason to refuse a proven caller's role and place; empty accepts the caller."""
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
        """Port of the listening socket."""
        return int(self._listener.getsockname()[1])

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `look` has something to do."""
        return self._selector.fileno()

    def sockets(self) -> list[socket.socket]:
        """Return all sockets of the door, for a forked child to close."""
        return [self._listener, *(one.connection for one in list(self._strangers.values()))]

    def next_s(self) -> float | None:
        """Return the seconds until the time for the oldest caller's proof ends; None without callers."""
        oldest = next(iter(self._strangers.values()), None)
        return max(0.0, oldest.until - time.monotonic()) if oldest else None

    def look(self, timeout_s: float = 0.0) -> list[Caller]:
        """Wait up to `timeout_s` seconds for callers, check their proofs, and return those accepted now."""
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
            self._hang_up(stranger, f"it sent no proof within {PROOF_S:g} s")
        return found

    def close(self) -> None:
        """Stop listening; connections of accepted callers stay open."""
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
                self._hang_up(oldest, f"it has more than {UNPROVEN} connections without a proof")
            stranger = _Stranger(connection, str(address[0]), time.monotonic() + PROOF_S, Frames(MOST_UNPROVEN))
            self._strangers[connection.fileno()] = stranger
            self._of[stranger.address] += 1
            self._selector.register(connection, selectors.EVENT_READ)

    def _make_room(self) -> None:
        """Close the oldest connection without a proof, because file descriptors have run out. If all have a proof,
        sleep a moment."""
        if oldest := next(iter(self._strangers.values()), None):
            self._hang_up(oldest, "there are no file descriptors left")
        else:
            time.sleep(0.05)

    def _serve(self, stranger: _Stranger) -> Caller | None:
        try:
            if not (data := stranger.connection.recv(4096)):
                raise ProofError("it closed the connection before its proof")
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
            log(f"a connection from {stranger.address} was refused: {why}; training goes on, and later refusals "
                "of this address are not logged")  # fmt: skip

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection.fileno()]
        self._of[stranger.address] -= 1
        if not self._of[stranger.address]:
            del self._of[stranger.address]

"""Key-value store of a job's processes: bytes by key, in places that each have their own keys.

One thread serves all connections. When the connection of a place's host ends, the place ends, and its other connections
are closed. A place without a host, where ranks meet, ends with its last member, unless a member's idle connection was
closed (`rest`). Imports only the standard library, since `ones-run` serves it.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import weakref
from contextlib import suppress

from ones_wrapper.network.door import Door, listen
from ones_wrapper.network.frames import MOST, READ, FrameError, Frames, fields, frame, hang_up, parts_of
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.process.hang_detector import Standstill

HOST, MEMBER, MEET = "host", "member", "meet"
"""Roles of a connection: host of a place, which ends with this connection; member of a place with a host; member of a
place without one."""
_TURN_S = 1.0
"""Longest time, in seconds, between two checks for a suspension of this process."""
_MOST_UNREAD = 4 * MOST
"""Largest number of bytes that a member may leave unread, before its connection is closed."""
_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


class _Place:
    """One place of the store."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.members: set[_Member] = set()
        self.awaited: dict[bytes, set[_Member]] = {}
        self.followers: dict[bytes, set[_Member]] = {}
        self.heard: dict[bytes, float] = {}
        """Monotonic time of each process's last heartbeat, or of the first request about the process."""
        self.leads = b""
        """Name in the host's heartbeats; empty if it sends none."""
        self.rests = False
        """True once a member's connection was closed because it was idle."""


class _Member:
    def __init__(self, connection: socket.socket, name: str, place: _Place, hosts: bool) -> None:
        self.connection, self.name, self.place, self.hosts = connection, name, place, hosts
        self.frames, self.unsent = Frames(), bytearray()
        self.missing: set[bytes] = set()
        self.until = 0.0
        self.keys: tuple[bytes, ...] = ()
        """Keys for which this member waits."""
        self.follows: tuple[bytes, ...] = ()
        self.will: tuple[bytes, ...] = ()
        """Keys, each followed by its value, that the store sets when this connection ends."""


def _kind(key: bytes) -> bytes:
    return key.partition(b"-")[0]


class StoreServer:
    """Server of a job's store, in a thread from its construction until `close` or the process's end."""

    def __init__(self, listener: socket.socket, secret: JobSecret) -> None:
        self._door = Door(listener, secret, self._why_not)
        self.port = self._door.port
        self._places: dict[str, _Place] = {}
        self._still = Standstill()
        self._members: set[_Member] = set()
        self._waiting: set[_Member] = set()
        self._broken: list[_Member] = []
        """Members whose connections failed; they are removed at the end of the turn. Sending one member's `will` to
        others may find more of them, since all ranks of a node end together."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._stopped, self._wake = socket.socketpair()
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="ones-store", daemon=True)
        _servers.add(self)
        self._thread.start()

    @classmethod
    def at(cls, host: str, secret: JobSecret) -> StoreServer:
        """Return a server that listens at this node's name or address."""
        return cls(listen(host), secret)

    def close(self) -> None:
        """Stop the server, and wait for its thread."""
        with suppress(OSError):
            self._wake.close()
        self._thread.join()

    def close_in_child(self) -> None:
        """Close all sockets in a forked process, which must keep no connection open."""
        for one in (*self._door.sockets(), *(member.connection for member in self._members), self._stopped, self._wake):
            with suppress(OSError):
                one.close()

    def _why_not(self, role: str, name: str) -> str:
        if role == MEMBER and name not in self._places:
            return f"nobody hosts {name} here"
        if role == HOST and name in self._places:
            return f"{name} is hosted already"
        return "" if role in (HOST, MEMBER, MEET) else f"{role}: there is no such role"

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._door.close()
            for member in list(self._members):
                hang_up(member.connection)
            self._selector.close()
            self._stopped.close()

    def _turn(self) -> bool:
        waits = [_TURN_S, self._door.next_s(), *(max(0.0, one.until - time.monotonic()) for one in self._waiting)]
        found = self._selector.select(min(one for one in waits if one is not None))
        if stood_s := self._still.look():
            for place in self._places.values():
                place.heard = {name: min(at + stood_s, time.monotonic()) for name, at in place.heard.items()}
        for key, events in found:
            if key.fileobj is self._stopped:
                return False
            if key.fileobj is self._door:
                continue
            member: _Member = key.data
            if member not in self._members:  # left in this same turn
                continue
            if events & selectors.EVENT_WRITE:
                self._send(member)
            if events & selectors.EVENT_READ and member in self._members:
                self._receive(member)
        knock = any(key.fileobj is self._door for key, _ in found) or self._door.next_s() == 0.0
        for caller in self._door.look() if knock else ():
            self._enter(caller.connection, caller.role, caller.place)
        now = time.monotonic()
        for member in [one for one in self._waiting if one.until <= now]:
            self._wait_over(member)
            self._answer(member, b"late", *sorted(member.missing))
        while self._broken:
            self._leave(self._broken.pop())
        return True

    def _enter(self, connection: socket.socket, role: str, name: str) -> None:
        if self._why_not(role, name):  # two hosts came at once
            hang_up(connection)
            return
        if name not in self._places:  # ranks start again: their earlier places, which are idle, end
            self._places = {other: one for other, one in self._places.items() if one.members}
        place = self._places.setdefault(name, _Place())
        member = _Member(connection, name, place, role == HOST)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        place.members.add(member)
        self._members.add(member)
        self._selector.register(connection, selectors.EVENT_READ, member)

    def _leave(self, member: _Member) -> None:
        if member not in self._members:
            return
        self._members.discard(member)
        self._wait_over(member)
        self._selector.unregister(member.connection)
        hang_up(member.connection)
        place = member.place
        place.members.discard(member)
        for kind in member.follows:
            place.followers[kind].discard(member)
        if member.hosts or not (place.members or place.rests):
            if self._places.get(member.name) is place:
                del self._places[member.name]
            for other in list(place.members):
                self._leave(other)
        elif member.will:
            self._do_set(member, *member.will)

    def _receive(self, member: _Member) -> None:
        try:
            data = member.connection.recv(READ)
            if not data:
                self._leave(member)
                return
            member.frames.feed(data)
            self._serve(member)
        except BlockingIOError:
            return
        except (OSError, FrameError):
            self._leave(member)

    def _serve(self, member: _Member) -> None:
        """Answer a member's requests in order, until one must wait for keys."""
        while member in self._members and member not in self._waiting and (body := member.frames.take()) is not None:
            what, *parts = parts_of(body) or [b""]
            act = getattr(self, f"_do_{what.decode('ascii', 'replace')}", None) if what.isalpha() else None
            try:
                if act is None:
                    raise ValueError(f"there is no request {what!r:.40}")
                found = act(member, *parts)
            except (TypeError, ValueError, OverflowError) as error:
                self._answer(member, b"no", str(error)[:300].encode())
                continue
            if found is not None:
                self._answer(member, b"ok", *found)

    def _answer(self, member: _Member, *parts: bytes) -> None:
        self._send(member, frame(fields(*parts)))

    def _send(self, member: _Member, message: bytes = b"") -> None:
        """Send a message to a member, after bytes not sent yet."""
        if held := bool(member.unsent):
            member.unsent += message
        try:
            sent = member.connection.send(member.unsent or message)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._broken.append(member)
            return
        if not held and sent == len(message):
            return
        member.unsent += b"" if held else message
        del member.unsent[:sent]
        if len(member.unsent) > _MOST_UNREAD:
            self._broken.append(member)
        elif held != bool(member.unsent):
            wanted = selectors.EVENT_READ | (0 if held else selectors.EVENT_WRITE)
            self._selector.modify(member.connection, wanted, member)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _do_set(self, member: _Member, *pairs: bytes) -> list[bytes]:
        if len(pairs) % 2:
            raise ValueError("a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            member.place.values[key] = value
        self._there(member.place, pairs[::2])
        return []

    def _do_append(self, member: _Member, key: bytes, value: bytes) -> list[bytes]:
        values = member.place.values
        values[key] = values.get(key, b"") + value
        self._there(member.place, (key,))
        return []

    def _do_add(self, member: _Member, key: bytes, more: bytes) -> list[bytes]:
        values = member.place.values
        values[key] = b"%d" % (int(values.get(key, b"0")) + int(more))
        self._there(member.place, (key,))
        return [values[key]]

    def _do_swap(self, member: _Member, key: bytes, expected: bytes, value: bytes) -> list[bytes]:
        values = member.place.values
        if values.get(key, b"") == expected and (key in values or not expected):
            values[key] = value
            self._there(member.place, (key,))
        return [values.get(key, expected)]

    def _do_peek(self, member: _Member, *keys: bytes) -> list[bytes]:
        """Return the value of each key after a byte `+`; an empty field for a missing key."""
        values = member.place.values
        return [b"+" + values[key] if key in values else b"" for key in keys]

    def _do_delete(self, member: _Member, *keys: bytes) -> list[bytes]:
        return [b"%d" % sum(member.place.values.pop(key, None) is not None for key in keys)]

    def _do_keys(self, member: _Member, begin: bytes) -> list[bytes]:
        return [key for key in member.place.values if key.startswith(begin)]

    def _do_follow(self, member: _Member, *kinds: bytes) -> list[bytes]:
        """Return keys and values of these kinds now, and push later values."""
        place = member.place
        for kind in kinds:
            place.followers.setdefault(kind, set()).add(member)
        member.follows += kinds
        return [part for key, value in place.values.items() if _kind(key) in kinds for part in (key, value)]

    def _do_sign(self, member: _Member, name: bytes, age: bytes, *more: bytes) -> list[bytes]:
        """Record heartbeats, given as names and milliseconds since each. Return the milliseconds since the host's last
        one."""
        place, now = member.place, time.monotonic()
        for one, milliseconds in zip((name, *more[::2]), (age, *more[1::2]), strict=True):
            place.heard[one] = now - int(milliseconds) / 1000
        if member.hosts:
            place.leads = name
        return self._do_ages(member, place.leads or name)

    def _do_ages(self, member: _Member, *names: bytes) -> list[bytes]:
        """Return the milliseconds since each name's last heartbeat, or since the first request about the name."""
        now, heard = time.monotonic(), member.place.heard
        return [b"%d" % (1000 * (now - heard.setdefault(name, now))) for name in names]

    def _do_rest(self, member: _Member) -> list[bytes]:
        """Keep the place when this member leaves, even if no member remains, until another place begins."""
        member.place.rests = True
        return []

    def _do_will(self, member: _Member, *pairs: bytes) -> list[bytes]:
        if len(pairs) % 2:
            raise ValueError("a key without a value")
        member.will = pairs
        if member.hosts and not pairs:
            member.place.leads = b""
        return []

    def _do_get(self, member: _Member, milliseconds: bytes, *keys: bytes) -> list[bytes] | None:
        member.until, member.keys = time.monotonic() + int(milliseconds) / 1000, keys
        return self._await(member)

    def _await(self, member: _Member) -> list[bytes] | None:
        """Return the values that a member requested; None if a key is missing, for which it must wait."""
        place = member.place
        member.missing = {key for key in member.keys if key not in place.values}
        if not member.missing:
            return [place.values[key] for key in member.keys]
        for key in member.missing:
            place.awaited.setdefault(key, set()).add(member)
        self._waiting.add(member)
        return None

    def _there(self, place: _Place, keys: tuple[bytes, ...]) -> None:
        """Push the values of these new keys to members that follow their kind, and answer members that wait for
        them."""
        for key in keys:
            if followers := list(place.followers.get(_kind(key), ())):
                message = frame(fields(b"news", key, place.values[key]))
                for member in followers:
                    self._send(member, message)
        for key in keys if place.awaited else ():
            for member in place.awaited.pop(key, ()):
                member.missing.discard(key)
                if not member.missing:
                    self._wait_over(member)
                    found = self._await(member)  # a key may have been deleted meanwhile
                    if found is not None:
                        self._answer(member, b"ok", *found)
                        self._serve(member)

    def _wait_over(self, member: _Member) -> None:
        self._waiting.discard(member)
        for key in member.missing:
            waiting = member.place.awaited.get(key, set())
            waiting.discard(member)
            if not waiting:
                member.place.awaited.pop(key, None)


def _in_child() -> None:
    for server in list(_servers):
        server.close_in_child()


os.register_at_fork(after_in_child=_in_child)

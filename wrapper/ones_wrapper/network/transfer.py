"""State from the memory of ranks that train into that of new ones, over plain connections.

All tensors make one row of bytes; each of a newcomer's senders sends a stretch of it, so several send at once. The
newcomer receives into the tensors that it trains with. The first sender also sends what is no tensor, as
`torch.load(weights_only=True)` takes it. A connection begins with a proof that is worth something to one newcomer of
one generation alone.
"""

from __future__ import annotations

import io
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ones_wrapper.network.door import Door, listen
from ones_wrapper.network.frames import hang_up
from ones_wrapper.network.proof import prove
from ones_wrapper.network.secret import JobSecret

TIMEOUT_S = 20.0
"""Longest silence on a connection."""
SENDERS = 4
"""Most ranks that send to one newcomer."""
_HEAD = struct.Struct("!II")
_MOST_HEADER = 64 << 20
_MOST_REST = 1 << 31
_VECTOR = 256
"""Stretches of memory handed to the kernel at once."""


class TransferError(RuntimeError):
    """The state did not arrive whole; the message says why."""


@dataclass(frozen=True)
class Sender:
    """One rank's part in sending: to one newcomer."""

    address: tuple[str, int]
    place: str
    """What the newcomer waits for (`state_for`)."""
    number: int
    """Of the newcomer's senders, from 0."""
    count: int


@dataclass(frozen=True)
class Received:
    """What a newcomer got beside the tensors."""

    rest: dict[str, Any]
    bytes: int
    seconds: float


def state_for(board: str, generation: int, rank: int) -> str:
    """The name of the state that a rank of a coming membership waits for."""
    return f"state-{board}-{generation}-{rank}"


def senders(world: int, rank: int, newcomers: Sequence[tuple[str, int, str]]) -> list[Sender]:
    """What this rank of `world` that have the state sends, to newcomers: (host, port, `state_for` it)."""
    count = min(world, SENDERS)
    numbers = [(rank - index * count) % world for index in range(len(newcomers))]
    return [
        Sender((host, port), place, number, count)
        for (host, port, place), number in zip(newcomers, numbers, strict=True)
        if number < count
    ]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _layout(tensors: dict[str, torch.Tensor]) -> list[list[Any]]:
    return [[path, str(t.dtype), list(t.shape)] for path, t in sorted(tensors.items())]


def _stretches(sizes: Sequence[int], number: int, count: int) -> list[tuple[int, int, int]]:
    """(tensor, first byte, last byte + 1) of what sender `number` sends."""
    total = sum(sizes)
    begin, end = total * number // count, total * (number + 1) // count
    found, at = [], 0
    for index, size in enumerate(sizes):
        first, last = max(begin, at), min(end, at + size)
        if first < last:
            found.append((index, first - at, last - at))
        at += size
    return found


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def send(
    to: Sender,
    secret: JobSecret,
    tensors: dict[str, torch.Tensor],
    rest: dict[str, Any] | None,
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Send this rank's stretch, and wait until the newcomer has taken over all; the bytes sent.

    `rest` is plain data, sent by the newcomer's first sender. Raises OSError or `TransferError`.
    """
    names = sorted(tensors)
    header = {"number": to.number, "count": to.count, "layout": _layout(tensors)}
    encoded, plain = json.dumps(header, separators=(",", ":")).encode(), io.BytesIO()
    if to.number == 0:
        torch.save(rest, plain)
    with socket.create_connection(to.address, timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove(connection, secret, "sender", to.place, timeout_s)
        connection.settimeout(timeout_s)
        connection.sendall(_HEAD.pack(len(encoded), plain.tell()))
        connection.sendall(encoded)
        connection.sendall(plain.getbuffer())
        sizes = [_size(tensors[name]) for name in names]
        views: list[memoryview] = []
        sent = 0
        for index, first, last in _stretches(sizes, to.number, to.count):
            tensor = tensors[names[index]].detach()
            views.append(_bytes_of(tensor.cpu().contiguous())[first:last])
            sent += last - first
            if len(views) == _VECTOR:
                _send_views(connection, views)
                views = []
        _send_views(connection, views)
        if connection.recv(1) != b"1":
            raise TransferError(f"{to.address[0]} did not take the state over")
    return sent


def _send_views(connection: socket.socket, views: list[memoryview]) -> None:
    while views:
        done = connection.sendmsg(views)
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    _into(connection, memoryview(data))
    return data


def _into(connection: socket.socket, view: memoryview) -> None:
    while view:
        got = connection.recv_into(view)
        if not got:
            raise TransferError("the connection closed before all had come")
        view = view[got:]


class Receiver:
    """A newcomer's end. Listens from the beginning; `receive` takes the state."""

    def __init__(self, secret: JobSecret, host: str) -> None:
        """`host` is this node's name."""
        self._place = ""
        self._door = Door(listen(host), secret, self._why_not)
        self.port = self._door.port

    def close(self) -> None:
        """Listen no longer."""
        self._door.close()

    def _why_not(self, role: str, place: str) -> str:
        return "" if role == "sender" and place == self._place else f"{place} is not awaited here"

    def receive(
        self,
        place: str,
        tensors: dict[str, torch.Tensor],
        take_over: Callable[[dict[str, Any], dict[str, torch.Tensor]], None],
        given_up: Callable[[], str],
        timeout_s: float = TIMEOUT_S,
    ) -> Received | None:
        """Wait for the senders of the state at this place, receive into `tensors`, have `take_over` load the rest, with
        those tensors that were sent, and tell the senders.

        None where `given_up` says, before the first of them came, why none will. Raises `TransferError`.
        """
        joined, self._place = _Connections(tensors), place
        until = float("inf")
        started = 0.0
        try:
            while not joined.whole():
                if time.monotonic() > until:
                    raise TransferError("not all senders came")
                if not joined.begun and given_up():
                    return None
                for caller in self._door.look(0.02 if not joined.begun else 0.2):
                    if not joined.begun:
                        started, until = time.monotonic(), time.monotonic() + timeout_s
                    caller.connection.settimeout(timeout_s)
                    joined.add(caller.connection)
            joined.wait()
            take_over(joined.rest, {name: tensors[name] for name in joined.names})
            joined.answer(b"1")
            return Received(joined.rest, joined.bytes, time.monotonic() - started)
        finally:
            joined.close()


class _Connections:
    """The senders that came, each read by a thread of its own."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        # What the kernel cannot write into is received beside it, and copied at the end.
        self._places = {name: t if _plain(t) else torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._count: int | None = None
        self.names: list[str] = []
        """The tensors that are sent."""
        self._errors: list[str] = []
        self._lock = threading.Lock()
        self._header = threading.Event()
        self.rest: dict[str, Any] = {}
        self.bytes = 0

    @property
    def begun(self) -> bool:
        return bool(self._open)

    def whole(self) -> bool:
        """Whether all senders came; raises what failed."""
        if self._open:
            self._header.wait(TIMEOUT_S)
        if self._errors:
            raise TransferError(self._errors[0])
        return self._count is not None and len(self._open) >= self._count

    def add(self, connection: socket.socket) -> None:
        self._open.append(connection)
        thread = threading.Thread(target=self._run, args=(connection,), name="ones-receive", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise TransferError(self._errors[0])
        for name in self.names:
            if self._places[name] is not self._tensors[name]:
                self._tensors[name].copy_(self._places[name])

    def answer(self, word: bytes) -> None:
        for connection in self._open:
            connection.sendall(word)

    def close(self) -> None:
        for connection in self._open:
            hang_up(connection)

    def _run(self, connection: socket.socket) -> None:
        try:
            self._receive(connection)
        except Exception as error:
            self._errors.append(f"{type(error).__name__}: {error}"[:300])
        finally:
            self._header.set()

    def _receive(self, connection: socket.socket) -> None:
        header_size, rest_size = _HEAD.unpack(_read(connection, _HEAD.size))
        if header_size > _MOST_HEADER or rest_size > _MOST_REST:
            raise TransferError("a header that is too large")
        header = json.loads(_read(connection, header_size))
        layout, ours = header["layout"], {entry[0]: entry for entry in _layout(self._tensors)}
        if wrong := [entry for entry in layout if ours.get(entry[0]) != entry]:
            path = wrong[0][0]
            raise TransferError(
                f"{path} is {wrong[0][1:]} with those who train and {ours.get(path, ['', 'not'])[1:]} here"
            )
        names = [entry[0] for entry in layout]
        number, count = int(header["number"]), int(header["count"])
        if not 0 <= number < count:
            raise TransferError("a sender out of range")
        self._count, self.names = count, names
        self._header.set()
        if rest_size:
            self.rest = torch.load(io.BytesIO(_read(connection, rest_size)), weights_only=True, map_location="cpu")
        got = 0
        for index, first, last in _stretches([_size(self._places[name]) for name in names], number, count):
            _into(connection, _bytes_of(self._places[names[index]])[first:last])
            got += last - first
        with self._lock:
            self.bytes += got


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()

"""Transfer of the state from the memory of training ranks to the memory of new ranks, over TCP.

All tensors are treated as one sequence of bytes. Each sender sends one range of it, in chunks of `CHUNK` bytes, and has
two chunks in memory. The new rank receives directly into the tensors with which it trains. The first sender also sends
the rest of the state, in the format of `torch.load(weights_only=True)`. Each connection begins with a proof, which is
valid for one new rank of one generation.

A connection is given up if it is silent for `TIMEOUT_S` seconds. A new rank that waits for other senders, or loads the
state, sends a byte every `ALIVE_S` seconds, for at most `patience_s`.
"""

from __future__ import annotations

import io
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ones_wrapper.devices import streams
from ones_wrapper.devices.host_memory import CHUNK, bytes_of, fill, memory_of
from ones_wrapper.network.door import Door, listen
from ones_wrapper.network.frames import hang_up
from ones_wrapper.network.proof import prove
from ones_wrapper.network.secret import JobSecret

T = TypeVar("T")

TIMEOUT_S = 20.0
"""Longest time, in seconds, without a byte on a connection."""
ALIVE_S = 2.0
"""Seconds between two bytes by which a new rank reports that it is alive."""
SLOWEST = 50e6
"""Lowest rate to a new rank in bytes/s, summed over its senders: half of gigabit Ethernet. A slower transfer is given
up."""
_ALIVE, _DONE = b".", b"1"
SENDERS = 4
"""Largest number of ranks that send to one new rank."""
_HEAD = struct.Struct("!IQ")
_MOST_HEADER = 64 << 20
_MOST_REST = 1 << 40
_VECTOR = 256
"""Largest number of buffers that are given to the kernel in one call."""


def patience_s(size: int, timeout_s: float = TIMEOUT_S) -> float:
    """Return the longest time, in seconds, for the transfer of `size` bytes."""
    return timeout_s + size / SLOWEST


class TransferError(RuntimeError):
    """Error: the state did not arrive completely. The message says why."""


class SendersLostError(TransferError):
    """Error: senders ended, or were silent, before the state had arrived completely."""


@dataclass(frozen=True)
class Sender:
    """Part of the state that one rank sends to one new rank."""

    address: tuple[str, int]
    place: str
    """Name of the state that this sender sends (`state_for`)."""
    number: int
    """Number of this sender among the new rank's senders, from 0."""
    count: int


def state_for(board: str, generation: int, rank: int) -> str:
    """Return the name of the state for one rank in the next membership."""
    return f"state-{board}-{generation}-{rank}"


def senders(world: int, rank: int, newcomers: Sequence[tuple[str, int, str]]) -> list[Sender]:
    """Return the parts of the state that a rank sends; `world` is the number of ranks that train. Each newcomer is a
    new rank, given as (host, port, result of `state_for`)."""
    count = min(world, SENDERS)
    numbers = [(rank - index * count) % world for index in range(len(newcomers))]
    return [
        Sender((host, port), place, number, count)
        for (host, port, place), number in zip(newcomers, numbers, strict=True)
        if number < count
    ]


def _layout(tensors: dict[str, torch.Tensor]) -> list[list[Any]]:
    return [[path, str(t.dtype), list(t.shape)] for path, t in sorted(tensors.items())]


def _stretches(sizes: Sequence[int], number: int, count: int) -> list[tuple[int, int, int]]:
    """Return (index of a tensor, first byte, end) of each range of bytes that sender `number` of `count` sends."""
    total = sum(sizes)
    begin, end = total * number // count, total * (number + 1) // count
    found, at = [], 0
    for index, size in enumerate(sizes):
        first, last = max(begin, at), min(end, at + size)
        if first < last:
            found.append((index, first - at, last - at))
        at += size
    return found


def send(
    to: Sender,
    secret: JobSecret,
    tensors: dict[str, torch.Tensor],
    rest: dict[str, Any] | None,
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Send this rank's range, wait until the new rank has loaded the whole state, and return the bytes sent. `rest` is
    the rest of the state, for the first sender. Raises OSError or `TransferError`."""
    names = sorted(tensors)
    header = {"number": to.number, "count": to.count, "layout": _layout(tensors)}
    encoded, plain = json.dumps(header, separators=(",", ":")).encode(), packed(rest) if to.number == 0 else b""
    with socket.create_connection(to.address, timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove(connection, secret, "sender", to.place, timeout_s)
        connection.settimeout(timeout_s)
        connection.sendall(_HEAD.pack(len(encoded), len(plain)))
        connection.sendall(encoded)
        _send_views(connection, [memoryview(plain)])  # may be gigabytes: `sendall` has one time-out for all of it
        sizes = [tensors[name].nbytes for name in names]
        stretches = _stretches(sizes, to.number, to.count)
        with ThreadPoolExecutor(1, "ones-copy") as copier:
            for views in _ahead(copier, _views([tensors[name] for name in names], stretches)):
                _send_views(connection, views)
        _await_answer(connection, to.address[0], patience_s(sum(sizes) + len(plain), timeout_s))
    return sum(last - first for _, first, last in stretches)


def _await_answer(connection: socket.socket, host: str, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while (word := connection.recv(1)) == _ALIVE:
        if time.monotonic() > until:
            raise TransferError(f"{host} did not take the state over within {patience_s:g} s")
    if word != _DONE:
        raise TransferError(f"{host} did not take the state over")


def _views(tensors: Sequence[torch.Tensor], stretches: Sequence[tuple[int, int, int]]) -> Iterator[list[memoryview]]:
    """Yield the bytes of the ranges from `_stretches` in lists of buffers. A list has at most `_VECTOR` buffers, and at
    most `CHUNK` bytes in total. Contiguous CPU tensors are not copied."""
    views: list[memoryview] = []
    held = 0
    for index, first, last in stretches:
        flat = bytes_of(tensors[index].detach().contiguous())
        for begin in range(first, last, CHUNK):
            end = min(last, begin + CHUNK)
            if views and (held + end - begin > CHUNK or len(views) == _VECTOR):
                yield views
                views, held = [], 0
            views.append(memory_of(_on_host(flat[begin:end])))
            held += end - begin
    yield views


def _on_host(piece: torch.Tensor) -> torch.Tensor:
    if piece.device.type == "cpu":
        return piece
    pinned = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True)
    pinned.copy_(piece, non_blocking=True)
    torch.cuda.current_stream(piece.device).synchronize()
    return pinned


def _ahead(copier: ThreadPoolExecutor, chunks: Iterator[T]) -> Iterator[T]:
    """Yield the chunks; a thread makes the next chunk while the present one is sent."""
    coming = copier.submit(next, chunks, None)
    while (chunk := coming.result()) is not None:
        coming = copier.submit(next, chunks, None)
        yield chunk


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
            raise SendersLostError("the connection closed before all had come")
        view = view[got:]


def packed(state: dict[str, Any] | None) -> bytes:
    """Return the rest of the state as bytes for `unpacked`."""
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


def unpacked(data: bytes | bytearray) -> dict[str, Any]:
    """Return the rest of the state from the bytes of `packed`; this runs no code."""
    found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return found


class Receiver:
    """The new rank's end of a transfer. It listens as soon as it is made; `receive` receives the state."""

    def __init__(self, secret: JobSecret, host: str) -> None:
        """`host` is this node's name."""
        self._place = ""
        self._door = Door(listen(host), secret, self._why_not)
        self.port = self._door.port

    def close(self) -> None:
        """Stop listening."""
        self._door.close()

    def _why_not(self, role: str, place: str) -> str:
        return "" if role == "sender" and place == self._place else f"{place} is not expected here"

    def receive(
        self,
        place: str,
        tensors: dict[str, torch.Tensor],
        given_up: Callable[[], str],
        timeout_s: float = TIMEOUT_S,
    ) -> Received | None:
        """Wait for the senders of the state at this place, and receive it into `tensors`. Returns None if `given_up`
        returns a reason before a sender has come. Raises `TransferError`."""
        received, self._place = Received(tensors), place
        until = float("inf")
        started = 0.0
        try:
            while not received.whole():
                if time.monotonic() > until:
                    raise SendersLostError("not all senders came")
                if not received.begun and given_up():
                    received.close()
                    return None
                for caller in self._door.look(0.02 if not received.begun else 0.2):
                    if not received.begun:
                        started, until = time.monotonic(), time.monotonic() + timeout_s
                    caller.connection.settimeout(timeout_s)
                    received.add(caller.connection)
            received.wait()
            received.seconds = time.monotonic() - started
            return received
        except BaseException:
            received.close()
            raise


class Received:
    """State that a new rank receives, in one thread for each sender. Call `answer` after loading the state, and `close`
    in any case."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        # A tensor that is not contiguous gets its bytes at the end, from a contiguous copy.
        self._places = {
            name: t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device)
            for name, t in tensors.items()
        }
        self._over = threading.Event()
        self._answering = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._count: int | None = None
        self.names: list[str] = []
        self._errors: list[TransferError] = []
        self._header = threading.Event()
        self.packed = bytearray()
        """Rest of the state, for `unpacked`."""
        self.bytes = 0
        self.seconds = 0.0

    @property
    def begun(self) -> bool:
        return bool(self._open)

    def whole(self) -> bool:
        """Return True if all senders are connected. Raises `TransferError` if one has failed."""
        if self._open:
            self._header.wait(TIMEOUT_S)
        if self._errors:
            raise self._errors[0]
        return self._count is not None and len(self._open) >= self._count

    def add(self, connection: socket.socket) -> None:
        if not self._open:
            threading.Thread(target=self._say_alive, name="ones-alive", daemon=True).start()
        self._open.append(connection)
        thread = threading.Thread(target=self._run, args=(connection,), name="ones-receive", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        self.bytes = sum(self._places[name].nbytes for name in self.names)
        for name in self.names:
            if self._places[name] is not self._tensors[name]:
                self._tensors[name].copy_(self._places[name])
        for device in {t.device for t in self._tensors.values()}:
            streams.wait(device)  # each thread has a stream of its own

    def answer(self) -> None:
        """Report to the senders that the state is loaded."""
        with self._answering:
            self._over.set()
            for connection in self._open:
                connection.sendall(_DONE)

    def _say_alive(self) -> None:
        while not self._over.wait(ALIVE_S):
            with self._answering, suppress(OSError):
                for connection in () if self._over.is_set() else tuple(self._open):
                    connection.sendall(_ALIVE)

    def close(self) -> None:
        """Close the connections."""
        self._over.set()
        for connection in self._open:
            hang_up(connection)
        for thread in self._threads:  # no thread may write into tensors that the next state fills
            thread.join()

    def _run(self, connection: socket.socket) -> None:
        try:
            self._receive(connection)
        except Exception as error:
            lost = isinstance(error, (OSError, SendersLostError))
            kind = SendersLostError if lost else TransferError
            self._errors.append(kind(f"{type(error).__name__}: {error}"[:300]))
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
                f"{path} is {wrong[0][1:]} on the training ranks and {ours.get(path, ['', 'not'])[1:]} here"
            )
        names = [entry[0] for entry in layout]
        number, count = int(header["number"]), int(header["count"])
        if not 0 <= number < count:
            raise TransferError("a sender out of range")
        self._count, self.names = count, names
        self._header.set()
        if rest_size:
            self.packed = _read(connection, rest_size)
        for index, first, last in _stretches([self._places[name].nbytes for name in names], number, count):
            fill(bytes_of(self._places[names[index]])[first:last], partial(_into, connection))

"""Files of a checkpoint in the nodes' memory: a process of each launcher serves its folder, and new ranks fetch them.

A connection is for one file, which the proof names. The caller then sends a byte, and gets the file's size and its
bytes. Needs only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from ones_wrapper.files.checksums import Sum, checksum
from ones_wrapper.files.job_directory import STEP_NAME
from ones_wrapper.files.node_memory import PIECE, HeldCheckpoint, MemoryFolder, ours, own_folder, room
from ones_wrapper.files.small_files import replace_small
from ones_wrapper.network.door import Door
from ones_wrapper.network.frames import hang_up
from ones_wrapper.network.proof import prove
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.protocol import MANIFEST

TIMEOUT_S = 20.0
"""Longest silence on a connection, in seconds."""
SLOWEST = 10e6
"""Least bytes/s of a connection; a slower one is given up."""
_ROLE = "piece"
_GO = b"."
"""Byte that a caller sends once it has read the whole proof."""
_SIZE = struct.Struct("!Q")
_BLOCK = 1 << 20
_PLACE = re.compile(rf"({STEP_NAME.pattern})/({PIECE.pattern})", re.ASCII)


class PieceError(OSError):
    """Raised if a file of the checkpoint cannot be fetched; the message says why."""


def serve(folder: Path, listener: socket.socket, secret: JobSecret) -> None:
    """Serve the checkpoints' files in a launcher's folder for ever, to proven processes of the job."""

    def refusal(role: str, place: str) -> str:
        return "" if role == _ROLE and _PLACE.fullmatch(place) else "nothing of that name is served here"

    door = Door(listener, secret, refusal)
    while True:
        wait_s = door.next_s()
        for caller in door.look(TIMEOUT_S if wait_s is None else wait_s):
            Thread(target=_send, args=(caller.connection, folder / caller.place), daemon=True).start()


def _send(connection: socket.socket, path: Path) -> None:
    """Send a file if it belongs to this user; then close the connection."""
    with suppress(OSError):
        connection.settimeout(TIMEOUT_S)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb", buffering=0) as file:
            state = os.fstat(handle)
            connection.recv(len(_GO))
            if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid():
                connection.sendall(_SIZE.pack(state.st_size))
                connection.sendfile(file)
    hang_up(connection)


def take(held: HeldCheckpoint, secret: JobSecret, part: int, parts: int, present: Sequence[str] = ()) -> str:
    """Copy part `part` of `parts` of a checkpoint's files into this launcher's folder, and check their checksums.
    Return the damage in words; empty if there is no damage. Folders in `present` are asked before others."""
    own = own_folder()
    if own is None or not ours(own.path):
        return "this node keeps nothing in memory"
    try:
        for folder in (own.checkpoints, own.checkpoints / held.name):
            folder.mkdir(mode=0o700, exist_ok=True)
        files = sorted(held.places)[part::parts]
        # Else all nodes would ask the same launcher first.
        first = zlib.crc32(str(own.path).encode()) % max(1, len(files))
        for file in (*files[first:], *files[:first]):
            _take(held, file, own, secret, present)
        replace_small(own.checkpoints / held.name / MANIFEST, json.dumps(held.manifest).encode(), 0o600, sync=False)
    except (OSError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _take(held: HeldCheckpoint, file: str, own: MemoryFolder, secret: JobSecret, present: Sequence[str]) -> None:
    target, then = own.checkpoints / held.name / file, Sum(*held.manifest["files"][file])
    sources = [one for one in held.folders_of(file) if one.path != own.path]
    error: OSError = PieceError(f"{file} lay in the memory of this node, and is gone")
    with suppress(FileNotFoundError):
        if (now := checksum(target)) == then:
            return
        error = PieceError(f"{file}: {now.size} bytes, not the {then.size} that were written, or changed")
        target.unlink()
    for source in sorted(sources, key=lambda one: (one.node != own.node, one.text not in present)):
        try:
            if source.node == own.node:
                _link(source, f"{held.name}/{file}", then, target)
            else:
                fetch(source, f"{held.name}/{file}", then, target, secret)
            return
        except OSError as its:
            error = its
    raise error


def _link(source: MemoryFolder, place: str, then: Sum, target: Path) -> None:
    if not ours(source.path):
        raise PieceError(f"{place} lay in the memory of this node, and is gone")
    os.link(source.checkpoints / place, target)
    if checksum(target) != then:
        target.unlink()
        raise PieceError(f"{place} was changed in this node's memory")


def fetch(source: MemoryFolder, place: str, then: Sum, target: Path, secret: JobSecret) -> None:
    """Fetch a file from another node's launcher. The file appears at `target` after its checksum was found right.
    Raises OSError."""
    if then.size > room(target.parent):
        raise PieceError(f"{place}: there is no room for {then.size} bytes")
    unfinished = target.with_name(f".tmp-{target.name}")
    unfinished.unlink(missing_ok=True)  # of a rank that was killed
    try:
        with socket.create_connection((source.host, source.port), TIMEOUT_S) as connection:
            prove(connection, secret, _ROLE, place, TIMEOUT_S)
            connection.sendall(_GO)
            handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb", buffering=0) as file:
                crc = 0
                for block in _received(connection, then.size):
                    crc = zlib.crc32(block, crc)
                    while block:
                        block = block[file.write(block) :]
        if crc != then.crc:
            raise PieceError(f"{place} changed on its way from {source.host}")
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _received(connection: socket.socket, size: int) -> Iterator[memoryview]:
    """Yield a file's bytes, which must be `size` bytes. Raises OSError."""
    until = time.monotonic() + TIMEOUT_S + size / SLOWEST
    connection.settimeout(TIMEOUT_S)
    buffer = memoryview(bytearray(_BLOCK))

    def filled(view: memoryview) -> memoryview:
        left = view
        while left:
            if time.monotonic() > until or not (got := connection.recv_into(left)):
                raise PieceError("it did not come whole, or too slowly")
            left = left[got:]
        return view

    if (announced := _SIZE.unpack(filled(buffer[: _SIZE.size]))[0]) != size:
        raise PieceError(f"{announced} bytes are offered in place of {size}")
    while size:
        yield filled(buffer[: min(size, _BLOCK)])
        size -= min(size, _BLOCK)

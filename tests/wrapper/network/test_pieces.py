"""Pieces of a checkpoint from another node: for the job alone, pieces alone, and never taken unchecked."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ones_wrapper.files.checksums import Sum
from ones_wrapper.files.node_memory import MemoryFolder
from ones_wrapper.network import pieces
from ones_wrapper.network.door import Door, listen
from ones_wrapper.network.pieces import fetch, serve
from ones_wrapper.network.proof import ProofError, prove
from ones_wrapper.network.secret import JobSecret

HOLDS_S = 60.0
"""How long a peer holds a connection that should be given up before."""
STEP, FILE = "step-000000007", "tensors-00000.safetensors"
DATA = os.urandom(3 * (1 << 20) + 5)
SUM = Sum(len(DATA), zlib.crc32(DATA))


@pytest.fixture
def secret() -> JobSecret:
    return JobSecret.fresh()


@pytest.fixture
def source(tmp_path: Path, secret: JobSecret) -> MemoryFolder:
    """A folder that is served, by a thread that ends with the tests."""
    folder = tmp_path / "theirs"
    (folder / STEP).mkdir(parents=True)
    (folder / STEP / FILE).write_bytes(DATA)
    listener = listen("127.0.0.1")
    threading.Thread(target=serve, args=(folder, listener, secret), daemon=True).start()
    return MemoryFolder("x", "127.0.0.1", listener.getsockname()[1], 1, folder)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """Where it is to lie; nothing unfinished stays next to it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    yield folder / FILE
    assert {path.name for path in folder.iterdir()} <= {FILE}


def test_it_comes_whole(source: MemoryFolder, target: Path, secret: JobSecret) -> None:
    """Also over what an earlier start had begun, and to many at once."""
    target.with_name(f".tmp-{FILE}").write_bytes(bytes(9))
    fetch(source, f"{STEP}/{FILE}", SUM, target, secret)
    assert target.read_bytes() == DATA and target.stat().st_mode & 0o777 == 0o600
    others = [target.with_name(f"{number}") for number in range(20)]
    threads = [threading.Thread(target=fetch, args=(source, f"{STEP}/{FILE}", SUM, one, secret)) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in others:
        assert one.read_bytes() == DATA
        one.unlink()


def test_nobody_without_the_secret_gets_it(source: MemoryFolder, target: Path) -> None:
    with pytest.raises(ProofError, match="secret"):
        fetch(source, f"{STEP}/{FILE}", SUM, target, JobSecret.fresh())


@pytest.mark.parametrize(
    "name",
    [f"../{FILE}", f"{STEP}/../../secret", f"{STEP}/manifest.json", FILE, f"/{STEP}/{FILE}", f"{STEP}/{FILE}/x", STEP],
)
def test_only_pieces_are_served(source: MemoryFolder, target: Path, secret: JobSecret, name: str) -> None:
    with pytest.raises(ProofError, match="nothing of that name"):
        fetch(source, name, SUM, target, secret)


@pytest.mark.parametrize("kind", ["none", "link", "fifo", "folder"])
def test_only_files_are_served(source: MemoryFolder, target: Path, secret: JobSecret, kind: str) -> None:
    """And the server goes on."""
    path = source.path / STEP / "rest.pt"
    if kind == "link":
        path.symlink_to(source.path / STEP / FILE)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError, match="whole"):
        fetch(source, f"{STEP}/rest.pt", SUM, target, secret)
    fetch(source, f"{STEP}/{FILE}", SUM, target, secret)


@contextmanager
def peer(secret: JobSecret, answer: Callable[[socket.socket], None]) -> Iterator[MemoryFolder]:
    """A process of the job that answers by this, once."""
    listener = listen("127.0.0.1")
    door = Door(listener, secret, lambda role, place: "")

    def run() -> None:
        while not (callers := door.look(1.0)):
            pass
        with suppress(OSError), callers[0].connection as connection:
            connection.settimeout(HOLDS_S)
            connection.recv(1)
            answer(connection)

    thread = threading.Thread(target=run)
    thread.start()
    yield MemoryFolder("x", "127.0.0.1", door.port, 1, Path("/x"))
    thread.join()
    door.close()


def garbage(connection: socket.socket) -> None:
    connection.sendall(os.urandom(100))


def nothing(connection: socket.socket) -> None:
    connection.recv(1)


def drops(connection: socket.socket) -> None:
    connection.sendall(pieces._SIZE.pack(SUM.size))
    for number in range(int(HOLDS_S / 0.02)):
        connection.sendall(DATA[number : number + 1])
        time.sleep(0.02)


def half(connection: socket.socket) -> None:
    connection.sendall(pieces._SIZE.pack(SUM.size) + DATA[:1000])


def too_much(connection: socket.socket) -> None:
    connection.sendall(pieces._SIZE.pack(1 << 62))
    for _ in range(100):
        connection.sendall(DATA)


def other(connection: socket.socket) -> None:
    connection.sendall(pieces._SIZE.pack(SUM.size) + DATA[:-1] + bytes([DATA[-1] ^ 1]))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (garbage, "are offered"),
        (nothing, "timed out"),
        (drops, "too slowly"),
        (half, "whole"),
        (too_much, "are offered"),
        (other, "changed on its way"),
    ],
)
def test_what_is_not_it_is_not_taken(
    target: Path,
    secret: JobSecret,
    answer: Callable[[socket.socket], None],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a peer that has the secret: in the time that it may take, with no byte more in memory than it may have."""

    def proven(*given: Any) -> None:
        prove(*given)
        monkeypatch.setattr(pieces, "TIMEOUT_S", 0.5)

    if answer is nothing:
        monkeypatch.setattr(pieces, "prove", proven)
    elif answer is drops:  # each look at the clock comes a second later
        monkeypatch.setattr(pieces, "time", SimpleNamespace(monotonic=count(0.0, 1.0).__next__))
    began = time.monotonic()
    with peer(secret, answer) as source, pytest.raises(OSError, match=why):
        try:
            fetch(source, f"{STEP}/{FILE}", SUM, target, secret)
        finally:
            assert time.monotonic() - began < HOLDS_S / 2 and not target.exists()


def test_more_comes_than_was_announced(target: Path, secret: JobSecret) -> None:
    """It is left."""

    def more(connection: socket.socket) -> None:
        connection.sendall(pieces._SIZE.pack(SUM.size) + DATA)
        while True:
            connection.sendall(DATA)

    with peer(secret, more) as source:
        fetch(source, f"{STEP}/{FILE}", SUM, target, secret)
    assert target.read_bytes() == DATA


def test_without_room_nobody_is_asked(
    target: Path, secret: JobSecret, source: MemoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "room", lambda folder: SUM.size - 1)
    with pytest.raises(OSError, match="no room"):
        fetch(source, f"{STEP}/{FILE}", SUM, target, secret)


def test_strangers_are_hung_up_on(source: MemoryFolder, target: Path, secret: JobSecret) -> None:
    """While pieces are served."""
    with socket.create_connection((source.host, source.port)) as silent:
        silent.settimeout(5)
        fetch(source, f"{STEP}/{FILE}", SUM, target, secret)
        assert silent.recv(1) == b""

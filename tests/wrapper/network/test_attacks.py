"""Attacks on a store server and on a door, each in one process: all are refused, and training is not touched."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ones_wrapper.network import door, frames, proof
from ones_wrapper.network.client import StoreClient, StoreLostError
from ones_wrapper.network.frames import fields, frame
from ones_wrapper.network.proof import ProofError, prove
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import HOST, MEET, MEMBER, StoreServer
from tests.waiting import until

PLACE = "term-3-aa"


@pytest.fixture
def secret() -> JobSecret:
    return JobSecret.fresh()


@pytest.fixture
def server(secret: JobSecret) -> Iterator[StoreServer]:
    server = StoreServer.at("127.0.0.1", secret)
    yield server
    server.close()


@pytest.fixture
def leader(server: StoreServer, secret: JobSecret) -> Iterator[StoreClient]:
    """Hosts a place, and trains: what it stores must be there after each attack."""
    client = StoreClient("127.0.0.1", server.port, secret, HOST, PLACE)
    client.ask("set", b"newest", b"5")
    yield client
    assert client.ask("peek", b"newest") == [b"+5"]
    client.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5.0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is hung up on is so for what it sent."""
    monkeypatch.setattr(door, "PROOF_S", 600.0)


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end hangs up."""
    connection.settimeout(10.0)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def hello(version: int = 1, role: str = MEMBER) -> bytes:
    return frame(fields(b"ones network %d" % version, role.encode(), PLACE.encode(), b"n" * 32))


ATTACKS = {
    "silent": b"",
    "trickle": frame(b"x" * 100)[:7],
    "4 GiB": struct.pack("!I", 0xFFFFFFFF) + b"x" * 1000,
    "HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 10,
    "other version": hello(0),
    "fields cut off": frame(b"\0\0\0\x09abc"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_who_proves_nothing_is_hung_up_on(
    leader: StoreClient,
    server: StoreServer,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """At once, or as the time for a proof ends; and named once however often it comes."""
    if name in ("silent", "trickle"):
        assert proof.PROOF_S <= 2.0, "as shipped"
        monkeypatch.setattr(door, "PROOF_S", 0.3)
    for _ in range(2 if name in ("silent", "trickle") else 20):
        with connect(server.port) as connection:
            connection.sendall(ATTACKS[name])
            assert hung_up(connection)
    said = [line for line in capfd.readouterr().err.splitlines() if "was refused" in line]
    assert len(said) == 1 and "127.0.0.1" in said[0]


@pytest.mark.parametrize("role", [MEMBER, HOST, MEET])
def test_a_wrong_secret(leader: StoreClient, server: StoreServer, role: str) -> None:
    """The stranger learns that the server has another secret, and the server that the stranger has."""
    with pytest.raises(StoreLostError, match="does not have this job's secret"):
        StoreClient("127.0.0.1", server.port, JobSecret.fresh(), role, PLACE)
    with connect(server.port) as connection:
        connection.sendall(hello(role=role))
        assert connection.recv(4096)
        connection.sendall(frame(b"p" * 32))
        assert hung_up(connection)


class Tap:
    """A socket that keeps what was sent through it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.sent = connection, list[bytes]()

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)
        self._connection.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_a_replayed_proof(leader: StoreClient, server: StoreServer, secret: JobSecret) -> None:
    """What a member sent to prove itself is worth nothing on another connection."""
    with connect(server.port) as first:
        tap = Tap(first)
        prove(tap, secret, MEMBER, PLACE, 10.0)  # type: ignore[arg-type]
    with connect(server.port) as again:
        again.sendall(tap.sent[0])
        assert again.recv(4096)
        again.sendall(tap.sent[1])
        assert hung_up(again)


def test_a_proof_sent_back(leader: StoreClient, server: StoreServer) -> None:
    """The server's own proof is none for the other side."""
    with connect(server.port) as connection:
        connection.sendall(hello())
        _, theirs = frames.parts_of(connection.recv(4096)[4:])
        connection.sendall(frame(theirs))
        assert hung_up(connection)


def test_a_proof_for_another_place(leader: StoreClient, server: StoreServer, secret: JobSecret) -> None:
    """Keys are bound to the term."""
    with connect(server.port) as connection:
        connection.sendall(hello())
        nonce, _ = frames.parts_of(connection.recv(4096)[4:])
        connection.sendall(frame(proof._proof(secret, "caller", MEMBER, "term-2-aa", b"n" * 32, nonce)))
        assert hung_up(connection)


def test_a_place_that_nobody_hosts(leader: StoreClient, server: StoreServer, secret: JobSecret) -> None:
    """A block of the job that comes for an earlier term is sent away, and nobody else hosts a place that is."""
    with pytest.raises(StoreLostError, match="nobody hosts term-2-aa here"):
        StoreClient("127.0.0.1", server.port, secret, MEMBER, "term-2-aa")
    with pytest.raises(StoreLostError, match="hosted already"):
        StoreClient("127.0.0.1", server.port, secret, HOST, PLACE)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", struct.pack("!I", 0xFFFFFFFF), frame(b"xx" * 40)])
def test_a_server_that_is_none_of_the_job(secret: JobSecret, answer: bytes) -> None:
    """Who listens where a leader was is no leader: the caller sends nothing that is worth anything, and goes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = connect(listener.getsockname()[1])
        host, _ = listener.accept()
        with caller, host:
            host.sendall(answer)
            began = time.monotonic()
            with pytest.raises((ProofError, TimeoutError)):
                prove(caller, secret, MEMBER, PLACE, 0.5)
            assert time.monotonic() - began < 10.0


def test_ten_thousand_that_prove_nothing(
    leader: StoreClient, server: StoreServer, secret: JobSecret, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a thread each, with few of them held; members come in and are answered meanwhile."""
    held: list[socket.socket] = []
    slowest = 0.0
    for count in range(10_000):
        held.append(connect(server.port))
        if count % 500 == 250:
            began = time.process_time()  # a busy machine gives the processor to others meanwhile
            member = StoreClient("127.0.0.1", server.port, secret, MEMBER, PLACE)
            assert member.ask("peek", b"newest") == [b"+5"]
            member.close()
            slowest = max(slowest, time.process_time() - began)
        if len(held) == 300:  # as many as a process may have open; each is refused by then
            for one in held:
                one.close()
            held.clear()
    assert slowest < 2.0
    assert len(server._door._strangers) <= door.UNPROVEN
    assert capfd.readouterr().err.count("was refused") == 1


def test_no_file_descriptors(leader: StoreClient, server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are served on, and strangers make room."""
    with connect(server.port) as first:
        until(lambda: server._door._strangers)
        server._door._make_room()
        assert not server._door._strangers and hung_up(first)


def test_a_member_that_asks_nonsense(leader: StoreClient, server: StoreServer, secret: JobSecret) -> None:
    """Is answered with what is wrong, and one that sends what is no message is hung up on."""
    member = StoreClient("127.0.0.1", server.port, secret, MEMBER, PLACE)
    waits = [("get", (milliseconds, b"a")) for milliseconds in (b"soon", b"9" * 400)]
    for what, parts in (("drop", ()), ("set", (b"a",)), ("add", (b"newest", b"x")), *waits):
        with pytest.raises(ValueError):
            member.ask(what, *parts)
    assert member.ask("peek", b"newest") != [b""]
    assert member._socket is not None
    member._socket.sendall(struct.pack("!I", frames.MOST + 1))
    with pytest.raises(StoreLostError):
        member.ask("peek", b"newest")

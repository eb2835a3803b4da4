"""State from the memory of one rank into that of another: to whom it is meant, and from nobody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ones_wrapper.network import door, transfer
from ones_wrapper.network.proof import ProofError, prove
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.transfer import (
    Receiver,
    Sender,
    SendersLostError,
    TransferError,
    senders,
    state_for,
    unpacked,
)

PLACE = state_for("term-1-aa", 5, 3)


@pytest.fixture
def secret() -> JobSecret:
    return JobSecret.fresh()


@pytest.fixture
def receiver(secret: JobSecret) -> Iterator[Receiver]:
    receiver = Receiver(secret, "127.0.0.1")
    yield receiver
    receiver.close()


class Newcomer:
    """Waits for its state in a thread."""

    def __init__(self, receiver: Receiver) -> None:
        self.tensors = empty()
        self.rest: dict[str, Any] = {}
        self.error: Exception | None = None
        self._given_up = ""
        self._receiver = receiver
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            if (received := self._receiver.receive(PLACE, self.tensors, lambda: self._given_up)) is not None:
                self.rest.update(unpacked(received.packed))
                received.answer()
                received.close()
        except Exception as error:
            self.error = error

    def end(self, given_up: str = "") -> None:
        self._given_up = given_up
        self._thread.join(20.0)
        assert not self._thread.is_alive()


def state() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(1000.0), "b": torch.tensor([1, 2, 3])}


def empty() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(1000), "b": torch.zeros(3, dtype=torch.int64)}


def send(
    receiver: Receiver, secret: JobSecret, timeout_s: float = transfer.TIMEOUT_S, place: str = PLACE, **other: Any
) -> None:
    given = {"tensors": state(), "rest": {}} | other
    transfer.send(Sender(("127.0.0.1", receiver.port), place, 0, 1), secret, given["tensors"], given["rest"], timeout_s)


def test_state_arrives_while_strangers_are_at_the_door(
    secret: JobSecret, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold nobody up, and those who have another job's secret, or send what is for another rank or generation,
    change nothing."""
    monkeypatch.setattr(door, "PROOF_S", 600.0)
    newcomer = Newcomer(receiver)
    silent = [socket.create_connection(("127.0.0.1", receiver.port)) for _ in range(20)]
    for other, place in ((JobSecret.fresh(), PLACE), (secret, state_for("term-1-aa", 4, 3)), (secret, "term-1-aa")):
        with pytest.raises(ProofError):
            send(receiver, other, place=place)
    where = [("127.0.0.1", receiver.port, PLACE)]
    parts = [one for rank in range(2) for one in senders(2, rank, where)]
    with ThreadPoolExecutor(len(parts)) as pool:
        sent = [pool.submit(transfer.send, one, secret, state(), {"x": 1}) for one in parts]
        newcomer.end()
    assert all(one.result() for one in sent)
    assert newcomer.error is None and newcomer.rest == {"x": 1}
    assert all(torch.equal(newcomer.tensors[name], tensor) for name, tensor in state().items())
    for stranger in silent:
        stranger.close()


def test_nobody_is_awaited_once_the_change_came_to_nothing(receiver: Receiver) -> None:
    newcomer = Newcomer(receiver)
    newcomer.end("dropped")
    assert newcomer.error is None and not newcomer.tensors["a"].any()


def test_another_model_is_refused_with_its_name(secret: JobSecret, receiver: Receiver) -> None:
    newcomer = Newcomer(receiver)
    with pytest.raises((TransferError, OSError)):
        send(receiver, secret, tensors=state() | {"a": torch.zeros(7)})
    newcomer.end()
    assert isinstance(newcomer.error, TransferError) and "a is" in str(newcomer.error)


@pytest.mark.parametrize("sent", [0, 100])
def test_a_sender_that_goes_is_no_fault_of_the_newcomer(
    secret: JobSecret, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """Which can tell this from a state that it cannot take, and receives the whole state of the next change."""
    newcomer = Newcomer(receiver)

    def going(connection: socket.socket, views: list[memoryview]) -> None:
        connection.sendall(views[0][:sent])
        raise ConnectionAbortedError

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_send_views", going)
        with pytest.raises(ConnectionAbortedError):
            send(receiver, secret)
    newcomer.end()
    assert isinstance(newcomer.error, SendersLostError)
    later = Newcomer(receiver)
    send(receiver, secret)
    later.end()
    assert later.error is None and torch.equal(later.tensors["a"], state()["a"])


@pytest.mark.parametrize("slow_s", [2.5, 0.0])
def test_a_newcomer_that_is_slow_and_alive_gets_all(
    secret: JobSecret, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    """No sender gives up while it waits for others, or loads gigabytes."""
    monkeypatch.setattr(transfer, "ALIVE_S", 0.05)
    monkeypatch.setattr(transfer, "CHUNK", 1000)
    monkeypatch.setattr(transfer, "patience_s", lambda size, timeout_s: 10.0)
    tensors = empty()
    answered = threading.Event()

    def newcomer() -> None:
        received = receiver.receive(PLACE, tensors, str)
        assert received is not None
        time.sleep(slow_s)
        answered.set()
        received.answer()
        received.close()

    thread = threading.Thread(target=newcomer)
    thread.start()
    parts = [one for rank in range(3) for one in senders(3, rank, [("127.0.0.1", receiver.port, PLACE)])]
    with ThreadPoolExecutor(3) as pool:
        sent = [pool.submit(transfer.send, one, secret, state(), {"x": 1}, 2.0) for one in parts]
        assert sum(one.result() for one in sent) == 4024 and answered.is_set()
    thread.join()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state().items())


def test_an_average_of_gigabytes_takes_its_time(
    secret: JobSecret, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state goes next to the tensors: no sender gives up while its bytes move, however many there are."""
    read = transfer._read

    def slowly(connection: socket.socket, count: int) -> bytearray:
        found = bytearray()
        while len(found) < count:
            found += read(connection, min(1 << 20, count - len(found)))
            time.sleep(0.1)  # 40 of them, in all longer than a sender waits for a sign
        return found

    monkeypatch.setattr(transfer, "_read", slowly)
    monkeypatch.setattr(transfer, "ALIVE_S", 0.1)
    newcomer, rest = Newcomer(receiver), {"average": torch.arange(5 << 20)}
    send(receiver, secret, 3.0, rest=rest)
    newcomer.end()
    assert newcomer.error is None and torch.equal(newcomer.rest["average"], rest["average"])
    assert len(transfer._HEAD.pack(1, 5 << 30)) == transfer._HEAD.size


@pytest.mark.parametrize("alive", [True, False])
def test_a_newcomer_that_hangs_is_given_up(
    secret: JobSecret, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """Silence ends the wait, and bytes that say 'alive' for ever do, too."""
    monkeypatch.setattr(transfer, "ALIVE_S", 0.1 if alive else 60.0)
    monkeypatch.setattr(transfer, "patience_s", lambda size, timeout_s: 1.0)
    # Who is slow to let the sender in does not hang yet.
    monkeypatch.setattr(transfer, "prove", lambda *given: prove(*given[:-1], 20.0))
    tensors = empty()
    held: list[Any] = []
    thread = threading.Thread(target=lambda: held.append(receiver.receive(PLACE, tensors, str, 5.0)))
    thread.start()
    began = time.monotonic()
    with pytest.raises((TransferError, TimeoutError)):
        send(receiver, secret, 0.5)
    assert time.monotonic() - began < 30.0
    thread.join()
    held[0].close()


def test_a_state_is_sent_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large tensor no more than two chunks are copied at a time."""
    monkeypatch.setattr(transfer, "CHUNK", 100)
    tensors = [torch.arange(60, dtype=torch.float32), torch.arange(9).reshape(3, 3).t(), torch.tensor(7.0)]
    whole = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    for count in (1, 2, 3):
        chunks = [
            list(transfer._views(tensors, transfer._stretches([240, 72, 4], number, count))) for number in range(count)
        ]
        assert b"".join(bytes(view) for some in chunks for chunk in some for view in chunk) == whole
        assert max(sum(map(len, chunk)) for some in chunks for chunk in some) <= 100


def test_patience_grows_with_the_state() -> None:
    assert transfer.patience_s(0) == transfer.TIMEOUT_S
    assert transfer.patience_s(3_000_000_000) > 33.0 + transfer.TIMEOUT_S

"""State from the memory of one rank into that of another: to whom it is meant, and from nobody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ones_wrapper.network.proof import PROOF_S, ProofError
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.transfer import Receiver, Sender, TransferError, send, senders, state_for

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
        self.tensors = {"a": torch.zeros(1000), "b": torch.zeros(3, dtype=torch.int64)}
        self.rest: dict[str, Any] = {}
        self.error: Exception | None = None
        self._given_up = ""
        self._receiver = receiver
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._receiver.receive(PLACE, self.tensors, lambda rest, _: self.rest.update(rest), lambda: self._given_up)
        except Exception as error:
            self.error = error

    def end(self, given_up: str = "") -> None:
        self._given_up = given_up
        self._thread.join(20.0)
        assert not self._thread.is_alive()


def state() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(1000.0), "b": torch.tensor([1, 2, 3])}


def test_state_arrives_while_strangers_are_at_the_door(secret: JobSecret, receiver: Receiver) -> None:
    """They hold nobody up, and those who have the secret of another job, or send what is for another rank or an earlier
    generation, change nothing."""
    newcomer = Newcomer(receiver)
    silent = [socket.create_connection(("127.0.0.1", receiver.port)) for _ in range(20)]
    for other, place in ((JobSecret.fresh(), PLACE), (secret, state_for("term-1-aa", 4, 3)), (secret, "term-1-aa")):
        with pytest.raises(ProofError):
            send(Sender(("127.0.0.1", receiver.port), place, 0, 1), other, state(), {})
    began = time.monotonic()
    where = [("127.0.0.1", receiver.port, PLACE)]
    parts = [one for rank in range(2) for one in senders(2, rank, where)]
    threads = [threading.Thread(target=send, args=(one, secret, state(), {"x": 1})) for one in parts]
    for thread in threads:
        thread.start()
    newcomer.end()
    assert time.monotonic() - began < PROOF_S
    assert newcomer.error is None and newcomer.rest == {"x": 1}
    assert all(torch.equal(newcomer.tensors[name], tensor) for name, tensor in state().items())
    for thread in threads:
        thread.join()
    for one in silent:
        one.close()


def test_nobody_is_awaited_once_the_change_came_to_nothing(receiver: Receiver) -> None:
    newcomer = Newcomer(receiver)
    newcomer.end("dropped")
    assert newcomer.error is None and not newcomer.tensors["a"].any()


def test_another_model_is_refused_with_its_name(secret: JobSecret, receiver: Receiver) -> None:
    newcomer = Newcomer(receiver)
    other = state() | {"a": torch.zeros(7)}
    with pytest.raises((TransferError, OSError)):
        send(Sender(("127.0.0.1", receiver.port), PLACE, 0, 1), secret, other, {})
    newcomer.end()
    assert isinstance(newcomer.error, TransferError) and "a is" in str(newcomer.error)

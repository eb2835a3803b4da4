"""The board on which the blocks of one term tell each other what they are and what shall be: texts in the leader's
store. Every look answers at once or within `ANSWER_S`; nothing that is read from it is code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

ANSWER_S = 5.0
"""A store that does not answer within this time is lost."""

T = TypeVar("T")


class BoardLostError(ConnectionError):
    """The leader's store does not answer."""


class Board:
    """One thread's view of the board: a thread that waits must not hold up another, so each has its own connection."""

    def __init__(self, store: TCPStore, token: str) -> None:
        self._store: Any = store
        self.token = token
        """What its blocks know of each other."""
        self._texts = PrefixStore(f"ones-{token}", store)

    @classmethod
    def host(cls, address: str, token: str) -> Board:
        """A new board, which lives as long as this process."""
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=ANSWER_S))
        board = cls(store, token)
        board.put("open", "1")
        return board

    @classmethod
    def connect(cls, address: str, port: int, token: str, timeout_s: float = ANSWER_S) -> Board:
        """Raises `BoardLostError` where there is none of this token, or it does not answer within `timeout_s`."""
        # The store tries a second time, so half of the time is for each.
        return in_time(lambda: cls._connect(address, port, token, timeout_s / 2), timeout_s)

    @classmethod
    def _connect(cls, address: str, port: int, token: str, timeout_s: float) -> Board:
        try:
            store = TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            raise BoardLostError(str(error)) from None
        board = cls(store, token)
        if board.read("open") is None:
            raise BoardLostError("another job's store is at this address")
        store.set_timeout(timedelta(seconds=ANSWER_S))
        return board

    def again(self) -> Board:
        """Another connection to the same board."""
        try:
            return Board(self._store.clone(), self.token)
        except RuntimeError as error:
            raise BoardLostError(str(error)) from None

    @property
    def port(self) -> int:
        """Where it is hosted."""
        return int(self._store.port)

    def put(self, key: str, text: str) -> None:
        """Write a text, in place of what was there. Raises `BoardLostError`."""
        try:
            self._texts.set(key, text)
        except RuntimeError as error:
            raise BoardLostError(str(error)) from None

    def read(self, key: str) -> str | None:
        """A text; None where there is none. Raises `BoardLostError`."""
        try:
            return self._texts.get(key).decode(errors="replace") if self._texts.check([key]) else None
        except RuntimeError as error:
            raise BoardLostError(str(error)) from None

    def count(self, key: str, more: int = 0) -> int:
        """A counter, after `more` was added. Raises `BoardLostError`."""
        try:
            return int(self._texts.add(key, more))
        except RuntimeError as error:
            raise BoardLostError(str(error)) from None

    def forget(self, past: Callable[[str], bool]) -> None:
        """Remove the texts and the parts of the store of whose names `past` holds. A torch that cannot list a store's
        keys (2.6 cannot) keeps them. Raises `BoardLostError`.
        """
        if not hasattr(self._store, "list_keys"):
            return
        begin = f"ones-{self.token}"
        try:
            for key in self._store.list_keys():
                if key.startswith(begin) and past(key[len(begin) + 1 :].split("/")[0]):
                    self._store.delete_key(key)
        except RuntimeError as error:
            raise BoardLostError(str(error)) from None

    def store(self, name: str) -> Store:
        """A part of the store in which ranks form a group."""
        return PrefixStore(f"ones-{self.token}-{name}", self._store)


def in_time(function: Callable[[], T], timeout_s: float) -> T:
    """The result of a function that may wait for ever for a process that hangs. Raises `BoardLostError` for one that
    takes too long; its thread is left to itself.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ones-ask", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise BoardLostError(f"no answer within {timeout_s:g} s")
    return results[0]

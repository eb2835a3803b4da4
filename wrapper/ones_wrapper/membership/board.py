"""The board of one term: texts in the leader's store, by which blocks exchange who they are and which plan comes.

The board ends with the leader. A request is answered at once or within `ANSWER_S`; nothing that is read is executed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from ones_wrapper.network.client import ANSWER_S, StoreClient
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.network.server import HOST, MEMBER
from ones_wrapper.network.store import GroupStore


class Board(StoreClient):
    """A connection to the board. A thread that waits for keys has a connection of its own: waiting blocks others."""

    def __init__(
        self, network: JobNetwork, host: str, port: int, place: str, timeout_s: float = ANSWER_S, role: str = MEMBER
    ) -> None:
        """Raises `StoreLostError` if nobody hosts it there, or does not answer within `timeout_s`."""
        self.network = network
        super().__init__(host, port, network.secret, role, place, timeout_s)

    @classmethod
    def hosted(cls, network: JobNetwork, term: int) -> Board:
        """A new board, which lives as long as this connection. Raises `StoreLostError`."""
        return cls(network, network.host, network.port, f"term-{term}-{secrets.token_hex(8)}", role=HOST)

    def again(self) -> Board:
        """Another connection to the same board. Raises `StoreLostError`."""
        return Board(self.network, self.host, self.port, self.place)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store that has the board."""
        return self.host, self.port

    def put(self, key: str, text: str) -> None:
        """Write a text, in place of what was there. Raises `StoreLostError`."""
        self.ask("set", key.encode(), text.encode())

    def read(self, key: str) -> str | None:
        """A text; None if there is none. Raises `StoreLostError`."""
        (found,) = self.ask("peek", key.encode())
        return found[1:].decode(errors="replace") if found else None

    def will(self, *pair: str) -> None:
        """Have the store write this key and text when the connection ends. Raises `StoreLostError`.

        Without a pair the end is planned: the store writes nothing, and ignores a leader's missing signs.
        """
        self.ask("will", *(part.encode() for part in pair))

    def heard(self, key: str) -> str | None:
        """Return the text that was pushed last for a followed key; None for none. Sends no request."""
        value = self.news.get(key.encode())
        return None if value is None else value.decode(errors="replace")

    def heard_of(self, kind: str) -> list[str]:
        """Return the names after the dash in the pushed keys of a kind. Only the thread that listens calls it."""
        begin = f"{kind}-".encode()
        return [key[len(begin) :].decode(errors="replace") for key in self.news if key.startswith(begin)]

    def unhear(self, *keys: str) -> None:
        """Forget pushed texts that nobody needs any more."""
        for key in keys:
            self.news.pop(key.encode(), None)

    def wait(self, key: str, within_s: float) -> str | None:
        """Wait for a text; None if it does not come. Raises `StoreLostError`."""
        try:
            return self.ask("get", b"%d" % (1000 * within_s), key.encode(), wait_s=within_s)[0].decode(errors="replace")
        except TimeoutError:
            return None

    def sign(self, name: str) -> float:
        """Sign that this process lives; return the seconds since the leader signed. Raises `StoreLostError`."""
        return int(self.ask("sign", name.encode())[0]) / 1000

    def silent_s(self, names: Sequence[str]) -> list[float]:
        """Return the seconds since each of these ranks signed, or was first asked for. Raises `StoreLostError`."""
        return [int(age) / 1000 for age in self.ask("ages", *(name.encode() for name in names))]

    def count(self, key: str, more: int = 0) -> int:
        """A counter, after `more` was added. Raises `StoreLostError`."""
        return int(self.ask("add", key.encode(), b"%d" % more)[0])

    def forget(self, past: Callable[[str], bool]) -> None:
        """Remove the texts and the parts of the store for whose names `past` is true. Raises `StoreLostError`."""
        keys = self.ask("keys", b"")
        if old := [key for key in keys if past(key.decode(errors="replace").split("/")[0])]:
            self.ask("delete", *old)
        for key in [key for key in self.news if past(key.decode(errors="replace"))]:
            del self.news[key]

    def store(self, name: str, timeout_s: float = ANSWER_S) -> GroupStore:
        """A part of the store in which ranks form a group."""
        return GroupStore(self, name, timeout_s)

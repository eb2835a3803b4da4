"""The board of one term: keys with texts in the leader's store. Blocks announce themselves on it, and read plans from
it.

The board ends with the leader's connection. A request is answered at once or within `ANSWER_S`. A text is never
executed.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence

from ones_wrapper.membership.agent import ask_agent, has_agent
from ones_wrapper.network.client import ANSWER_S, StoreClient, StoreLostError
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.network.server import HOST, MEMBER
from ones_wrapper.network.store import GroupStore


class Board(StoreClient):
    """A connection to the board. A thread that waits for keys needs a connection of its own, since a wait blocks other
    requests."""

    def __init__(
        self, network: JobNetwork, host: str, port: int, place: str, timeout_s: float = ANSWER_S, role: str = MEMBER
    ) -> None:
        """Connect. Raises `StoreLostError` if no process hosts the board there, or answers within `timeout_s`."""
        self.network = network
        super().__init__(host, port, network.secret, role, place, timeout_s)

    @classmethod
    def hosted(cls, network: JobNetwork, term: int) -> Board:
        """Return the connection of a new board's host; the board ends with it. Raises `StoreLostError`."""
        return cls(network, network.host, network.port, f"term-{term}-{secrets.token_hex(8)}", role=HOST)

    def again(self) -> Board:
        """Return another connection to the same board. Raises `StoreLostError`."""
        return Board(self.network, self.host, self.port, self.place)

    def through_agent(self) -> Board:
        """Return a connection to this board through the node's agent. Return this connection if the process has no
        agent, or hosts the board. Raises `StoreLostError`."""
        if self.role == HOST or not has_agent():
            return self
        return _AgentBoard(self.network, self.host, self.port, self.place)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store server with the board."""
        return self.host, self.port

    def put(self, key: str, text: str) -> None:
        """Set the text of a key. Raises `StoreLostError`."""
        self.ask("set", key.encode(), text.encode())

    def read(self, key: str) -> str | None:
        """Return the text of a key; None if the key is missing. Raises `StoreLostError`."""
        (found,) = self.ask("peek", key.encode())
        return found[1:].decode(errors="replace") if found else None

    def will(self, *pair: str) -> None:
        """Give the store a key and its text (`pair`), for the store to set if this connection ends. Call it without
        `pair` before a planned end: the store then sets nothing, and a leader's missing heartbeats are no loss. Raises
        `StoreLostError`."""
        self.ask("will", *(part.encode() for part in pair))

    def heard(self, key: str) -> str | None:
        """Return the newest text that the store has pushed for a followed key; None if there is none. Sends no
        request."""
        value = self.news.get(key.encode())
        return None if value is None else value.decode(errors="replace")

    def heard_of(self, kind: str) -> list[str]:
        """Return NAME of each pushed key `kind-NAME`. Sends no request."""
        begin, now = f"{kind}-".encode(), list(self.news)  # a copy: a waiting thread may add keys
        return [key[len(begin) :].decode(errors="replace") for key in now if key.startswith(begin)]

    def names(self, kind: str) -> set[str]:
        """Return NAME of each key `kind-NAME` on the board. Raises `StoreLostError`."""
        begin = f"{kind}-".encode()
        return {key[len(begin) :].decode(errors="replace") for key in self.ask("keys", begin)}

    def unhear(self, *keys: str) -> None:
        """Drop the pushed texts of these keys."""
        for key in keys:
            self.news.pop(key.encode(), None)

    def wait(self, key: str, within_s: float) -> str | None:
        """Wait up to `within_s` seconds for a key; return its text, or None. Raises `StoreLostError`."""
        try:
            return self.ask("get", b"%d" % (1000 * within_s), key.encode(), wait_s=within_s)[0].decode(errors="replace")
        except TimeoutError:
            return None

    def sign(self, name: str) -> float:
        """Send a heartbeat of process `name`; return the seconds since the leader's last one. Raises
        `StoreLostError`."""
        return int(self.ask("sign", name.encode(), b"0")[0]) / 1000

    def silent_s(self, names: Sequence[str]) -> list[float]:
        """Return the seconds since each rank's last heartbeat, or since the first request about a rank without
        heartbeats. Raises `StoreLostError`."""
        return [int(age) / 1000 for age in self.ask("ages", *(name.encode() for name in names))]

    def count(self, key: str, more: int = 0) -> int:
        """Add `more` to a counter, and return the sum. Raises `StoreLostError`."""
        return int(self.ask("add", key.encode(), b"%d" % more)[0])

    def forget(self, past: Callable[[str], bool]) -> None:
        """Remove the texts, and the keys of groups' stores, for whose names `past` returns True. Raises
        `StoreLostError`."""
        keys = self.ask("keys", b"")
        if old := [key for key in keys if past(key.decode(errors="replace").split("/")[0])]:
            self.ask("delete", *old)
        for key in [key for key in list(self.news) if past(key.decode(errors="replace"))]:
            del self.news[key]

    def store(self, name: str, timeout_s: float = ANSWER_S) -> GroupStore:
        """Return a torch store whose keys begin with `name`, for ranks that form a group."""
        return GroupStore(self, name, timeout_s)


class _AgentBoard(Board):
    """A connection to the board through the node's agent."""

    def _connect(self, timeout_s: float) -> socket.socket:
        try:
            self._socket = connection = ask_agent(self.host, self.port, self.place)
        except OSError as error:
            self.close()
            raise StoreLostError(f"the node's agent: {error}") from None
        return connection

"""Agent of a node launcher: one connection to each board for all ranks of the launcher.

A rank sends the agent one end of a socket pair, and uses the other end like a connection to the store. The agent
forwards requests, heartbeats, and the values that the board pushes. When a rank ends, the agent sets the rank's key
(`will`). When the node is lost, the store sets the keys of all its ranks. The launcher forks, so that the agent has no
thread: the launcher calls `turn`. Imports only the standard library.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from ones_wrapper.network.client import StoreClient, StoreLostError
from ones_wrapper.network.frames import READ, FrameError, Frames, fields, frame, hang_up, parts_of
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import MEMBER
from ones_wrapper.process.hang_detector import Standstill
from ones_wrapper.process.placement import LaunchError

SIGN_S = 1.0
"""Seconds between two heartbeats, of a rank and of the agent."""
_ADDRESS_BYTES = 4096
_wire: socket.socket | None = None


def has_agent() -> bool:
    """Return True if this process is a rank with an agent."""
    return _wire is not None


def ask_agent(host: str, port: int, place: str) -> socket.socket:
    """Return a connection to the board `place` at `host` and `port`, through the node's agent. Raises OSError if the
    agent is gone."""
    assert _wire is not None
    mine, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(_wire, [fields(host.encode(), b"%d" % port, place.encode())], [theirs.fileno()])
        except OSError:
            mine.close()
            raise
    return mine


class _Rank:
    """One rank's connection to the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.frames, self.unsent = connection, Frames(), bytearray()
        self.kinds: tuple[bytes, ...] = ()
        """Kinds of keys whose values the agent pushes to this rank."""
        self.will: tuple[bytes, ...] = ()
        """Key and value that are set when this connection ends; empty if nothing is to be set."""
        self.name, self.signed_at = b"", 0.0
        """Name in the rank's heartbeats, empty before the first one; monotonic time of the last one."""


class _Followed:
    """Connection to one board, and the ranks that use it."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.ranks: list[_Rank] = []
        self.signed_at = 0.0
        self.leader_ms = b"0"
        """Milliseconds by which the leader's last heartbeat is older than the agent's."""

    def sign(self) -> None:
        """Send the heartbeats of all ranks, with the milliseconds since each. Raises `StoreLostError`."""
        self.signed_at = now = time.monotonic()
        signs = [(rank.name, b"%d" % (1000 * (now - rank.signed_at))) for rank in self.ranks if rank.name]
        if signs:
            (self.leader_ms,) = self.client.ask("sign", *(part for sign in signs for part in sign))

    def will(self) -> None:
        """Give the store a key and value of each rank, for the store to set if this connection ends. Raises
        `StoreLostError`."""
        self.client.ask("will", *(part for rank in self.ranks for part in rank.will))


class NodeAgent:
    """Agent of the ranks that one node launcher forks."""

    def __init__(self, secret: Callable[[], JobSecret]) -> None:
        """`secret` returns the job's secret. It is called when a rank connects to a board."""
        self._secret = secret
        self._wire, self._of_ranks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wire.setblocking(False)
        self._boards: dict[tuple[bytes, ...], _Followed] = {}
        self._still = Standstill()
        self._selector = selectors.PollSelector()  # forked ranks would share an epoll
        self._selector.register(self._wire, selectors.EVENT_READ)

    def serve_in_child(self) -> None:
        """Make this forked rank use the agent in its parent process, and close its copies of the agent's
        connections."""
        global _wire
        _wire = self._of_ranks
        self._wire.close()
        for board in self._boards.values():
            for rank in board.ranks:
                rank.connection.close()

    def turn(self, timeout_s: float) -> None:
        """Answer ranks, forward values that boards push, and send heartbeats. Waits up to `timeout_s` seconds for a
        request or a pushed value."""
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._wire:
                self._let_in()
                continue
            board, rank = key.data
            if rank is None:
                self._guarded(board, partial(board.client.listen, 0.0))
            elif rank in board.ranks:
                self._guarded(board, partial(self._hear, board, rank, events))
        stood_s = self._still.look()
        for board in list(self._boards.values()):
            for rank in board.ranks:
                rank.signed_at = min(rank.signed_at + stood_s, time.monotonic())
            if time.monotonic() - board.signed_at > SIGN_S:
                self._guarded(board, board.sign)

    def _let_in(self) -> None:
        """Accept the connection that a rank has sent, and connect to the rank's board if necessary."""
        try:
            message, handles, _, _ = socket.recv_fds(self._wire, _ADDRESS_BYTES, 1)
        except BlockingIOError:
            return
        if not handles:  # this process has no file descriptor left: the rank sees the end of its connection
            return
        connection, address = socket.socket(fileno=handles[0]), tuple(parts_of(message))
        connection.setblocking(False)
        board = self._boards.get(address)
        if board is None:
            host, port, place = (part.decode() for part in address)
            try:
                board = _Followed(StoreClient(host, int(port), self._secret(), MEMBER, place))
            except (StoreLostError, LaunchError):  # the rank sees it, too
                connection.close()
                return
            self._boards[address] = board
            self._selector.register(board.client, selectors.EVENT_READ, (board, None))
        rank = _Rank(connection)
        board.ranks.append(rank)
        self._selector.register(connection, selectors.EVENT_READ, (board, rank))

    def _guarded(self, board: _Followed, act: Callable[[], None]) -> None:
        """Call `act` for a board, and forward its pushed values. If the board is lost, or has no more ranks, close its
        connections."""
        if board not in self._boards.values():
            return
        try:
            act()
            self._pass_on(board)
            if board.ranks:
                return
            board.client.ask("will")
        except StoreLostError:
            pass
        for rank in list(board.ranks):
            self._drop(board, rank)
        self._boards = {address: one for address, one in self._boards.items() if one is not board}
        self._selector.unregister(board.client)
        board.client.close()

    def _pass_on(self, board: _Followed) -> None:
        news = dict(board.client.news)
        board.client.news.clear()
        for key, value in news.items():
            message = frame(fields(b"news", key, value))
            for rank in [one for one in board.ranks if key.partition(b"-")[0] in one.kinds]:
                self._send(board, rank, message)

    def _hear(self, board: _Followed, rank: _Rank, events: int) -> None:
        """Answer a rank's requests; if the rank has ended, set its key (`will`). Raises `StoreLostError` if the board
        is lost."""
        try:
            if events & selectors.EVENT_WRITE:
                self._send(board, rank)
            if events & selectors.EVENT_READ:
                if not (data := rank.connection.recv(READ)):
                    raise FrameError("the rank has ended")
                rank.frames.feed(data)
            while (body := rank.frames.take()) is not None:
                try:
                    answer = b"ok", *self._serve(board, rank, *parts_of(body))
                except ValueError as error:
                    answer = b"no", str(error).encode()
                self._send(board, rank, frame(fields(*answer)))
        except BlockingIOError:
            return
        except StoreLostError:
            raise
        except (OSError, FrameError):
            self._drop(board, rank)
            if rank.will:
                board.client.ask("set", *rank.will)
            board.will()

    def _serve(self, board: _Followed, rank: _Rank, what: bytes, *parts: bytes) -> list[bytes]:
        if what == b"sign":
            new, rank.name, rank.signed_at = not rank.name, parts[0], time.monotonic()
            if new:
                board.sign()
            return [board.leader_ms]
        if what == b"will":
            rank.will = parts
            board.will()
            return []
        if what == b"follow":
            rank.kinds += parts
        return board.client.ask(what.decode(), *parts)

    def _send(self, board: _Followed, rank: _Rank, message: bytes = b"") -> None:
        """Send a message to a rank, after bytes not sent yet."""
        rank.unsent += message
        try:
            del rank.unsent[: rank.connection.send(rank.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # reading from it shows that it has ended
            rank.unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.unsent else 0)
        self._selector.modify(rank.connection, events, (board, rank))

    def _drop(self, board: _Followed, rank: _Rank) -> None:
        board.ranks.remove(rank)
        self._selector.unregister(rank.connection)
        hang_up(rank.connection)

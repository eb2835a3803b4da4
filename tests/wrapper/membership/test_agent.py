"""Ranks follow their board through the node's agent, and are missed as if each had a connection of its own."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ones_wrapper.membership import agent as agents
from ones_wrapper.membership.agent import SIGN_S, NodeAgent
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.link import Link
from ones_wrapper.network import job_network
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.network.frames import fields
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.network.server import StoreServer
from ones_wrapper.process.hang_detector import Standstill
from ones_wrapper.protocol import First
from tests.waiting import until
from tests.wrapper.membership.blocks import Job


class Turns:
    """Gives an agent its turns in a thread, as the launcher does between two looks at its ranks."""

    def __init__(self, agent: NodeAgent) -> None:
        self._paused, self._rests, self._stopped = False, threading.Event(), False
        self._thread = threading.Thread(target=self._run, args=(agent,))
        self._thread.start()

    def _run(self, agent: NodeAgent) -> None:
        while not self._stopped:
            if self._paused:
                self._rests.set()
                time.sleep(0.01)
            else:
                agent.turn(0.02)

    def pause(self) -> None:
        """Take no turn from now on."""
        self._rests.clear()
        self._paused = True
        assert self._rests.wait(60.0)

    def go_on(self) -> None:
        self._paused = False

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


@pytest.fixture
def network() -> JobNetwork:
    return JobNetwork.here()


@pytest.fixture
def turns(network: JobNetwork, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    agent = NodeAgent(lambda: network.secret)
    monkeypatch.setattr(agents, "_wire", agent._of_ranks)
    turns = Turns(agent)
    yield turns
    turns.stop()


@pytest.fixture
def board(network: JobNetwork) -> Board:
    return Board.hosted(network, 0)


def rank_of(board: Board, name: str) -> Board:
    found = board.again().through_agent()
    found.follow("plan", "lost")
    found.will(f"gone-{name}", "1")
    found.sign(name)
    return found


def hears(rank: Board, key: str) -> str:
    def look() -> str | None:
        rank.listen(0.05)
        return rank.heard(key)

    return until(look, key)


def test_ranks_hear_what_was_said_before_and_after_they_came(turns: Turns, board: Board) -> None:
    board.put("plan-1", "one")
    first = rank_of(board, "1.0-0")
    assert first.heard("plan-1") == "one"
    second = rank_of(board, "1.0-1")
    board.put("plan-2", "x" * 3_000_000)  # more than a pair of sockets holds
    board.put("other-1", "not followed")
    assert all(len(hears(rank, "plan-2")) == 3_000_000 for rank in (first, second))
    board.put("lost", "why")
    assert hears(second, "lost") == "why" and second.heard("other-1") is None


def test_ranks_of_a_node_share_one_connection(turns: Turns, board: Board) -> None:
    (server,) = _servers_of(board)
    ranks = [rank_of(board, f"1.0-{number}") for number in range(4)]
    until(lambda: len(server._members) == 2, "the leader's and the node's")
    for number, rank in enumerate(ranks):
        rank.put(f"leaving-1.0-{number}", "1")
    assert board.names("leaving") == {f"1.0-{number}" for number in range(4)}


def _servers_of(board: Board) -> list[StoreServer]:
    return [one for one in job_network._here.values() if one.port == board.port]


def test_a_rank_that_ends_is_named_at_once_and_one_that_stops_as_planned_is_not(turns: Turns, board: Board) -> None:
    board.follow("gone")
    killed, stopped = rank_of(board, "1.0-0"), rank_of(board, "1.0-1")
    stopped.will()
    stopped.close()
    killed.close()
    assert hears(board, "gone-1.0-0") == "1"
    time.sleep(0.1)
    assert board.names("gone") == {"1.0-0"}


def test_a_node_that_is_lost_names_all_its_ranks(turns: Turns, board: Board) -> None:
    ranks = [rank_of(board, f"1.0-{number}") for number in range(2)]
    (server,) = _servers_of(board)
    (upstream,) = [one for one in server._members if one.will]
    turns.pause()
    upstream.connection.shutdown(2)  # as the node's end does
    until(lambda: board.names("gone") == {"1.0-0", "1.0-1"}, "both")
    turns.go_on()
    for rank in ranks:
        with pytest.raises(StoreLostError, match="closed the connection"):
            for _ in range(200):
                rank.listen(0.05)


def test_a_silent_rank_is_missed_while_the_agent_signs_for_others(turns: Turns, board: Board) -> None:
    silent, other = rank_of(board, "1.0-0"), rank_of(board, "1.0-1")

    def is_missed() -> bool:
        other.sign("1.0-1")
        silent_s, living_s = board.silent_s(["1.0-0", "1.0-1"])
        return silent_s > living_s + 2 * SIGN_S

    until(is_missed, look_s=0.1)
    assert silent.heard("lost") is None


def test_a_node_that_stood_still_is_no_silence_of_its_ranks(turns: Turns, board: Board) -> None:
    """Else the agent would report the hour in which Slurm suspended the job as the ranks' silence."""
    rank, signed_at = rank_of(board, "1.0-0"), time.monotonic()
    turns.pause()
    time.sleep(Standstill.MOST_S + 1.5)
    turns.go_on()
    until(lambda: board.silent_s(["1.0-0"])[0] < time.monotonic() - signed_at - Standstill.MOST_S, "the agent signs")
    assert rank.heard("lost") is None


def test_a_rank_that_signed_before_the_pause_was_seen_signed_no_later_than_now(turns: Turns, board: Board) -> None:
    """Else a rank that hangs from then on would be missed only after as long again as Slurm suspended the job."""
    rank = rank_of(board, "1.0-0")
    turns.pause()
    time.sleep(Standstill.MOST_S + 1.5)
    signing = threading.Thread(target=rank.sign, args=("1.0-0",))
    signing.start()
    time.sleep(0.1)
    turns.go_on()
    signing.join()
    ages = until(lambda: [one for one in board.silent_s(["1.0-0"]) if one < Standstill.MOST_S], "the agent signs")
    assert ages[0] >= 0.0


def test_a_rank_that_follows_another_board_is_not_gone_from_the_first(
    turns: Turns, board: Board, network: JobNetwork
) -> None:
    """Its leader may look at the board until it leaves, and would end the membership."""
    board.follow("gone")
    link = Link(board.again(), "1.0-0", lambda: False, lambda why: None)
    link.start()
    (server,) = _servers_of(board)
    hosted = Board.hosted(network, 1)
    link.follow(hosted.again())
    until(lambda: len(server._places[board.place].members) == 1, "only the leader is left")
    assert board.names("gone") == set()
    link.stop()


def test_a_connection_that_was_lost_is_not_opened_again(turns: Turns, board: Board) -> None:
    """Else each rank that says that it ends would let its launcher wait for the lost store once more."""
    rank = rank_of(board, "1.0-0")
    rank.close()
    with pytest.raises(StoreLostError, match="is closed"):
        rank.will()


def test_a_board_that_ends_ends_the_ranks_connections(turns: Turns, board: Board) -> None:
    rank = rank_of(board, "1.0-0")
    board.close()
    with pytest.raises(StoreLostError, match="closed the connection"):
        for _ in range(200):
            rank.listen(0.05)
    with pytest.raises(StoreLostError):  # and whoever looks for it again
        rank_of(board, "1.0-0")


def test_an_agent_without_file_descriptors_serves_the_ranks_it_has(turns: Turns, board: Board) -> None:
    """It is the parent of all ranks: its end would be theirs."""
    rank, limits = rank_of(board, "1.0-0"), resource.getrlimit(resource.RLIMIT_NOFILE)
    direct, (mine, theirs) = board.again(), socket.socketpair()
    assert agents._wire is not None
    message = fields(direct.host.encode(), b"%d" % direct.port, direct.place.encode())
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        socket.send_fds(agents._wire, [message], [theirs.fileno()])
        theirs.close()
        mine.settimeout(60.0)
        assert mine.recv(1) == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    board.put("lost", "why")
    assert hears(rank, "lost") == "why"


def test_an_agent_that_is_gone(network: JobNetwork, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = NodeAgent(lambda: network.secret)
    monkeypatch.setattr(agents, "_wire", agent._of_ranks)
    agent._wire.close()
    with pytest.raises(StoreLostError, match="the node's agent"):
        board.again().through_agent()


def test_what_the_store_refuses_is_refused(turns: Turns, board: Board) -> None:
    rank = rank_of(board, "1.0-0")
    with pytest.raises(ValueError, match="there is no request"):
        rank.ask("dance")
    assert rank.sign("1.0-0") >= 0.0


def test_ranks_that_train_hold_no_connection_to_the_store(tmp_path: Path, kept: Callable[[Job], Job]) -> None:
    """Only the rank that leads does, since its board ends with it."""
    job = kept(Job(tmp_path / "job", "--step-ms", "40", epochs=4000))
    job.start(0, 2)
    job.wait(First)
    job.start(1, 2)
    job.order(0, 1)
    job.wait_for(0, 1)
    port = json.loads((job.directory / "hot" / "leader-0.json").read_text())["port"]
    ranks = [pid for block in job.blocks for pid in block.ranks()]

    def held() -> list[int]:
        return sorted(_connections(pid, port) for pid in ranks)

    until(lambda: held() == [0, 0, 0, 1], lambda: held())
    assert len(ranks) == 4


def _connections(pid: int, port: int) -> int:
    """Connections of a process to a port."""
    handles = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            handles.add(str(entry.readlink()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in handles for row in rows)

"""A membership whose nodes stood still all at once, as those of a job that Slurm suspended, goes on as it was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ones_wrapper.files.job_io import OrderReader
from ones_wrapper.membership.back_off import BackOff
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.coordinator import DEAD_S, UNWANTED_S, Coordinator
from ones_wrapper.membership.link import LEADER_S, LOOK_S, MAIN_S, Link
from ones_wrapper.membership.plan import Plan, encode
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.protocol import Order
from tests.waiting import until
from tests.wrapper.membership.test_plan import member
from tests.wrapper.runs import write_order


class Clock:
    """The monotonic clock, which goes on only as it is set forward: a busy machine's delays are no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now, self.ahead = time.monotonic(), 0.0
        monkeypatch.setattr(time, "monotonic", lambda: now + self.ahead)


def leading(board: Board, present: Plan, directory: Path, term: int = 0) -> Coordinator:
    """A coordinator of members whose state moves from memory to memory."""
    orders, back_off = OrderReader(directory, term), BackOff(directory, 7)
    found = Coordinator(board, present, orders, lambda: False, lambda world: True, back_off)
    found.changes_by(present, True)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_leader_takes_nobody_for_dead(clock: Clock, tmp_path: Path) -> None:
    """No rank could sign meanwhile. Who is silent from then on is missed as ever."""
    board = Board.hosted(JobNetwork.here(), 0)
    present = Plan(0, 0, (member(0), member(1)))
    leader = leading(board, present, tmp_path)
    leader._turn()
    clock.ahead += 3600.0
    leader._turn()
    assert leader.lost == ""
    for _ in range(int(DEAD_S) + 1):
        clock.ahead += 1.0
        leader._turn()
    assert "sent no heartbeat" in leader.lost


def test_no_newcomer_is_turned_away_for_it(clock: Clock, tmp_path: Path) -> None:
    """It came before its order: what stood still could see none. Later it is turned away as ever."""
    board = Board.hosted(JobNetwork.here(), 0)
    write_order(tmp_path, Order(1, 0, blocks=(0,)))
    leader = leading(board, Plan(0, 0, (member(0),)), tmp_path)
    board.put("join-1.0", encode(member(1)))
    leader._turn()
    clock.ahead += 3600.0
    leader._turn()
    assert board.read("leave-1.0") is None
    for _ in range(int(UNWANTED_S) + 1):
        clock.ahead += 1.0
        leader._turn()
    assert board.read("leave-1.0") == "no order names it"


def test_a_block_says_at_once_that_it_is_to_end(clock: Clock) -> None:
    """Slurm's next job waits for that block."""
    told, board = list[int](), Board.hosted(JobNetwork.here(), 0)
    board.follow("leaving")
    link = Link(board.again(), "1.0-0", lambda: bool(told), lambda why: None)
    link.start()
    try:
        board.listen(LOOK_S)
        assert board.heard("leaving-1.0-0") is None
        told.append(1)
        board.listen(5.0)
        assert board.heard("leaving-1.0-0") == "1"
    finally:
        link.stop()


def test_a_rank_does_not_take_the_leader_for_lost(clock: Clock) -> None:
    board, abandoned = Board.hosted(JobNetwork.here(), 0), list[str]()
    link = Link(board.again(), "1.0-0", lambda: False, abandoned.append)
    link.start()
    try:
        board.sign("0.0-0")
        for _ in range(2):
            clock.ahead += 3600.0
            time.sleep(2 * LOOK_S)
            assert board.silent_s(["1.0-0"])[0] < 3600.0
            board.sign("0.0-0")
        time.sleep(MAIN_S + LOOK_S)
        assert (link.lost, abandoned) == ("", [])
    finally:
        link.stop()


@pytest.mark.parametrize("planned", [True, False])
def test_a_leader_that_is_silent_or_gone(clock: Clock, planned: bool) -> None:
    """It hangs while its store answers, or was killed. After an end that was planned nobody misses its signs."""
    board, abandoned = Board.hosted(JobNetwork.here(), 0), list[str]()
    link = Link(board.again(), "1.0-0", lambda: False, abandoned.append)
    link.start()
    try:
        board.sign("0.0-0")
        if planned:
            board.will()
        for _ in range(int(LEADER_S / 1.8) + 2):
            clock.ahead += 1.8
            board.silent_s(["0.0-0"])  # the store looks at its clock: two of these at once would be a standstill
            time.sleep(1.3 * LOOK_S)
        until(lambda: planned or link.lost, "the loss")
        assert link.lost == ("" if planned else f"the leader sent no heartbeat for {LEADER_S:g} s")
        board.close()
        until(lambda: abandoned, "the end")
        assert abandoned == [link.lost] and ("the store closed the connection" in link.lost) is planned
    finally:
        link.stop()

"""The leader believes nothing of a newcomer that it cannot check: what comes to nothing is said in the job's log."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Store  # type: ignore[attr-defined]

from ones_wrapper.membership.back_off import AGAIN_S
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import form_s
from ones_wrapper.membership.coordinator import DEAD_S, DEADLINE_S, Coordinator
from ones_wrapper.membership.entrance import say_ready
from ones_wrapper.membership.plan import Plan, encode
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.protocol import Order
from tests.wrapper.membership.test_plan import member
from tests.wrapper.membership.test_standstill import Clock, leading
from tests.wrapper.runs import write_order

Turn = Callable[[], None]


@pytest.fixture
def board() -> Board:
    return Board.hosted(JobNetwork.here(), 0)


@pytest.fixture
def leader(board: Board, tmp_path: Path) -> Coordinator:
    """Block 0 trains alone, and blocks 0 and 7 are to."""
    write_order(tmp_path, Order(1, 0, blocks=(0, 7)))
    return leading(board, Plan(0, 0, (member(0),)), tmp_path)


@pytest.fixture
def turn(leader: Coordinator, board: Board, monkeypatch: pytest.MonkeyPatch) -> Turn:
    """A second later the leader looks at everything; block 0 has given a sign."""
    clock = Clock(monkeypatch)

    def turn() -> None:
        clock.ahead += 1.0
        board.sign(f"{member(0).uid}-0")
        leader._turn()

    return turn


def test_unfit_nodes_are_said_once(leader: Coordinator, board: Board, turn: Turn) -> None:
    board.put("unfit-b7", "7: node n7: it hangs")
    turn()
    turn()
    assert [*leader.notes] == ["block 7: node n7: it hangs"]


@pytest.mark.parametrize("requests", [0, 1])
def test_a_newcomer_that_is_killed_as_it_registers_keeps_nobody_out(
    board: Board, turn: Turn, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    """It had taken the next number and never used it: no later block was taken in until the term ended."""
    ask, sent = Board.ask, count()

    def ask_until_killed(*request: Any, **options: Any) -> Any:
        if next(sent) == requests:
            raise SystemExit
        return ask(*request, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Board, "ask", ask_until_killed)
        say_ready(board, member(8))
    say_ready(board, member(7))
    turn()
    assert board.read("newest") == "1"


@pytest.mark.parametrize("text", ["", "[]", '{"task": 7}', encode(member(7)).replace("7", "-7", 1)])
def test_a_newcomer_that_is_no_block_is_ignored_and_said(
    leader: Coordinator, board: Board, turn: Turn, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """The next newcomer is heard as ever."""
    board.put("join-7.0", text)
    turn()
    assert "a block that wanted to join is ignored: " in capsys.readouterr().err
    assert (leader.lost, board.read("newest")) == ("", None)
    say_ready(board, member(7))
    turn()
    assert board.read("newest") == "1" and "ignored" not in capsys.readouterr().err


def test_the_script_s_thread_gets_news_while_the_leader_looks_at_them(board: Board) -> None:
    """Who waits for an answer takes what is pushed."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def take() -> None:
        while not over.is_set():
            for number in range(500):
                board.news[b"gone-%d" % number] = b"1"
            board.news.clear()

    thread = threading.Thread(target=take)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(2000):
            board.heard_of("gone")
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_nobody_waits_for_a_member_that_was_told_to_end(board: Board, tmp_path: Path) -> None:
    """Slurm preempts a guest for the base block that joins. A plan without it is there at the next turn, since others
    wait."""
    write_order(tmp_path, Order(1, 0, blocks=(7, 1, 2)))
    trains = Plan(0, 0, tuple(map(member, (0, 1, 2))))
    leader = leading(board, trains, tmp_path)

    def turn(*ending: int) -> None:
        for task in ending:
            board.put(f"leaving-{member(task).uid}-0", "1")
        leader._turn()

    turn()
    turn(1)
    assert leader._plan is not None and (leader._plan.tasks, leader._plan.why) == ((0, 2), "leaving")
    leader._present, leader._plan = leader._plan, None
    say_ready(board, member(7))
    turn()
    assert leader._plan is not None and leader._plan.tasks == (2, 7)


@pytest.mark.parametrize(("task", "lost", "verdict"), [(0, "a rank of block 0 ended", None), (7, "", "dropped")])
def test_a_rank_that_ended_is_known_at_once(
    leader: Coordinator, board: Board, turn: Turn, task: int, lost: str, verdict: str | None
) -> None:
    """Ranks do not wait in a collective for five seconds of silence; a newcomer's end costs nobody anything."""
    say_ready(board, member(7))
    turn()
    assert board.read("newest") == "1"
    board.put(f"gone-{member(task).uid}-0", "1")
    leader.turn()
    assert (leader.lost, leader.turn()) == (lost, lost) and board.read("lost") == (lost or None)
    assert board.read("verdict-1") == verdict


def test_a_plan_with_a_member_that_nobody_hears_of_is_dropped_and_said(
    leader: Coordinator, board: Board, turn: Turn, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block that was only suspended ends, with its GPUs."""
    say_ready(board, member(7))
    turn()
    assert board.read("newest") == "1" and leader.proposal(lambda plan: True) == (1, 0)
    for _ in range(int(DEAD_S) + 1):
        turn()
    said = capsys.readouterr().err
    assert f"block 7 sent no heartbeat for {DEAD_S:g} s; it does not join" in said
    assert f"membership 1 was dropped: block 7 sent no heartbeat for {DEAD_S:g} s" in said
    assert board.read("verdict-1") == "dropped" and leader.proposal(lambda plan: True) == (0, 0)
    assert board.read(f"leave-{member(7).uid}") == f"block 7 sent no heartbeat for {DEAD_S:g} s"
    turn()
    assert (leader.lost, board.read("newest")) == ("", "1"), "it is not planned with again"


def test_a_term_is_planned_anew_while_no_step_ends(
    leader: Coordinator, board: Board, turn: Turn, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may load for minutes: what comes next follows the newest order then, and no log says that ranks
    failed."""
    leader._hot = False
    say_ready(board, member(7))
    for _ in range(int(form_s(2) + DEADLINE_S) + 3):
        board.sign(f"{member(7).uid}-0")
        turn()
    assert board.read("newest") == "2" and leader.proposal(lambda plan: True) == (2, 2)
    assert "membership 1 was dropped: no step ended meanwhile" in capsys.readouterr().err


def test_a_plan_waits_for_the_end_of_an_evaluation(
    leader: Coordinator, board: Board, turn: Turn, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that evaluate for minutes are no failure of newcomers, after which they would wait for minutes more."""
    say_ready(board, member(7))
    turn()
    for rank in range(2):
        board.put(f"formed-1-{rank}", "formed 127.0.0.1 1")
    for _ in range(10 * int(form_s(2) + DEADLINE_S)):
        board.sign(f"{member(7).uid}-0")
        turn()
    assert board.read("newest") == "1" and "dropped" not in capsys.readouterr().err
    assert leader.proposal(lambda plan: True) == (1, 1)


def test_a_change_that_failed_is_not_tried_again_at_once(leader: Coordinator, board: Board, turn: Turn) -> None:
    """The same members wait 30 s and then twice as long, others do not."""

    def turns(count: int) -> None:
        for _ in range(count):
            for number in (7, 8):
                board.sign(f"{member(number).uid}-0")
            turn()

    def fail() -> None:
        newest = board.read("newest")
        for rank in range(2):
            board.put(f"formed-{newest}-{rank}", "formed 127.0.0.1 1")
        turns(1)
        assert leader.proposal(lambda plan: True) == (int(newest or 0), int(newest or 0))
        leader.dropped("the state did not arrive")

    say_ready(board, member(7))
    turns(2)
    for number, wait_s in enumerate((AGAIN_S, 2 * AGAIN_S), 1):
        assert board.read("newest") == str(number)
        fail()
        turns(int(wait_s) - 3)
        assert board.read("newest") == str(number)
        turns(5)
    assert board.read("newest") == "3"
    fail()
    leader._orders.order = Order(2, 0, blocks=(0, 7, 8))
    say_ready(board, member(8))
    turns(3)
    assert board.read("newest") == "4", "other members have not failed"


def test_an_order_that_names_blocks_nobody_knows_changes_nothing(leader: Coordinator, board: Board, turn: Turn) -> None:
    for _ in range(5):
        turn()
    assert (leader.lost, board.read("newest")) == ("", None)


def test_the_board_is_cleared_of_groups_that_everybody_has_left(leader: Coordinator, board: Board, turn: Turn) -> None:
    """Those of the last two memberships stay, which ranks may use."""
    if not hasattr(Store, "list_keys"):
        pytest.skip("this torch cannot list what is in a store")
    texts, parts = ("formed-{}-1", "next-{}"), ("control-{}", "data-{}", "copy-{}-1", "default-{}")
    for generation in (1, 2, 12):
        for name in texts:
            board.put(name.format(generation), "1")
        for name in parts:
            board.store(name.format(generation)).set("0/1", "1")
    board.put("shapes", "1")

    def there(generation: int) -> int:
        found = [board.read(name.format(generation)) is not None for name in texts]
        return sum((*found, *(board.store(name.format(generation)).check(["0/1"]) for name in parts)))

    for generation, expected in ((1, (6, 6, 6)), (2, (6, 6, 6)), (12, (0, 6, 6)), (13, (0, 0, 6))):
        leader.committed(Plan(generation, 0, (member(0),)))
        turn()
        assert (there(1), there(2), there(12)) == expected
    assert board.read("shapes") == "1" and leader.lost == ""

"""Groups are formed as soon as a plan is there, before the ranks agree on it."""

from __future__ import annotations

import torch

from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import Former
from ones_wrapper.membership.link import Link
from ones_wrapper.membership.plan import Member, Plan, encode
from ones_wrapper.network.job_network import JobNetwork
from tests.waiting import until

ME, OTHER = (Member(task, 0, f"{task}.0.aa", 1, 1, 1) for task in (0, 1))


def make(plan: Plan, first: int, board: Board) -> Former:
    return Former(plan, first, board, "gloo", torch.device("cpu"), "127.0.0.1")


def link_of(board: Board, present: int) -> Link:
    link = Link(board.again(), f"{ME.uid}-0", lambda: False, lambda why: None)
    link.form(present, ME.uid, make)
    link.start()
    return link


def read(board: Board, key: str) -> str:
    return until(lambda: board.read(key), key)


def test_groups_are_formed_before_the_rank_asks_for_them() -> None:
    """With long steps each boundary that is waited for costs a step."""
    board = Board.hosted(JobNetwork.here(), 0)
    link = link_of(board, 4)
    for generation in (5, 6):  # the first comes to nothing
        board.put(f"plan-{generation}", encode(Plan(generation, 0, (ME,))))
        assert read(board, f"formed-{generation}-0").startswith("formed")
    former = link.take(6)
    assert former is not None and former.formed is not None and former.plan.generation == 6
    assert link.take(6) is None
    link.stop()


def test_a_plan_that_follows_at_once_takes_nothing_from_a_rank_that_is_slow() -> None:
    """Rank 0 may have made the change, and the leader published the next plan. Its groups are formed once, too."""
    board = Board.hosted(JobNetwork.here(), 0)
    link = link_of(board, 0)
    for generation in (1, 2):
        board.put(f"plan-{generation}", encode(Plan(generation, 0, (ME,))))
        assert read(board, f"formed-{generation}-0")
    for generation in (1, 2):
        former = link.take(generation)
        assert former is not None and former.formed is not None and former.plan.generation == generation
    link.stop()


def test_a_plan_that_the_rank_heard_of_first_is_not_formed_twice() -> None:
    """A second group of the same name would mix its messages with the first's."""
    board = Board.hosted(JobNetwork.here(), 0)
    link = link_of(board, 0)
    assert link.take(1) is None
    board.put("plan-1", encode(Plan(1, 0, (ME,))))
    board.put("plan-2", encode(Plan(2, 0, (OTHER,))))  # this rank leaves
    board.put("plan-3", encode(Plan(3, 0, (ME,))))
    assert read(board, "formed-3-0")
    assert board.read("formed-1-0") is None and board.read("formed-2-0") is None
    link.stop()

"""Blocks that look for a leader at the same moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from ones_wrapper.membership import meeting
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import new_token
from ones_wrapper.membership.files import Block, HotFolder, Leader


def test_a_leader_that_came_while_one_looked_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects what was trained: two blocks find their leader lost; the one that looks later joins the other, and does
    not replace it."""
    folder = HotFolder(tmp_path, 7)
    folder.prepare()
    lost = Leader(0, "127.0.0.1", 1, "gone", 0, 0)
    assert folder.claim(lost)
    board = Board.host("127.0.0.1", new_token())
    other = Leader(1, "127.0.0.1", board.port, board.token, 2, 0)

    def living(leader: Leader) -> bool:
        if leader == lost:
            assert folder.claim(other)
        return leader == other

    monkeypatch.setattr(meeting, "living", living)
    found = meeting.find_or_found(folder, Block(7, 1, 0), "127.0.0.1", lambda term: None)
    assert found == (other, None)
    assert folder.newest() == other

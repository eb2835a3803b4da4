"""The order in which ranks change: nothing of the old group is under way, and the new one works, before it counts."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ones_wrapper.devices.room import RESERVE
from ones_wrapper.files.job_io import OrderReader
from ones_wrapper.group import TorchGroup
from ones_wrapper.membership import blocks as room
from ones_wrapper.membership import connections
from ones_wrapper.membership.blocks import Blocks
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import Formed
from ones_wrapper.membership.entrance import FoundBlocks
from ones_wrapper.membership.files import HotFolder, Leader
from ones_wrapper.membership.link import Link
from ones_wrapper.membership.machine import BlockState, Carrier
from ones_wrapper.membership.plan import Plan
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.network.transfer import SendersLostError, TransferError
from ones_wrapper.process.block import Block
from ones_wrapper.run import changing
from tests.wrapper.membership.test_plan import member

ME, NEW = member(0), member(1)


class Former:
    """Whose groups are there."""

    rank = 0

    def __init__(self, plan: Plan, board: Board) -> None:
        self.formed = Formed(plan, 0, board, {"nccl": object()}, object(), None)  # type: ignore[arg-type]


@pytest.fixture
def happened() -> list[str]:
    return []


def made(tmp_path: Path, happened: list[str], monkeypatch: pytest.MonkeyPatch, trial: str, sent: str) -> Blocks:
    """Block 0, which trains on a GPU and takes block 1 in."""
    board = Board.hosted(JobNetwork.here(), 0)
    leader = Leader(0, *board.address, board.place, 0, 0)

    class Ranks(TorchGroup):
        def maximum(self, values: Any) -> list[int]:
            happened.append("agreed")
            return list(values)

    def try_groups(formed: Formed, device: torch.device, within_s: float) -> str:
        happened.append("tried")
        return trial

    def send(*_: object) -> int:
        happened.append("sent")
        if sent:
            raise OSError(sent)
        return 1

    group = Ranks(0, 1, 0, 1, 1, torch.device("cuda"), None)
    found = FoundBlocks(
        HotFolder(tmp_path, 7), Block(7, 0, 0), leader, board, ME, 0, "127.0.0.1", BlockState.LEADING, Plan(1, 0, (ME,))
    )
    link = Link(board, f"{ME.uid}-0", lambda: False, lambda why: None)
    blocks, plan = Blocks(group, found, link, partial(OrderReader, tmp_path), lambda: False), Plan(2, 0, (ME, NEW))
    blocks.machine.prepare(plan)
    blocks._former = Former(plan, board)  # type: ignore[assignment]
    monkeypatch.setattr(room.streams, "wait", lambda device: happened.append(f"{device} is idle"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (RESERVE // 4, 8 * RESERVE))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("torch's cache is given back"))
    monkeypatch.setattr(room, "try_groups", try_groups)
    monkeypatch.setattr(blocks, "_send", send)
    monkeypatch.setattr(room.connections, "enter", lambda formed: happened.append("entered"))
    monkeypatch.setattr(room.connections, "drop", lambda formed: happened.append("dropped"))
    return blocks


BEGINS = ["cuda is idle", "torch's cache is given back", "sent", "agreed"]


@pytest.mark.parametrize(
    ("sent", "trial", "steps"),
    [("", "", [*BEGINS, "tried", "agreed", "entered"]), ("", "no route", [*BEGINS, "tried", "agreed", "dropped"]),
     ("no route", "", [*BEGINS, "dropped"])],
)  # fmt: skip
def test_nothing_counts_before_all_agree_that_it_works(
    tmp_path: Path, happened: list[str], monkeypatch: pytest.MonkeyPatch, sent: str, trial: str, steps: list[str]
) -> None:
    """Nor is the last sum of the old group cut short (pytorch#141510). Torch's memory is given back once nothing of the
    old group is under way, before the state's chunks and NCCL's buffers are wanted."""
    blocks = made(tmp_path, happened, monkeypatch, trial, sent)
    change = blocks.change(lambda: ({}, {}), 0.0)
    verdict = blocks._board.read("verdict-2")
    assert happened == steps
    assert ((change is not None), verdict) == ((True, "committed") if steps[-1] == "entered" else (False, None))


def test_room_is_made_before_groups_are_formed(
    tmp_path: Path, happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new communicator exists next to the old one."""
    blocks = made(tmp_path, happened, monkeypatch, "", "")
    blocks.machine.carrier = Carrier.MEMORY
    monkeypatch.setattr(blocks, "_plan", lambda generation: Plan(generation, 0, (ME, NEW)))
    monkeypatch.setattr(blocks, "_make_former", lambda *_: SimpleNamespace(start=lambda: happened.append("forming")))
    blocks._prepare(3)
    assert happened == ["dropped", "torch's cache is given back", "forming"]


@pytest.mark.parametrize("error", [SendersLostError("closed"), TransferError("a is [7] here")])
def test_a_newcomer_waits_for_another_plan_if_its_senders_are_gone(
    tmp_path: Path, happened: list[str], monkeypatch: pytest.MonkeyPatch, error: TransferError
) -> None:
    """It ends by its own fault only if it cannot take the state."""
    blocks, receiver = made(tmp_path, happened, monkeypatch, "", ""), Mock()
    receiver.receive.side_effect = error
    if isinstance(error, SendersLostError):
        assert blocks._receive("state", receiver, {}, Mock(), str) is None
    else:
        with pytest.raises(TransferError, match="a is"):
            blocks._receive("state", receiver, {}, Mock(), str)


def test_a_newcomer_uses_its_groups_after_their_first_sums(
    tmp_path: Path, happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that leaves commits without these sums, and a rank's next collective would meet another rank's sum."""

    def sums(formed: Formed, device: torch.device) -> str:
        time.sleep(0.2)
        happened.append("tried")
        return ""

    blocks = made(tmp_path, happened, monkeypatch, "", "")
    blocks._former.join = lambda: None  # type: ignore[union-attr, method-assign]
    monkeypatch.setattr(room, "try_groups", connections.try_groups)
    monkeypatch.setattr(connections, "_try_all", sums)
    monkeypatch.setattr(blocks, "_plan", lambda generation: Plan(generation, 0, (ME, NEW)))
    monkeypatch.setattr(blocks, "_begin_forming", lambda plan, port: None)
    monkeypatch.setattr(blocks, "_receive", lambda *_: ({"began": 0.0}, 0, 0.0))
    monkeypatch.setattr(blocks.link, "heard", {"verdict-2": "committed"}.get)
    monkeypatch.setattr(blocks, "_become", lambda former: happened.append("became"))
    assert blocks._try_to_join(2, Mock(port=0), {}, Mock()) is not None
    assert happened == ["agreed", "tried", "became"]


def test_who_leaves_gives_its_group_up_first(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """ncclCommDestroy returns once all ranks of a node have called it, and a process that is gone never does."""
    blocks = Mock(local_rank=1, leave=lambda: happened.append("left"))
    keeping = Mock(let_go=lambda: happened.append("let go"))
    ranks = object.__new__(changing.ChangingRanks)
    ranks._blocks, ranks._machine = blocks, Mock(go=lambda state: happened.append(state.value))
    ranks._run = Mock(keeping=keeping)
    monkeypatch.setattr(changing.connections, "destroy", lambda: happened.append("destroyed"))
    with pytest.raises(SystemExit):
        ranks._leave_membership()
    assert happened == ["parting", "let go", "destroyed", "left"]

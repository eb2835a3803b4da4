"""First steps of a block that starts: it leads its job, begins a term with announced blocks, or joins blocks that
train."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ones_wrapper.files.node_memory import FOLDER, least_room
from ones_wrapper.group import TorchGroup
from ones_wrapper.membership import connections
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.coming import answer, find_coming, gather, read_coming
from ones_wrapper.membership.files import HotFolder, Leader
from ones_wrapper.membership.link import Link
from ones_wrapper.membership.machine import BlockState, Carrier
from ones_wrapper.membership.meeting import NotWantedError, find_or_found
from ones_wrapper.membership.plan import Member, Plan, decode_plan, encode
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.network.job_network import JobNetwork, node_name
from ones_wrapper.process.block import Block
from ones_wrapper.process.log import log

MODE = "mode"
"""Key on the board. Its text is the carrier by which the present members admit blocks."""
_TURN_S = 0.5
"""Longest time, in seconds, after which a block's first rank reports to the block's other ranks."""
_LOOK_S = 0.02


class NextTermError(Exception):
    """Error: the next term begins with this block, so that its ranks must start again."""


@dataclass(frozen=True)
class FoundBlocks:
    """The leader, board and membership that a block's ranks found."""

    folder: HotFolder
    block: Block
    leader: Leader
    board: Board
    me: Member
    local: int
    """This rank's number within its block."""
    address: str
    """Name or address by which other nodes reach this node."""
    state: BlockState
    present: Plan | None = None
    """Membership with which an announced term begins; None if the term was not announced."""
    stood_still_at: float = 0.0
    """Unix time at which training paused for this term; 0 if the term was not announced."""


def come_in(group: TorchGroup, job_dir: Path, block: Block, env: Mapping[str, str]) -> FoundBlocks:
    """Find the job's leader, become it, or begin an announced term. In the last case `group` then has the ranks of all
    announced blocks. Collective over the block. Raises `NotWantedError` if the job is over, and `StoreLostError`."""
    folder, address = HotFolder(job_dir, block.array), node_name(env)
    hosted: list[Board] = []
    folder.prepare()
    network = JobNetwork.found(env, folder.path)

    def look() -> tuple[dict[str, Any] | None, bool, str]:
        leader, board = find_or_found(folder, block, network)
        hosted.append(board) if board else None
        return (
            None if leader is None else asdict(leader),
            board is not None,
            f"{block.task}.{block.restart}.{secrets.token_hex(4)}",
        )

    data, leads, uid = group.on_first(look)
    if data is None:
        raise NotWantedError("the job is over")
    leader = Leader(**data)
    board = hosted[0] if hosted else Board(network, leader.host, leader.port, leader.place)
    shape, local = (group.world, group.nodes, group.gpus_per_node), group.rank
    me = Member(block.task, block.restart, uid, *shape, memory=least_room(group.gather(env.get(FOLDER, ""))))

    def others() -> tuple[str, float, float, str]:
        try:
            coming = read_coming(board)
            if coming is None or not (leads or coming.named(block)):
                return "", 0.0, 0.0, ""
            plan = gather(board, coming, leader.term, me) if leads else answer(board, me)
        except (StoreLostError, ValueError) as error:
            return "", 0.0, 0.0, str(error) or "lost"
        return encode(plan) if plan is not None else "", coming.began, coming.patience_s(), ""

    text, began, patience_s, lost = group.on_first(others)
    if lost:
        raise StoreLostError(lost)
    state = BlockState.LEADING if leads else BlockState.ADMITTED
    if (plan := decode_plan(text) if text else None) is not None:
        state = BlockState.LEADING if leads else BlockState.MEMBER
        first = plan.first_rank(uid)
        assert first is not None
        board.will(f"gone-{uid}-{local}", "1")
        # If the machine is slow, forming the group is too.
        connections.begin(group, board, plan, first + local, max(connections.FORM_S, patience_s))
    return FoundBlocks(folder, block, leader, board, me, local, address, state, plan, began)


def wait_for_term(group: TorchGroup, found: FoundBlocks, link: Link, leaving: Callable[[], bool]) -> None:
    """Wait until the present members post their carrier. Return if they send the state from memory; else wait for the
    next term.

    Collective over the block. `leaving` returns True if the block is asked to end. Raises `NextTermError`,
    `NotWantedError` and `StoreLostError`.
    """
    registered = False

    def look() -> str:
        try:
            return _look(found, link, leaving, registered)
        except (StoreLostError, ValueError) as error:
            # The term's leader may be gone already.
            return "next" if find_coming(found.folder, found.leader) is not None else f"lost: {error}"

    while True:
        said = group.on_first(look)
        if said == Carrier.MEMORY.value:
            return
        if said == "next":
            raise NextTermError
        what, _, why = said.partition(": ")
        if what == "lost":
            raise StoreLostError(why)
        if what == "leave":
            raise NotWantedError(why)
        if said == Carrier.CHECKPOINT.value:
            if group.rank == 0:
                log(f"block {found.block.task} waits for the next term")
                say_ready(found.board, found.me)
            registered = True


def say_ready(board: Board, me: Member) -> None:
    """Post that block `me` can join. Called on its first rank, when all its ranks send heartbeats. Raises
    `StoreLostError`."""
    board.put(f"join-{me.uid}", encode(me))
    board.put(f"ready-{me.uid}", "1")


def _look(found: FoundBlocks, link: Link, leaving: Callable[[], bool], registered: bool) -> str:
    """Return a word for the next step of `wait_for_term`; '' for none. Called on the block's first rank."""
    uid, until = found.me.uid, time.monotonic() + _TURN_S
    while time.monotonic() < until:
        if leaving():
            return "leave: it was asked to end before it joined"
        if why := link.heard(f"leave-{uid}"):
            return f"leave: {why}"
        if not registered and (mode := link.heard(MODE)) is not None:
            return mode
        newest = link.heard("newest") if registered else None
        if newest is not None and link.heard(f"verdict-{newest}") == "committed":
            plan = decode_plan(link.heard(f"plan-{newest}") or "")
            if plan.first_rank(uid) is not None:
                return "next"
        if link.lost:
            raise StoreLostError(link.lost)
        time.sleep(_LOOK_S)
    return ""

"""A term with several blocks that begins from a checkpoint: its announcement, and how the announced blocks meet.

Some state cannot be sent from memory: shards of FSDP2, or a model split in two dimensions. Such a job changes its
members in three steps. All ranks write a checkpoint at a step boundary. The leader announces the next members in the
job's folder. The ranks end, and their launchers fork new ranks. The first announced block leads the next term; the
other blocks report to it.

After a loss the remaining members begin the next term in the same way. The first of them to arrive leads, since any of
them may be lost meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ones_wrapper.membership.board import Board
from ones_wrapper.membership.files import HotFolder, Leader
from ones_wrapper.membership.plan import Member, Plan, decode_member, decode_plan, encode, plan_of
from ones_wrapper.process.block import Block
from ones_wrapper.protocol.fields import value_of

LEAST_S, MOST_S = 10.0, 60.0
"""Least and most seconds that announced blocks wait for each other while their ranks are forked again. Later blocks
join the running term."""
LEAST_LOST_S = 1.0
"""Value of `LEAST_S` after a loss. It is shorter, since an announced block may be lost as well, so that others would
wait for it."""
LOST = "lost"
"""Cause (`Plan.why`) of a plan with the members that remain after a loss."""
GATHER = "gather"
"""Key on the board whose text is the announcement of the term; empty if the term was not announced."""
_BEGINS = "begins"


@dataclass(frozen=True)
class Coming:
    """Announcement of the next term."""

    plan: Plan
    began: float
    """Unix time at which training paused."""
    at: float
    """Unix time of the announcement. On the board it is later by the time waited for a rescue checkpoint."""

    def named(self, block: Block) -> bool:
        """Return True if this start of a block is a member of the announced term."""
        return any((member.task, member.restart) == (block.task, block.restart) for member in self.plan.members)

    def may_lead(self, block: Block) -> bool:
        """Return True if this start of a block may lead the announced term: the first member, or any member after a
        loss."""
        first = self.plan.members[0]
        return self.named(block) and (self.plan.why == LOST or first.task == block.task)

    def patience_s(self) -> float:
        """Return the seconds to wait for the other blocks: twice the time since the announcement, within `LEAST_S`
        (after a loss `LEAST_LOST_S`) and `MOST_S`."""
        least_s = LEAST_LOST_S if self.plan.why == LOST else LEAST_S
        return min(MOST_S, max(least_s, 2.0 * (time.time() - self.at)))

    def fields(self) -> dict[str, Any]:
        """Return the announcement as plain values."""
        return {"plan": asdict(self.plan), "began": self.began, "at": self.at}

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> Coming:
        """Return the announcement from its plain values. Raises ValueError."""
        began, at = (value_of(name, float, data.get(name)) for name in ("began", "at"))
        return cls(plan_of(data.get("plan")), began, at)


def find_coming(folder: HotFolder, leader: Leader | None) -> Coming | None:
    """Return the announced term that has not begun yet; None if there is none. `leader` is the newest term's leader."""
    data = folder.announced()
    if data is None:
        return None
    try:
        coming = Coming.decode(data)
    except ValueError:
        return None
    over = leader is not None and coming.plan.term <= leader.term
    return None if over or abs(time.time() - coming.at) > 2 * MOST_S else coming


def read_coming(board: Board) -> Coming | None:
    """Return the announcement with which the board's term began; None if the term was not announced. Raises
    `StoreLostError`."""
    text = board.read(GATHER)
    return Coming.decode(json.loads(text)) if text else None


def gather(board: Board, coming: Coming, term: int, mine: Member) -> Plan:
    """Lead the announced term: return the membership of the blocks that reported in time. Raises `StoreLostError`."""
    until = time.monotonic() + coming.patience_s()
    here = {mine.task: mine}
    awaited = {member.task: member for member in coming.plan.members if member.task != mine.task}
    for task in awaited:
        if (text := board.wait(f"here-{task}", max(0.0, until - time.monotonic()))) is not None:
            here[task] = decode_member(text)
    tasks = [task for task in coming.plan.tasks if task in here and task != mine.task]
    plan = replace(coming.plan, term=term, members=(mine, *(here[task] for task in tasks)), moves=False)
    board.put(_BEGINS, encode(plan))
    return plan


def answer(board: Board, mine: Member) -> Plan | None:
    """Report to the leader of the announced term, and return the membership; None if this block is not in it. Raises
    `StoreLostError`."""
    board.put(f"here-{mine.task}", encode(mine))
    if (text := board.wait(_BEGINS, 2 * MOST_S)) is None:
        return None
    plan = decode_plan(text)
    return plan if plan.first_rank(mine.uid) is not None else None

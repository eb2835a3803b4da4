"""Memberships as data, and the decision which one comes next. Pure: no torch, no files, no clock."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ones_wrapper.protocol.fields import MAX_INT

PATIENCE_S = 3.0
"""Blocks that are ready wait this long for others that the same order wants."""
MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Member:
    """A block, as it presents itself."""

    task: int
    restart: int
    uid: str
    """Tells starts of the same block's ranks apart."""
    ranks: int
    nodes: int
    ranks_per_node: int
    max_local: int = 0
    """Most samples of a pass that its devices hold."""

    @property
    def name(self) -> str:
        """Name for people."""
        return f"block {self.task}"


@dataclass(frozen=True)
class Plan:
    """A membership, present or planned."""

    generation: int
    term: int
    members: tuple[Member, ...]
    """Blocks in rank order; the first leads."""
    order: int | None = None
    """Number of the order that asked for the plan; None for none."""
    batch: int = 0
    """Global batch from the change on, in samples; 0 leaves it unchanged."""
    why: str = "order"
    ready_s: float = 0.0
    """Seconds from the order until the last new block was ready."""
    moves: bool = False
    """True if another block leads after the change."""

    @property
    def world(self) -> int:
        """Ranks of all members."""
        return sum(member.ranks for member in self.members)

    @property
    def nodes(self) -> int:
        """Nodes of all members; one that two blocks share counts twice."""
        return sum(member.nodes for member in self.members)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node; 0 if nodes have different numbers."""
        each = {member.ranks_per_node for member in self.members}
        return each.pop() if len(each) == 1 else 0

    @property
    def max_local(self) -> int:
        """Most samples of a pass that the devices of all members hold."""
        return min(member.max_local for member in self.members)

    @property
    def tasks(self) -> tuple[int, ...]:
        """Tasks of the members, in rank order."""
        return tuple(member.task for member in self.members)

    def first_rank(self, uid: str) -> int | None:
        """The rank of a block's first process; None if the block is no member."""
        before = 0
        for member in self.members:
            if member.uid == uid:
                return before
            before += member.ranks
        return None

    def nodes_before(self, uid: str) -> int:
        """Nodes of the members in front of a block."""
        return sum(member.nodes for member in self.members[: [member.uid for member in self.members].index(uid)])

    def newcomers(self, present: Plan) -> tuple[Member, ...]:
        """Members that are none of `present`."""
        known = {member.uid for member in present.members}
        return tuple(member for member in self.members if member.uid not in known)


def encode(value: Member | Plan) -> str:
    """Return it as JSON."""
    return json.dumps(asdict(value), separators=(",", ":"))


def decode_member(text: str) -> Member:
    """The member that `encode` was given. Raises ValueError."""
    return _member(_object(text))


def decode_plan(text: str) -> Plan:
    """The plan that `encode` was given. Raises ValueError."""
    return plan_of(_object(text))


def plan_of(data: Any) -> Plan:
    """The plan whose fields these plain values are. Raises ValueError."""
    try:
        members = tuple(_member(member) for member in data["members"])
        plan = Plan(**{**data, "members": members})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a plan: {error}") from None
    if not members or any(len(set(names)) < len(members) for names in (plan.tasks, [one.uid for one in members])):
        raise ValueError("not a plan: without members, or with one of them twice")
    numbers = (plan.generation, plan.term, plan.batch, 0 if plan.order is None else plan.order)
    if not all(type(n) is int and 0 <= n <= MAX_INT for n in numbers) or not is_time(plan.ready_s):
        raise ValueError("not a plan: a number is none, or out of range")
    if type(plan.why) is not str or type(plan.moves) is not bool:
        raise ValueError("not a plan: a field is of the wrong type")
    return plan


def is_time(value: Any) -> bool:
    """Return whether this is a time in seconds, since 1970 or shorter: no infinity, and no NaN."""
    return type(value) in (int, float) and 0 <= value <= MAX_INT


def _object(text: str) -> dict[str, Any]:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("not an object")
    return data


def _member(data: Any) -> Member:
    try:
        member = Member(**data)
    except TypeError as error:
        raise ValueError(f"not a member: {error}") from None
    numbers = [getattr(member, f.name) for f in fields(member) if f.name != "uid"]
    if not all(type(n) is int and 0 <= n < MAX_RANKS for n in numbers) or not isinstance(member.uid, str):
        raise ValueError("not a member: a field is of the wrong type")
    if member.ranks < 1:
        raise ValueError("not a member: without ranks")
    return member


@dataclass(frozen=True)
class Choice:
    """Members of the next membership, and its cause."""

    members: tuple[Member, ...]
    why: str
    """order or leaving."""


def next_plan(
    present: Sequence[Member],
    wanted: Sequence[int] | None,
    ready: Sequence[Member],
    leaving: Collection[str],
    waited_s: float,
) -> Choice | None:
    """Return the members that shall train next; None if nothing changes.

    `present` train now, in rank order. `wanted` are the tasks that the order in force names, the preferred leader
    first; None if it leaves that to the job. `ready` are newcomers that could join, and `waited_s` is the wait of the
    first of them. `leaving` are the uids of members that are asked to end.

    Blocks that are there stay in front, so ranks move as little as possible. If the leader goes, the order's first of
    those who stay leads. A block that is no longer wanted leaves once all that are wanted are there: a replacement
    comes before the block that it replaces goes. Somebody always stays: if all are leaving and nobody is ready,
    nothing changes here.
    """
    able = [member for member in present if member.uid not in leaving]
    tasks = {member.task for member in able}
    joining: dict[int, Member] = {}
    for newcomer in ready:
        if newcomer.task not in tasks and (wanted is None or newcomer.task in wanted):
            joining.setdefault(newcomer.task, newcomer)
    missing = set() if wanted is None else set(wanted) - tasks - set(joining)
    hurry = len(able) < len(present)
    if joining and missing and not hurry and waited_s < PATIENCE_S:
        return None
    staying = able
    if wanted is not None and not missing:
        staying = [member for member in able if member.task in wanted]
    if wanted is not None and staying and staying[0] is not present[0]:
        rather = {task: place for place, task in enumerate(wanted)}
        first = min(staying, key=lambda member: rather.get(member.task, len(rather)))
        staying = [first, *(member for member in staying if member is not first)]
    members = (*staying, *(joining[task] for task in sorted(joining)))
    if not members or members == tuple(present):
        return None
    return Choice(members, "leaving" if hurry else "order")

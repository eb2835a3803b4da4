"""Memberships as data, and the choice of the next one. Pure functions: no torch, no files, no clock."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from ones_wrapper.protocol.fields import ProtocolError, build, types_of

T = TypeVar("T")

PATIENCE_S = 3.0
"""Seconds that ready blocks wait for other blocks of the same order."""
MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Member:
    """One start of a block, with its task and size, as the block announces it."""

    task: int
    restart: int
    uid: str
    """Id of this start of the block, unique in the job."""
    ranks: int
    nodes: int
    ranks_per_node: int
    max_local: int = 0
    """Largest local batch, in samples, that the block's devices hold."""
    memory: str = ""
    """Folder in memory (`MemoryFolder.text`) with the least `room` among the block's nodes; empty if a node has no
    folder."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or any(
            getattr(self, field.name) >= MAX_RANKS for field in fields(self) if field.name not in ("uid", "memory")
        ):
            raise ProtocolError("without ranks, or a number is out of range")

    @property
    def name(self) -> str:
        """Name of the block in logs."""
        return f"block {self.task}"


@dataclass(frozen=True)
class Plan:
    """A present or planned membership: the blocks that train together."""

    generation: int
    term: int
    members: tuple[Member, ...]
    """Blocks in rank order; the first leads."""
    order: int | None = None
    """Number of the order that requested this plan; None if no order did."""
    batch: int = 0
    """Global batch in samples after the change; 0 keeps the present batch."""
    why: str = "order"
    ready_s: float = 0.0
    """Seconds from the order until the last of the new blocks was ready."""
    moves: bool = False
    """True if the leader is another block after the change."""

    @property
    def world(self) -> int:
        """World size: the number of ranks of all members."""
        return sum(member.ranks for member in self.members)

    @property
    def nodes(self) -> int:
        """Number of nodes of all members; a node that two blocks share counts twice."""
        return sum(member.nodes for member in self.members)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node; 0 if the nodes differ."""
        each = {member.ranks_per_node for member in self.members}
        return each.pop() if len(each) == 1 else 0

    @property
    def max_local(self) -> int:
        """Largest local batch, in samples, that the devices of all members hold."""
        return min(member.max_local for member in self.members)

    @property
    def tasks(self) -> tuple[int, ...]:
        """Array task ids of the members, in rank order."""
        return tuple(member.task for member in self.members)

    @property
    def uids(self) -> tuple[str, ...]:
        """Ids of the members' starts, in rank order."""
        return tuple(member.uid for member in self.members)

    def first_rank(self, uid: str) -> int | None:
        """Return the rank of the first process of the block `uid`; None if the block is no member."""
        before = 0
        for member in self.members:
            if member.uid == uid:
                return before
            before += member.ranks
        return None

    def nodes_before(self, uid: str) -> int:
        """Return the number of nodes of the members that precede the block `uid` in rank order."""
        return sum(member.nodes for member in self.members[: self.uids.index(uid)])

    def newcomers(self, present: Plan) -> tuple[Member, ...]:
        """Return the members that are not in the membership `present`."""
        return tuple(member for member in self.members if member.uid not in present.uids)


def encode(value: Member | Plan) -> str:
    """Return a member or plan as JSON."""
    return json.dumps(asdict(value), separators=(",", ":"))


def decode_member(text: str) -> Member:
    """Return the member from the JSON of `encode`. Raises ValueError."""
    return _built(Member, json.loads(text))


def decode_plan(text: str) -> Plan:
    """Return the plan from the JSON of `encode`. Raises ValueError."""
    return plan_of(json.loads(text))


def plan_of(data: Any) -> Plan:
    """Return the plan from its fields as plain values, after checks. Raises ValueError."""
    bare = _built(Plan, data | {"members": ()} if isinstance(data, dict) else data)
    if not isinstance(data.get("members"), (list, tuple)):
        raise ValueError("not a plan: without a list of members")
    plan = replace(bare, members=tuple(_built(Member, one) for one in data["members"]))
    if not plan.members or any(len({*names}) < len(plan.members) for names in (plan.tasks, plan.uids)):
        raise ValueError("not a plan: without members, or with a member twice")
    return plan


def _built(cls: type[T], data: Any) -> T:
    types = types_of(cls)  # type: ignore[arg-type]
    if not isinstance(data, dict) or data.keys() - types.keys():
        raise ValueError(f"not a {cls.__name__.lower()}: not an object with its fields")
    try:
        return build(cls, types, data)
    except ProtocolError as error:
        raise ValueError(f"not a {cls.__name__.lower()}: {error}") from None


def next_plan(
    present: Sequence[Member],
    wanted: Sequence[int] | None,
    ready: Sequence[Member],
    leaving: Collection[str],
    waited_s: float,
) -> tuple[Member, ...] | None:
    """Return the members that train next; None if nothing changes.

    `present` are the present members, in rank order. `wanted` are the tasks in the newest order, preferred leaders
    first; None if no order names tasks. `ready` are new blocks that can join; their longest wait is `waited_s` seconds.
    `leaving` are the uids of members that are requested to end.

    Members that stay keep their order, so that few ranks change. If the leader goes, the first task of `wanted` among
    the members that stay leads. A block that is not wanted leaves once all wanted blocks are ready, so that its
    replacement comes first. If all members are leaving and no block is ready, nothing changes.
    """
    able = [member for member in present if member.uid not in leaving]
    tasks = {member.task for member in able}
    joining: dict[int, Member] = {}
    for newcomer in ready:
        if newcomer.task not in tasks and (wanted is None or newcomer.task in wanted):
            joining.setdefault(newcomer.task, newcomer)
    missing = set() if wanted is None else set(wanted) - tasks - set(joining)
    if joining and missing and len(able) == len(present) and waited_s < PATIENCE_S:
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
    return members

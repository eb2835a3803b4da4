"""Which membership comes next, whatever was ordered, is ready, leaves or is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.membership.plan import PATIENCE_S, Member, Plan, decode_member, decode_plan, encode, next_plan


def member(task: int, start: int = 0, ranks: int = 1) -> Member:
    return Member(task, start, f"{task}.{start}", ranks, 1, ranks)


members = st.builds(member, st.integers(0, 5), st.integers(0, 1), st.integers(1, 4))
memberships = st.lists(members, min_size=1, max_size=5, unique_by=lambda m: m.task)


@given(
    present=memberships,
    wanted=st.none() | st.lists(st.integers(0, 5), min_size=1, unique=True),
    ready=st.lists(members, max_size=5, unique_by=lambda m: m.uid),
    leaving=st.sets(st.integers(0, 4)),
    waited=st.sampled_from([0.0, PATIENCE_S]),
)
def test_any_next_membership_is_sound(
    present: list[Member], wanted: list[int] | None, ready: list[Member], leaving: set[int], waited: float
) -> None:
    """A plan changes something, has each task once, keeps those who stay in front and, but for a new leader, in their
    order, takes in nobody who isn't ready and wanted, and drops nobody before what replaces it is there."""
    ready = [m for m in ready if m.uid not in {other.uid for other in present}]
    gone = {present[i].uid for i in leaving if i < len(present)}
    choice = next_plan(present, wanted, ready, gone, waited)
    stay = [m for m in present if m.uid not in gone]
    if choice is None:
        return
    found = list(choice)
    assert found and found != present
    assert len({m.task for m in found}) == len(found)
    old = [m for m in found if m in present]
    new = [m for m in found if m not in present]
    assert found == old + new
    kept = [m for m in stay if m in old]
    named = [m for task in wanted or () for m in kept if m.task == task] or kept
    lead = kept[:1] if kept[:1] == present[:1] or wanted is None else named[:1]
    assert old == lead + [m for m in kept if m not in lead]
    assert all(m in ready and (wanted is None or m.task in wanted) for m in new)
    assert not gone & {m.uid for m in found}
    dropped = [m for m in stay if m not in old]
    if dropped:
        assert wanted is not None
        assert all(m.task not in wanted for m in dropped)
        assert {*wanted} <= {m.task for m in found}


@pytest.mark.parametrize(
    ("present", "wanted", "ready", "leaving", "waited", "then"),
    [
        ([0], [0, 1], [], [], 0.0, None),
        ([0], [0, 1], [1], [], 0.0, [0, 1]),
        ([0], [0, 1, 2], [1], [], 0.0, None),
        ([0], [0, 1, 2], [1], [], PATIENCE_S, [0, 1]),
        ([0, 1, 2], [0], [], [], 0.0, [0]),
        ([0], [1], [], [], 0.0, None),
        ([0], [1], [1], [], 0.0, [1]),
        ([0, 1], [0, 2], [], [], 0.0, None),
        ([0, 1], [0, 1], [], [0], 0.0, [1]),
        ([0, 1], [0, 1], [], [0, 1], 0.0, None),
        ([0], [0, 1], [1], [0], 0.0, [1]),
        ([0], None, [3], [], 0.0, [0, 3]),
        ([0], [0], [3], [], 9.0, None),
        ([0, 1, 2, 3], [2, 0, 1, 3], [], [], 0.0, None),
        ([0, 1, 2, 3], [2, 0, 1, 3], [], [0], 0.0, [2, 1, 3]),
        ([0, 1, 2], [2, 3, 1], [3], [], 0.0, [2, 1, 3]),
        ([0, 1, 2], [3, 1, 2], [3], [], 0.0, [1, 2, 3]),
        ([0, 1, 2], [0], [], [0], 0.0, [1, 2]),
    ],
)
def test_examples(
    present: list[int], wanted: list[int] | None, ready: list[int], leaving: list[int], waited: float,
    then: list[int] | None,
) -> None:  # fmt: skip
    """Growth when all are ready or some have waited, replacement only by what is there, a leader that is told to end
    hands over to the first of those who stay in the order, nobody stays if all are told to end."""
    choice = next_plan(
        [member(t) for t in present], wanted, [member(t) for t in ready], {member(t).uid for t in leaving}, waited
    )
    assert (None if choice is None else [m.task for m in choice]) == then


def test_plans_survive_the_board() -> None:
    plan = Plan(7, 2, (member(0, ranks=4), member(3, ranks=2)), 12, 64, "order", 1.5, True)
    assert decode_plan(encode(plan)) == plan
    assert (plan.world, plan.nodes, plan.ranks_per_node, plan.tasks) == (6, 2, 0, (0, 3))
    assert [plan.first_rank(uid) for uid in ("0.0", "3.0", "9.0")] == [0, 4, None]
    assert decode_member(encode(member(1))) == member(1)
    for text in ("[]", "{", '{"members": []}', '{"task": 1}', encode(member(1)).replace("1", '"1"')):
        with pytest.raises(ValueError):  # which of them is said does not matter
            decode_plan(text)
        with pytest.raises(ValueError):
            decode_member(text)


@pytest.mark.parametrize(
    "change",
    [
        {"generation": "7"}, {"term": 1.0}, {"batch": -1}, {"order": 10**400}, {"ready_s": float("nan")}, {"why": 3},
        {"moves": 1}, {"members": (member(0), replace(member(0), uid="other"))},
    ],
)  # fmt: skip
def test_fields_of_a_plan_that_are_not_believed(change: dict[str, Any]) -> None:
    """Nor a block that trains in it twice."""
    plan = Plan(7, 2, (member(0), member(3)))
    with pytest.raises(ValueError, match="not a plan"):
        decode_plan(encode(replace(plan, **change)))

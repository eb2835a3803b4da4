"""Which blocks join and leave: never more than is free, never nothing, and towards the size that is wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.policy.ledger import Ledger
from slurm_ones.rules.blocks import FreeGpus, GuestSizes, Moves, RunningBlock, moves, staying_at

FULL = 4


def block(task: int, shape: str, *nodes: str) -> RunningBlock:
    return RunningBlock(task, Shape.parse(shape), nodes)


def found(
    blocks: list[RunningBlock], target: int, free: dict[str, int], spare: tuple[int, ...] = (5, 6, 7), **other: object
):  # type: ignore[no-untyped-def]
    site = {name: other.pop(name) for name in ("whole_nodes", "split_nodes") if name in other}
    free_gpus = FreeGpus(Ledger(free), FULL, **site)  # type: ignore[arg-type]
    staying = staying_at(blocks, FULL, other.get("going", ()))  # type: ignore[arg-type]
    return moves(blocks, spare, target, free_gpus, staying, **other)  # type: ignore[arg-type]


def added(*shapes: str, spare: tuple[int, ...] = (5, 6, 7)) -> tuple[tuple[int, Shape], ...]:
    return tuple(zip(spare, map(Shape.parse, shapes), strict=False))


ONE = [block(0, "1x1", "n1")]
MIXED = [block(0, "1x1", "n1"), block(1, "1x4", "n2"), block(2, "1x2", "n1")]


@pytest.mark.parametrize(
    ("asked", "guests", "target", "free", "expected"),
    [
        # A guest of two GPUs and one of base: no size of two is left by those that leave.
        (1, {2}, 2, {"n3": 1}, Moves(added("1x1"), (2,))),
        (1, {2}, 2, {}, Moves((), (2,))),
        (1, {2}, 1, {}, Moves((), (2,))),
        # The leader is a guest: base stays all the same.
        (2, {0, 1}, 2, {}, Moves((), (0, 1))),
        (2, {1}, 2, {}, Moves((), (1,))),
        # All could move to another node, in two blocks: neither would be base.
        (1, {2}, 4, {"n3": 4}, Moves(added("1x1"))),
    ],
)
def test_no_guest_stays_in_place_of_base(
    asked: int, guests: set[int], target: int, free: dict[str, int], expected: Moves
) -> None:
    blocks = {
        frozenset({2}): [block(0, "1x1", "n1"), block(2, "1x2", "n2")],
        frozenset({0, 1}): [block(0, "1x1", "n1"), block(1, "1x1", "n1"), block(2, "1x2", "n2")],
        frozenset({1}): [block(0, "1x1", "n1"), block(1, "1x1", "n1"), block(2, "1x1", "n2")],
    }[frozenset(guests)]
    site = FreeGpus(Ledger(free), FULL, guests=GuestSizes(asked, frozenset(guests), 1))
    staying = staying_at(blocks, FULL, guests=guests)
    assert moves(blocks, (5, 6, 7), target, site, staying) == expected


@pytest.mark.parametrize(
    ("blocks", "target", "free", "expected"),
    [
        (ONE, 1, {"n1": 3}, Moves()),
        (MIXED, 5, {}, Moves((), (2,))),
        (MIXED, 3, {}, Moves((), (1,))),
        (MIXED, 1, {}, Moves((), (1, 2))),
        # The leader may leave where nothing else makes the size.
        (MIXED, 4, {}, Moves((), (0, 2))),
        (ONE, 2, {"n1": 3}, Moves(added("1x1"))),
        (ONE, 4, {"n1": 3}, Moves(added("1x2", "1x1"))),
        ([block(0, "1x4", "n1")], 12, {"n2": 4, "n3": 4}, Moves(added("2x4"))),
        ([block(0, "1x4", "n1")], 16, {"n2": 4, "n3": 4, "n4": 4}, Moves(added("2x4", "1x4"))),
        # Nothing of it can leave: another block takes its place.
        ([block(0, "1x4", "n1")], 2, {"n2": 2}, Moves(added("1x2"), (0,))),
        ([block(0, "1x4", "n1")], 2, {"n2": 1}, None),
        # One stays, and the other one is replaced.
        ([block(0, "1x4", "n1"), block(1, "1x4", "n2")], 6, {"n3": 2}, Moves(added("1x2"), (1,))),
        # No room beside them: a step on the way.
        ([block(0, "1x4", "n1"), block(1, "1x4", "n2")], 6, {"n3": 1}, Moves((), (1,))),
        (ONE, 3, {"n1": 1}, None),
        (ONE, 3, {}, None),
    ],
)
def test_what_joins_and_leaves(
    blocks: list[RunningBlock], target: int, free: dict[str, int], expected: Moves | None
) -> None:
    """Protects the order: nothing, leave, join, replace, a step, no."""
    assert found(blocks, target, free) == expected


def test_a_job_ends_on_few_nodes() -> None:
    """Protects training from blocks that join wherever one GPU is free: exchange across nodes costs more than others
    that take the place of its own, once."""
    two = [block(0, "1x2", "n1")]
    assert found(two, 4, {"n1": 0, "n2": 4}) == Moves(added("1x4"), (0,))
    assert found(two, 4, {"n1": 0, "n2": 4}, apart=True) == Moves(added("1x2"))
    # Of equal ways the one that replaces least; Slurm fills nodes first.
    assert found([block(0, "1x4", "n1")], 8, {"n2": 4, "n3": 4}) == Moves(added("1x4"))
    assert found(two, 4, {"n1": 2, "n2": 4}) == Moves(added("1x2"))
    # Not enough room for all anew: rather on two nodes than not at all.
    assert found(two, 4, {"n1": 0, "n2": 3}) == Moves(added("1x2"))


def test_only_who_is_to_be_packed_moves_as_it_is() -> None:
    """Protects a job from being moved again and again: with the GPUs that it is to have it stays."""
    spread = [block(0, "1x2", "n1"), block(1, "1x2", "n2")]
    assert found(spread, 4, {"n3": 4}) == Moves()
    assert found(spread, 4, {"n3": 4}, pack=True) == Moves(added("1x4"), (0, 1))
    assert found(spread, 4, {"n3": 3}, pack=True) == Moves()
    assert found([block(0, "1x4", "n1")], 4, {"n3": 4}, pack=True) == Moves()


def test_whole_nodes_are_given_whole() -> None:
    """Part of a node is nothing that Slurm gives there."""
    one = [block(0, "1x4", "n1")]
    assert found(one, 8, {"n2": 4}, whole_nodes=True) == Moves(added("1x4"))
    assert found(one, 6, {"n2": 4}, whole_nodes=True) is None


def test_blocks_that_must_not_share_a_node_do_not() -> None:
    """Slurm chooses the nodes: a block that could come beside one of the job's own is not asked for."""
    assert found(ONE, 2, {"n1": 3, "n2": 4}, split_nodes=False) == Moves(added("1x2"), (0,))
    assert found(ONE, 5, {"n1": 3, "n2": 4}, split_nodes=False) == Moves(added("1x4"))
    assert found(ONE, 4, {"n1": 3, "n2": 4}, split_nodes=False) == Moves(added("1x4"), (0,))
    assert found(ONE, 4, {"n1": 2, "n2": 3}, split_nodes=False) == Moves(added("1x3"))


def test_blocks_that_have_to_go_are_replaced_first() -> None:
    """Also at the same size, the most urgent first, and only where there is room."""
    two = [block(0, "1x4", "n1"), block(1, "1x4", "n2")]
    assert found(two, 8, {"n3": 4}, going=[0]) == Moves(added("1x4"), (0,))
    assert found(two, 8, {"n3": 4}, going=[1, 0]) == Moves(added("1x4"), (1,))
    assert found(two, 8, {"n3": 4, "n4": 4}, going=[1, 0]) == Moves(added("2x4"), (0, 1))
    assert found(two, 8, {}, going=[0]) == Moves()
    assert found(two, 4, {}, going=[0]) == Moves((), (0,))


def test_a_step_does_not_go_below_the_least() -> None:
    """What the owner allows holds on the way as well."""
    two = [block(0, "1x1", "n1"), block(1, "1x4", "n2")]
    assert found(two, 3, {}) == Moves((), (1,))
    assert found(two, 3, {}, least=2) is None


def test_without_spare_tasks_a_job_only_shrinks() -> None:
    """Slurm has no more tasks of this array to start."""
    assert found(ONE, 2, {"n1": 3}, spare=()) is None
    assert found(MIXED, 5, {"n1": 3}, spare=()) == Moves((), (2,))


def test_pieces_are_taken_by_few_blocks() -> None:
    """Protects GPUs from idling where there are as many as a job wants, on more nodes than it has tasks: nodes that are
    free as a whole go into one block, and what no block makes up is left out."""
    pieces = {"n1": 3, "n2": 3, "n3": 4, "n4": 4}
    assert found(ONE, 15, pieces, spare=(6, 7, 8)) == Moves(((6, Shape(2, 4)), (7, Shape(1, 3)), (8, Shape(1, 3))))
    assert found(ONE, 15, pieces, spare=(6, 7)) == Moves(((6, Shape(4, 3)),))
    assert found(ONE, 15, pieces, spare=(6, 7), allows={9, 15}.__contains__) == Moves(((6, Shape(2, 4)),))
    assert found(ONE, 16, pieces, spare=(6, 7)) is None


def test_the_sizes_below() -> None:
    """Every subset, and who stays for it: rather who need not go."""
    assert staying_at(MIXED, FULL) == {0: (), 1: (0,), 2: (2,), 3: (0, 2), 4: (1,), 5: (0, 1), 6: (1, 2), 7: (0, 1, 2)}
    two = [block(0, "1x4", "n1"), block(1, "1x4", "n2")]
    assert staying_at(two, FULL)[4] == (0,) and staying_at(two, FULL, [0])[4] == (1,)


NODES = [f"n{n}" for n in range(6)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[RunningBlock], dict[str, int]]:
    """A job on a cluster of six nodes of four GPUs, and what is free beside it."""
    free = {name: draw(st.integers(0, FULL)) for name in NODES}
    blocks = []
    for task in range(draw(st.integers(1, 4))):
        gpus = draw(st.integers(1, FULL))
        names = [name for name in NODES if free[name] >= gpus]
        nodes = names[: draw(st.integers(1, 2))]
        if nodes:
            for name in nodes:
                free[name] -= gpus
            blocks.append(RunningBlock(task, Shape(len(nodes), gpus), tuple(nodes)))
    return blocks, free


@given(
    job=jobs(),
    target=st.integers(1, 24),
    split=st.booleans(),
    spare=st.lists(st.integers(10, 20), unique=True, max_size=6),
    going=st.lists(st.integers(0, 3), unique=True, max_size=2),
    least=st.integers(1, 4),
)
def test_steps_lead_to_the_size_or_stop(
    job: tuple[list[RunningBlock], dict[str, int]],
    target: int,
    split: bool,
    spare: list[int],
    going: list[int],
    least: int,
) -> None:
    """At every moment more than nothing and no more than wanted; only what is free, and each task once."""
    blocks, free = job
    was = sum(one.shape.gpus for one in blocks)
    for step in range(8):
        site, staying = FreeGpus(Ledger(free), FULL, split_nodes=split), staying_at(blocks, FULL, going)
        made = moves(blocks, spare, target, site, staying, going=going, least=least)
        if not made:
            assert made is None or was == target
            return
        tasks = [one.task for one in blocks]
        joining = [task for task, _ in made.added]
        assert set(made.dropped) <= set(tasks) and set(joining) <= set(spare) and len({*joining}) == len(joining)
        room = Ledger(free)
        assert all(room.take(shape) for _, shape in made.added), "takes more than is free"
        now = was + made.gained - sum(one.shape.gpus for one in blocks if one.task in made.dropped)
        assert 0 < now <= target
        on_the_way = was < now < target <= was + sum(free.values()) and not made.dropped
        assert now == target or on_the_way or (now >= least and not made.added and was > target)
        # Slurm places the new ones, those that left are gone.
        for one in blocks:
            if one.task in made.dropped:
                room.give(dict.fromkeys(one.nodes, one.shape.gpus_per_node))
        blocks = [one for one in blocks if one.task not in made.dropped]
        for task, shape in made.added:
            names = sorted((name for name in free if free[name] >= shape.gpus_per_node), key=lambda n: (free[n], n))
            for name in names[: shape.nodes]:
                free[name] -= shape.gpus_per_node
            blocks.append(RunningBlock(task, shape, tuple(names[: shape.nodes])))
        spare = [task for task in spare if task not in joining]
        free, was, going = dict(room), now, []
        assert step < 7, "does not come to an end"

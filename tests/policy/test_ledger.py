"""The ledger of free GPUs: its scalar and its batched form agree, with each other and with a count by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.policy.contract import Ints
from slurm_ones.policy.ledger import (
    Ledger,
    Resources,
    count_nodes,
    free_by_node,
    held_gpus,
    parts_that_fit,
    pick_nodes,
    take_parts,
)
from slurm_ones.testing.rounds import Round, cluster, job, rounds

PER_NODE = 8
free_gpus = st.lists(st.integers(0, PER_NODE), min_size=1, max_size=8)


def ledger(free: list[int]) -> Ledger:
    return Ledger({f"n{i:02}": gpus for i, gpus in enumerate(free)})


def counts(one: Ledger, per_node: int = PER_NODE) -> list[int]:
    """Nodes by their free GPUs."""
    assert sum(one.values()) == one.gpus
    found: list[int] = np.bincount([*one.values()], minlength=per_node + 1).tolist()
    return found


def batched(*ledgers: Ledger) -> Ints:
    return np.array([counts(one) for one in ledgers])


@given(
    st.lists(free_gpus, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, PER_NODE), st.integers(0, 9)), max_size=5),
)
def test_many_at_once_take_what_one_after_another_takes(frees: list[list[int]], takes: list[tuple[int, int]]) -> None:
    """Whatever was taken before, parts of one size find room as often, on the same nodes, and leave the same."""
    ledgers = [ledger(free) for free in frees]
    nodes = batched(*ledgers)
    for number, (size, parts) in enumerate(takes):
        wanted = np.array([max(parts - k - number, 0) for k in range(len(ledgers))])
        room = parts_that_fit(nodes, size)
        missing = take_parts(nodes, size, wanted)
        taken = [
            sum(one.take(Shape(1, size)) for _ in range(count)) for one, count in zip(ledgers, wanted, strict=True)
        ]
        assert missing.tolist() == (wanted - taken).tolist()
        assert taken == np.minimum(room, wanted).tolist()
        assert (nodes == batched(*ledgers)).all()
        assert (nodes @ np.arange(PER_NODE + 1)).tolist() == [one.gpus for one in ledgers]


@given(free_gpus, st.integers(1, 5), st.integers(1, PER_NODE))
def test_a_shape_takes_the_fullest_nodes_that_have_room(free: list[int], count: int, gpus: int) -> None:
    """Counted by hand, node by node, and by `pick_nodes` where nobody has claimed anything; else nothing changes."""
    shape, one, by_node = Shape(count, gpus), ledger(free), np.array(free)
    left, chosen = sorted(free), pick_nodes(by_node, np.zeros_like(by_node), shape)
    roomy = [n for n in left if n >= gpus][:count]
    assert one.fits(shape) == one.take(shape) == (len(roomy) == count) == bool(len(chosen))
    if len(chosen):
        assert sorted(by_node[chosen].tolist()) == roomy
        by_node[chosen] -= gpus
    assert [*one.values()] == (by_node if len(chosen) else np.array(free)).tolist()


@given(free_gpus, st.integers(0, 70))
def test_any_gpus_are_taken_from_the_fullest_nodes(free: list[int], gpus: int) -> None:
    """One by one from those that have fewest left; nothing changes where there are too few."""
    one, left = ledger(free), sorted(free)
    assert one.take_any(gpus) == (gpus <= sum(free))
    for _ in range(gpus if gpus <= sum(free) else 0):
        first = next(n for n, room in enumerate(left) if room)
        left[first] -= 1
    assert counts(one) == np.bincount(left, minlength=PER_NODE + 1).tolist()


def test_claimed_gpus_are_taken_last() -> None:
    """Of two nodes with room the one that nobody has claimed is taken, though more is left over there."""
    free, claimed = np.array([2, 4, 4]), np.array([1, 0, 2])
    assert pick_nodes(free, claimed, Shape(1, 2)).tolist() == [2]
    assert pick_nodes(free, claimed, Shape(2, 2)).tolist() == [2, 1]
    assert pick_nodes(free, claimed, Shape(1, 4)).tolist() == [1]
    assert not len(pick_nodes(free, claimed, Shape(4, 1)))


@given(rounds(), st.randoms(use_true_random=False))
def test_unchanged_jobs_keep_what_they_hold(drawn: Round, dice: object) -> None:
    """For any jobs that stay, the batched ledger of a candidate is the scalar one beside them."""
    view, jobs = drawn
    running = [j for j in jobs if j.nodes]
    unchanged = np.array([[dice.random() < 0.5 for _ in running] for _ in range(3)], dtype=np.bool_)  # type: ignore[attr-defined]
    held_by, node, gpus = held_gpus(view, running).T
    found = count_nodes(free_by_node(view), node, gpus, unchanged[:, held_by], view.gpus_per_node)
    for row, stays in zip(found, unchanged.reshape(3, -1), strict=True):
        one = Ledger.of_cluster(view, [j for j, stay in zip(running, stays, strict=True) if stay])
        assert row.tolist() == counts(one, view.gpus_per_node)


def test_a_trial_is_its_own() -> None:
    """What is tried leaves the ledger as it was, and the other way round; nodes that are gone or overbooked count for
    nothing."""
    one = Ledger.of_cluster(cluster(2, 4), [job(1, {"n1": 3}), job(2, {"n9": 4}), job(3, {"n2": 5})])
    assert (one, one.gpus) == ({"n1": 1, "n2": 0}, 1)
    trial = one.trial()
    assert trial.take(Shape(1, 1)) and (one, trial) == ({"n1": 1, "n2": 0}, {"n1": 0, "n2": 0})
    other = one.trial()
    one.give({"n2": 4, "gone": 4})
    assert (one, one.gpus, other) == ({"n1": 1, "n2": 4}, 5, {"n1": 1, "n2": 0})
    assert one.at_most(other) == other and one.only({"n2"}) == {"n2": 4}


@pytest.mark.parametrize(
    ("free", "shape", "own", "only", "left"),
    [
        ({"n1": 4, "n2": 2, "n3": 2}, "2x2", {}, None, {"n1": 4, "n2": 0, "n3": 0}),
        ({"n1": 4, "n2": 2}, "1x2", {}, {"n1"}, {"n1": 2, "n2": 2}),
        ({"n1": 4, "n2": 2}, "2x2", {}, {"n1"}, None),
        # Its own GPUs are room for it, and nobody else's until it has left them.
        ({"n1": 0, "n2": 1}, "1x2", {"n1": 2}, None, {"n1": 0, "n2": 1}),
        ({"n1": 0, "n2": 1}, "2x2", {"n1": 2, "n2": 1}, None, {"n1": 0, "n2": 0}),
        ({"n1": 3}, "1x4", {"n1": 2}, None, {"n1": 1}),
        ({"n1": 0}, "1x2", {"n9": 2}, None, {"n1": 0, "n9": 0}),
    ],
)
def test_own_gpus_and_named_nodes(
    free: dict[str, int], shape: str, own: dict[str, int], only: set[str] | None, left: dict[str, int] | None
) -> None:
    """The fullest nodes first, among those that the job may have."""
    one = Ledger(free)
    assert one.take(Shape.parse(shape), own, only) is (left is not None)
    assert one == (free if left is None else left)


def test_every_resource_counts() -> None:
    """A node without CPUs gives no GPUs."""
    one = Ledger({"n1": Resources(4, 0), "n2": Resources(4, 8, 100)})
    need = Resources(2, 4, 50)
    assert [free.cover(need) for free in (Resources(4, 0), Resources(4, 8, 100), Resources(4, 4, 49))] == [0, 1, 0]
    assert Resources(4, 8, 100).without(need) == Resources(2, 4, 50)
    assert one.take(Shape(2, 4)) and one == {"n1": 0, "n2": 0}


def test_where_shapes_may_be_spread_gpus_are_all_that_counts() -> None:
    """Six GPUs of two nodes are given as one shape."""
    one = Ledger.of_cluster(cluster(2, 4, uniform=False))
    assert one.take(Shape(1, 6)) and one.gpus == 2
    assert not one.fits(Shape(1, 3))

"""The ledger of free GPUs: its scalar and its batched form agree, with each other and with a count by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.schedule.ledger import (
    Ledger,
    count_nodes,
    free_by_node,
    held_gpus,
    parts_that_fit,
    pick_nodes,
    take_parts,
)
from slurm_ones.schedule.policy import Ints
from slurm_ones.testing.rounds import Round, cluster, job, rounds

PER_NODE = 8
free_gpus = st.lists(st.integers(0, PER_NODE), min_size=1, max_size=8)


def ledger(free: list[int]) -> Ledger:
    return Ledger(cluster(len(free), PER_NODE, free=free))


def batched(*ledgers: Ledger) -> Ints:
    return np.array([one.nodes for one in ledgers])


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
    assert one.nodes == np.bincount(by_node, minlength=PER_NODE + 1).tolist()
    assert one.gpus == by_node.sum()


@given(free_gpus, st.integers(0, 70))
def test_any_gpus_are_taken_from_the_fullest_nodes(free: list[int], gpus: int) -> None:
    """One by one from those that have fewest left; nothing changes where there are too few."""
    one, left = ledger(free), sorted(free)
    assert one.take_any(gpus) == (gpus <= sum(free))
    for _ in range(gpus if gpus <= sum(free) else 0):
        first = next(n for n, room in enumerate(left) if room)
        left[first] -= 1
    assert one.nodes == np.bincount(left, minlength=PER_NODE + 1).tolist()
    assert one.gpus == sum(left)


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
        one = Ledger(view, [j for j, stay in zip(running, stays, strict=True) if stay])
        assert row.tolist() == one.nodes


def test_a_copy_is_its_own() -> None:
    """What is tried on a copy leaves the ledger as it was; nodes that are gone or overbooked count for nothing."""
    one = Ledger(cluster(2, 4), [job(1, {"n1": 3}), job(2, {"n9": 4}), job(3, {"n2": 5})])
    assert (one.nodes, one.gpus) == ([1, 1, 0, 0, 0], 1)
    assert one.copy().take(Shape(1, 1))
    assert one.gpus == 1


def test_where_shapes_may_be_spread_gpus_are_all_that_counts() -> None:
    """Six GPUs of two nodes are given as one shape."""
    one = Ledger(cluster(2, 4, uniform=False))
    assert one.take(Shape(1, 6)) and one.gpus == 2
    assert not one.fits(Shape(1, 3))

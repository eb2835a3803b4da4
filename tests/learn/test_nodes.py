"""Slow nodes in what is learned: found where several owners' jobs show them, and by no single one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import JobHistory, PlacedPoint
from ones_wrapper.protocol import Spec
from slurm_ones.learn.nodes import RECENT_S, SLOW, SLOWEST, slow_nodes
from tests.learn.test_knowledge import history

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
NOW = 1e6

Told = tuple[tuple[str, ...], float]
"""Nodes of a run, and its samples/s."""


def ran(job_id: int, user: str, *runs: Told, dataset: int = 1000, at: float = NOW) -> JobHistory:
    """A job whose runs measured these speeds on these nodes, at four GPUs each and one batch."""
    placed = tuple(PlacedPoint(i, names, 4, 256, speed, at) for i, (names, speed) in enumerate(runs))
    told = replace(history(job_id, 4), placed=placed, spec=Spec(32, 256, 64, dataset, 10))
    return replace(told, job=replace(told.job, user=user))


def found(*jobs: JobHistory, now: float = NOW) -> list[str]:
    return list(slow_nodes(jobs, now))


def test_two_owners_show_a_slow_node() -> None:
    """Each with a run on it and one elsewhere; a doubt stays, so that it is taken for less slow than was measured."""
    alice = ran(1, "alice", (("n1",), 50.0), (("n2",), 100.0))
    bob = [ran(2, "bob", (("n1",), 250.0), dataset=77), ran(3, "bob", (("n3",), 500.0), dataset=77)]
    (node,) = slow_nodes([alice, *bob], NOW).values()
    assert (node.name, node.runs, node.owners) == ("n1", 2, 2)
    assert 0.5 < node.factor < 0.7 and 0.0 < node.doubt < 0.1
    more = [ran(10 + i, user, (("n1",), 50.0), (("n2",), 100.0)) for i in range(9) for user in ("alice", "bob", "eve")]
    (sure,) = slow_nodes(more, NOW).values()
    assert sure.factor == pytest.approx(0.5, abs=0.02) and sure.doubt < node.doubt


def test_one_owner_shows_nothing_beside_others() -> None:
    """However many jobs they run; where all jobs are of one owner, two of them do."""
    liar = [ran(i, "liar", (("n1",), 1.0), (("n2",), 1000.0)) for i in range(20)]
    assert found(*liar[:1]) == [] and found(*liar[:2]) == ["n1"]
    assert found(*liar, ran(50, "bob", (("n2",), 100.0), (("n3",), 100.0))) == []
    assert found(*liar, ran(51, "bob", (("n1",), 100.0), (("n3",), 100.0))) == []


def test_what_cannot_be_compared_tells_nothing() -> None:
    """Other scripts, sizes or batches, measurements of long ago, and a node on which alone a script ran."""
    users = ("alice", "bob")
    assert found(*(ran(i, user, (("n1",), 50.0)) for i, user in enumerate(users))) == []
    apart = [ran(i, users[i % 2], ((f"n{1 + i // 2}",), 50.0 + 50.0 * (i // 2)), dataset=9 + i // 2) for i in range(4)]
    assert found(*apart) == []
    sizes = [ran(i, user, (("n1",), 50.0), (("n2", "n3"), 100.0)) for i, user in enumerate(users)]
    assert found(*sizes) == []
    old = [ran(i, user, (("n1",), 50.0), (("n2",), 100.0)) for i, user in enumerate(users)]
    more = ran(5, "carol", (("n3",), 1.0), (("n4",), 1.0))
    assert found(*old, more) == ["n1"] and found(*old, more, now=NOW + 1.1 * RECENT_S) == []


def test_a_run_on_several_nodes_blames_its_slowest() -> None:
    """The others that ran with it are not called slow, though every run of theirs was."""
    jobs = [
        ran(i, user, (("n1", "n2"), 50.0), (("n1", "n3"), 50.0), (("n2", "n4"), 100.0), (("n3", "n4"), 100.0))
        for i, user in enumerate(("alice", "bob", "carol"))
    ]
    assert found(*jobs) == ["n1"]
    alone = [ran(9 + i, user, (("n1", "n5"), 50.0), (("n2", "n4"), 100.0)) for i, user in enumerate(("alice", "bob"))]
    assert "n5" not in found(*jobs, *alone)


def test_two_slow_nodes_are_both_found() -> None:
    jobs = [
        ran(i, user, *(((name,), 100.0 * speed) for name, speed in zip(NODES, (0.4, 0.6, 1, 1, 1, 1), strict=True)))
        for i, user in enumerate(("alice", "bob", "carol"))
    ]
    slow = slow_nodes(jobs, NOW)
    assert list(slow) == ["n1", "n2"] and slow["n1"].factor < slow["n2"].factor < SLOW


@pytest.mark.parametrize(("noise", "slow"), [(0.05, ["n1", "n2"]), (0.2, [])])
def test_noise_is_not_taken_for_slow_nodes(noise: float, slow: list[str]) -> None:
    """Of 60 jobs of five owners: two slow nodes are found though runs are 5 % apart, and where there is
    none no node is, though runs are 20 % apart."""
    missed, wrong = 0, 0
    for seed in range(10):
        draw = random.Random(seed)

        def run(draw: random.Random = draw) -> Told:
            names = tuple(draw.sample([f"n{i}" for i in range(1, 17)], draw.choice([1, 1, 2, 4])))
            return names, (60.0 if {*names} & {*slow} else 100.0) * draw.lognormvariate(0.0, noise)

        told = found(*(ran(i, f"u{i % 5}", *(run() for _ in range(2)), dataset=i % 2) for i in range(60)))
        missed, wrong = missed + len({*slow} - {*told}), wrong + len({*told} - {*slow})
    assert missed <= 1 and wrong <= 1


speeds = st.floats(1e-6, 1e9)
node_sets = st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True).map(tuple)
claims = st.lists(st.tuples(node_sets, speeds), max_size=8)


def honest(noise: Sequence[float]) -> list[JobHistory]:
    """Jobs of three owners on nodes that are all alike, each 5 % off at most."""
    users = ("alice", "bob", "carol")
    return [
        ran(i, user, *(((name,), 100.0 * noise[6 * i + n]) for n, name in enumerate(NODES)))
        for i, user in enumerate(users)
    ]


@given(st.lists(st.floats(0.95, 1.05), min_size=18, max_size=18), st.lists(claims, max_size=4), st.integers(1, 3))
def test_one_liar_condemns_no_node(noise: list[float], lies: list[list[Told]], owners: int) -> None:
    lied = [ran(100 + i, "liar", *claim) for i, claim in enumerate(lies)]
    assert found(*honest(noise)[:owners], *lied) == []


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), claims), max_size=6), st.randoms(use_true_random=False))
def test_whatever_is_reported(told: list[tuple[str, list[Told]]], draw: random.Random) -> None:
    """Factors are bounded, not all nodes are slow, order and units of a script do not matter."""
    jobs = [ran(i, user, *claim) for i, (user, claim) in enumerate(told)]
    slow = slow_nodes(jobs, NOW)
    assert len(slow) <= 2
    assert all(SLOWEST <= node.factor <= SLOW and node.doubt > 0 and node.runs >= 2 for node in slow.values())
    draw.shuffle(jobs)
    assert slow_nodes(jobs, NOW) == slow
    for speed in (float("nan"), float("inf"), 0.0, -1.0):
        assert slow_nodes([*jobs, ran(99, "a", (("n1",), speed))], NOW) == slow

"""Which nodes a job gets: below one leaf switch, where the fewest jobs meet, and not on slow nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.schedule.places import Move, Places, choose_nodes, matters
from slurm_ones.schedule.policy import Allocation, ClusterView, JobView, NodeView
from slurm_ones.testing.rounds import job

ALWAYS = Move(30.0, 1e6)


def leaves(
    count: int = 2, nodes: int = 2, gpus: int = 4, *, uniform: bool = True, slow: Mapping[str, float] = {}
) -> ClusterView:
    """`count` leaf switches with `nodes` each: n1 and n2, then n3 and n4, …, tapered 3:1."""
    names = [f"n{i + 1}" for i in range(count * nodes)]
    views = tuple(
        NodeView(name, gpus, leaf=f"s{i // nodes + 1}", speed=slow.get(name, 1.0)) for i, name in enumerate(names)
    )
    return ClusterView(views, node_gpus=gpus, uniform=uniform, taper=3.0)


def chosen(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    wanted: Mapping[int, Shape],
    *,
    share: float = 0.3,
    moves: Mapping[int, Move] = {},
) -> dict[int, tuple[str, ...]]:
    allocations = {i: Allocation(shape, 64) for i, shape in wanted.items()}
    return choose_nodes(cluster, jobs, (), allocations, dict.fromkeys(wanted, share), moves)


@pytest.mark.parametrize("uniform", [True, False])
def test_a_job_goes_below_one_leaf_switch(uniform: bool) -> None:
    """Also where the nodes that come first have room, and are below two."""
    cluster = leaves(uniform=uniform)
    small = job(1, {"n1": 4})
    shape = Shape(2, 4) if uniform else Shape(1, 8)
    found = chosen(cluster, [small, job(2)], {1: Shape(1, 4), 2: shape})
    assert set(found[2]) == {"n3", "n4"}
    assert 1 not in found, "what keeps its size stays"


def test_a_small_job_leaves_whole_leaf_switches_to_large_ones() -> None:
    cluster = leaves()
    found = chosen(cluster, [job(1, {"n3": 2}), job(2)], {1: Shape(1, 2), 2: Shape(1, 4)})
    assert found[2] == ("n4",)
    found = chosen(cluster, [job(1, {"n3": 2}), job(2)], {1: Shape(1, 2), 2: Shape(1, 2)})
    assert found[2] == ("n3",), "and whole nodes"


def test_across_leaf_switches_it_goes_where_the_fewest_meet() -> None:
    """Of four leaf switches with one node free each, two have a job across them already."""
    cluster = leaves(4)
    across = job(1, {"n1": 4, "n3": 4})
    rest = [job(2, {"n5": 4}), job(3, {"n7": 4})]
    wanted = {1: Shape(2, 4), 2: Shape(1, 4), 3: Shape(1, 4), 4: Shape(2, 4)}
    assert set(chosen(cluster, [across, *rest, job(4)], wanted)[4]) == {"n6", "n8"}


def test_a_slow_node_is_avoided_as_long_as_another_leaf_switch_is_no_worse() -> None:
    """Half the speed is worse than a link used alone; 0.95 of it is not."""
    busy = job(1, {"n4": 4})
    for speed, wanted in ((0.5, {"n1", "n3"}), (0.95, {"n1", "n2"})):
        cluster = leaves(slow={"n2": speed})
        assert set(chosen(cluster, [busy, job(2)], {1: Shape(1, 4), 2: Shape(2, 4)}, share=0.2)[2]) == wanted


def test_a_job_that_grows_keeps_its_nodes_where_these_are_as_good() -> None:
    cluster = leaves(2, 3)
    found = chosen(cluster, [job(1, {"n5": 4})], {1: Shape(2, 4)})
    assert "n5" in found[1] and set(found[1]) <= {"n4", "n5", "n6"}


def test_a_job_moves_only_where_that_repays() -> None:
    """Its links cost 0.3 of its steps two more of their length; a pause of 30 s repays in 80 s and not in 60."""
    cluster, apart = leaves(), job(1, {"n1": 4, "n3": 4})
    for lasts, moved in ((60.0, False), (100.0, True)):
        found = chosen(cluster, [apart], {1: Shape(2, 4)}, moves={1: Move(30.0, lasts)})
        assert (1 in found) == moved
    assert set(found[1]) in ({"n1", "n2"}, {"n3", "n4"})
    assert not choose_nodes(cluster, [apart], [1], {1: Allocation(Shape(2, 4), 64)}, {1: 0.3}, {1: ALWAYS}), "fixed"


def test_nothing_is_chosen_where_nodes_are_alike() -> None:
    assert not matters(replace(leaves(), taper=1.0)) and not matters(leaves(1)) and matters(leaves())
    assert matters(leaves(1, slow={"n1": 0.9}))


@given(
    held=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=6),
    wanted=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    uniform=st.booleans(),
)
def test_no_gpu_is_given_twice(held: list[tuple[int, int]], wanted: list[int], uniform: bool) -> None:
    """Whatever is held and wanted: what is chosen has room, and who keeps its place keeps its GPUs."""
    cluster = leaves(4, uniform=uniform)
    jobs, used = list[JobView](), Counter[str]()
    for node, gpus in held:
        if used[f"n{node + 1}"] + gpus <= 4:
            used[f"n{node + 1}"] += gpus
            jobs.append(job(len(jobs) + 1, {f"n{node + 1}": gpus}))
    stays = {one.job_id: one.shape for one in jobs if one.shape is not None}
    shapes = [Shape(n // 4 or 1, 4 if n >= 4 else n) if uniform else Shape(1, n) for n in wanted]
    new = {100 + i: shape for i, shape in enumerate(shapes)}
    found = chosen(cluster, [*jobs, *(job(i) for i in new)], {**stays, **new}, moves=dict.fromkeys(stays, ALWAYS))
    moved = [one for one in jobs if one.job_id not in found]
    places = Places(cluster, moved)
    for i, names in found.items():
        shape = new.get(i) or stays[i]
        at = np.array([places.names.index(name) for name in names])
        assert len(set(names)) == len(names)
        if uniform:
            assert len(at) == shape.nodes and (places.free[at] >= shape.gpus_per_node).all()
            places.free[at] -= shape.gpus_per_node
        else:
            left = shape.gpus
            for n in at:
                taken = min(left, int(places.free[n]))
                places.free[n] -= taken
                left -= taken
            assert not left
    assert (places.free >= 0).all()

"""Shapes, counts and batches that every policy shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.policy.contract import Limits
from slurm_ones.policy.shapes import nodes_of, scaled_batch, shape_of, valid_counts
from slurm_ones.testing.rounds import cluster


def test_counts_are_powers_of_two_and_then_whole_nodes() -> None:
    """What a job is offered on usual, odd and whole-node clusters."""
    assert valid_counts(cluster(4, 4)) == (1, 2, 4, 8, 12, 16)
    assert valid_counts(cluster(6, 4)) == (1, 2, 4, 8, 12, 16, 20, 24)
    assert valid_counts(cluster(2, 3)) == (1, 2, 3, 6)
    assert valid_counts(cluster(4, 4, whole=True)) == (4, 8, 12, 16)
    assert valid_counts(cluster(4, 1, whole=True), 2, 3) == (2, 3)
    assert valid_counts(cluster(0)) == ()


def test_counts_of_large_clusters_grow_by_factors() -> None:
    """A size table of a thousand nodes stays short, and has every small size and the largest."""
    nodes = [n // 4 for n in valid_counts(cluster(1000, 4)) if n >= 4]
    assert nodes[:16] == list(range(1, 17))
    assert nodes[-1] == 1000
    assert len(nodes) < 50


def test_where_shapes_need_not_be_uniform_every_count_has_one() -> None:
    """Published simulators spread a job's GPUs in any way."""
    view = cluster(4, 4, uniform=False)
    assert valid_counts(view, 2, 7) == (2, 3, 4, 5, 6, 7)
    assert shape_of(view, 6) == Shape(1, 6)
    assert shape_of(view, 17) is None
    assert [nodes_of(view, n) for n in (1, 4, 5, 16)] == [1, 1, 2, 4]


def test_counts_do_not_follow_what_is_free() -> None:
    """Rigid jobs that come and go must not make a job's sizes, and with them its batch, flutter."""
    assert valid_counts(cluster(2, 4, free=(1, 0))) == valid_counts(cluster(2, 4))


def test_shapes() -> None:
    """Part of a node or whole nodes, never more nodes than there are."""
    view = cluster(4, 4)
    assert [shape_of(view, n) for n in (1, 3, 4, 8, 16)] == [
        Shape(1, 1),
        Shape(1, 3),
        Shape(1, 4),
        Shape(2, 4),
        Shape(4, 4),
    ]
    assert [shape_of(view, n) for n in (0, 6, 20)] == [None] * 3
    assert shape_of(cluster(4, 4, whole=True), 2) is None


def test_batch_follows_the_gpus() -> None:
    """Linear from the smallest size, to the limits, in multiples of the quantum."""
    limits = Limits((1, 2, 4, 8), 64, 300, 128, quantum=8)
    assert [scaled_batch(limits, 64, 1, n) for n in (1, 2, 4, 8)] == [64, 128, 256, 296]
    assert scaled_batch(limits, 64, 2, 2) == 64
    assert scaled_batch(limits, 300, 1, 1) == 128, "no more than fits on the GPU"


def test_a_fixed_batch_stays_or_the_size_is_not_valid() -> None:
    """`batch=N`: N at every size that can hold it and has a sample a GPU, also where N is no multiple of the
    quantum.
    """
    limits = Limits((1, 2, 4), 100, 100, 64, quantum=8)
    assert [scaled_batch(limits, 100, 1, n) for n in (1, 2, 4, 128)] == [None, 100, 100, None]


@given(
    st.integers(1, 500),
    st.integers(0, 4000),
    st.integers(1, 600),
    st.integers(1, 50),
    st.integers(1, 5000),
    st.integers(1, 64),
)
def test_batches_keep_the_limits(least: int, more: int, local: int, quantum: int, base: int, gpus: int) -> None:
    """Whatever the limits, a batch is within them or the size is refused."""
    limits = Limits((1,), least, least + more, local, quantum)
    batch = scaled_batch(limits, base, 1, gpus)
    if batch is not None:
        assert max(least, gpus) <= batch <= min(least + more, local * gpus)
        assert batch % quantum == 0 or more == 0


@pytest.mark.parametrize("nodes", [1, 2, 5, 7])
@pytest.mark.parametrize("whole", [False, True])
def test_every_count_has_a_shape(nodes: int, whole: bool) -> None:
    """No count is offered that Slurm cannot be asked for."""
    view = cluster(nodes, 6, whole=whole)
    counts = valid_counts(view)
    assert counts[-1] == 6 * nodes
    assert all((shape := shape_of(view, n)) is not None and shape.gpus == n for n in counts)

"""Optimus-2D against the dense model in double precision, on real gloo ranks: those of one mesh of 1 × 1, 2 × 2 or
3 × 3, or of replicas of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ones_wrapper.protocol import Spec
from ones_wrapper.strategies.optimus import Optimus2D
from ones_wrapper.strategies.optimus.costs import MeshTransformer
from tests.marks import nightly
from tests.wrapper.conftest import Teams
from tests.wrapper.forked import Team
from tests.wrapper.layouts import mesh_ranks as ranks

SIZES: dict[str, int] = {"hidden": 72, "heads": 12, "vocab": 720}
SHAPE = {1: (6, 64, 48, 4), 2: (6, 64, 48, 4), 3: (6, 128, 72, 9)}
"""By q: samples, length, hidden and heads of a block that is measured."""


MeshesOf = Callable[..., Team]
by_day_one_side = pytest.mark.parametrize("q", [nightly(1), 2, nightly(3)])


@pytest.fixture(scope="module")
def meshes_of() -> Iterator[MeshesOf]:
    """The ranks of one mesh of a side, or of several replicas."""
    teams = Teams()
    yield lambda q, replicas=1: teams[q * q * replicas]
    teams.close()


@pytest.mark.slow
@pytest.mark.parametrize(("q", "samples"), [nightly(1, 2), (2, 5), nightly(2, 1), nightly(3, 7)])
def test_a_model_trains_as_the_dense_one(meshes_of: MeshesOf, q: int, samples: int) -> None:
    """Initial parameters, logits, loss and gradients of two steps, and the parameters after them; with rows of
    unequally many samples or none, and tokens that do not count."""
    for worst in meshes_of(q).run(ranks.training, q, samples):
        assert worst["start"] == 0
        assert max(worst.values()) < 1e-11, worst


@pytest.mark.slow
@by_day_one_side
def test_sums_of_numbers_in_half_precision_are_whole(meshes_of: MeshesOf, q: int) -> None:
    """Protects training in bfloat16: a loss, a count of tokens or a mean would keep three digits."""
    for found in meshes_of(q).run(ranks.in_bfloat16, q):
        assert found["loss"] < 1e-5
        assert max(found["gradient"], found["norm"]) < 0.003, found


@pytest.mark.slow
@by_day_one_side
def test_autocast_computes_in_half_precision_as_it_does_for_the_dense_one(meshes_of: MeshesOf, q: int) -> None:
    """Found on a GPU: the backward pass met products of two types."""
    for of_loss, of_gradients in meshes_of(q).run(ranks.by_autocast, q):
        assert of_loss < 1e-3
        assert of_gradients < 0.02


@pytest.mark.slow
@by_day_one_side
def test_layers_never_wait_for_the_gpu(meshes_of: MeshesOf, q: int) -> None:
    meshes_of(q).run(ranks.without_waits, q)


@pytest.mark.slow
@by_day_one_side
def test_an_output_layer_may_be_the_embedding(meshes_of: MeshesOf, q: int) -> None:
    assert max(meshes_of(q).run(ranks.tied, q)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "sizes"),
    [
        nightly(1, [[2, 1], [1, 1], [0, 1], [3, 2], [1, 0], [1, 1], [1, 1], [1, 1]]),
        (2, [[4, 3], [1, 0]]),
        nightly(3, [[5, 4]]),
    ],
)
def test_gradients_are_the_mean_over_the_samples_of_all_replicas(
    meshes_of: MeshesOf, q: int, sizes: list[list[int]]
) -> None:
    """Replicas and passes of unequal size; all replicas take the first one's parameters."""
    assert max(meshes_of(q, len(sizes)).run(ranks.exchanged, q, sizes)) < 1e-12


def test_what_is_not_of_the_mesh_is_refused(meshes_of: MeshesOf) -> None:
    for said in meshes_of(2).run(ranks.refused, 2):
        assert said == [
            "optimus2d: 0.weight is no block on the mesh, so the ranks would train it apart; make its layer by the "
            "strategy: strategy.linear, strategy.layer_norm, strategy.embedding, …",
            "optimus2d: static_graph cannot be given to job.ddp; bucket_mb can",
        ]


def test_replicas_with_other_models_are_refused(meshes_of: MeshesOf) -> None:
    """Rather than that they wait for each other."""
    for said in meshes_of(2, 2).run(ranks.unlike, 2):
        assert "another model than rank" in said and "(8, 8)" in said and "(16, 8)" in said


@pytest.mark.slow
@pytest.mark.nightly
def test_a_checkpoint_loads_at_any_mesh(meshes_of: MeshesOf, tmp_path: Path) -> None:
    """Parameters and moments bit for bit, from two replicas of 2 × 2 into 8 of 1 × 1, 3 × 3, 2 × 2, an ordinary
    model, and one that torch has cut over 2 × 3; training goes on the same way."""
    before = meshes_of(2, 2).run(ranks.saved, 2, tmp_path)[0]
    afterwards = []
    for q, replicas in ((1, 8), (2, 2), (3, 1)):
        there, after = meshes_of(q, replicas).run(ranks.loaded, q, tmp_path)[0]
        assert all(torch.equal(one, other) for one, other in zip(before, there, strict=True))
        afterwards.append(after)
    for after in afterwards[1:]:
        assert max(map(ranks.apart, afterwards[0], after)) < 1e-11
    dense = meshes_of(2, 2).run(ranks.into_dense, tmp_path)[0]
    assert all(torch.equal(one, other) for one, other in zip(before, dense, strict=False))
    with closing(Team(6)) as six:
        oblong = six.run(ranks.into_oblong, (2, 3), tmp_path)[0]
    assert all(torch.equal(one, other) for one, other in zip(before, oblong, strict=True))


@by_day_one_side
def test_a_rank_keeps_its_part_of_the_activations(meshes_of: MeshesOf, q: int) -> None:
    """As the formula says, which is 1/q² of the dense block's within 2 %."""
    samples, length, hidden, heads = SHAPE[q]
    sizes = MeshTransformer(hidden, heads, 1, 1, length)
    dense = 4 * samples * sizes.saved(1)
    for kept in meshes_of(q).run(ranks.kept_bytes, q, *SHAPE[q]):
        assert kept == 4 * samples * sizes.saved(q)
        assert kept == pytest.approx(float(dense / q**2), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("q", [2, nightly(3)])
def test_a_rank_sends_what_the_formula_says(meshes_of: MeshesOf, q: int) -> None:
    """And beside it torch's own tensor parallelism over as many ranks, whose volume hardly falls with them."""
    samples, length, hidden, heads = SHAPE[q]
    tokens, matrices, vectors, share = samples * length, 12 * hidden**2, 13 * hidden, (q - 1) / q**2
    expected = 3 * share * (7 * tokens * hidden + matrices) + 2 * share * (8 * tokens + vectors)
    for sent in meshes_of(q).run(ranks.sent_on_mesh, q, *SHAPE[q]):
        assert sent == pytest.approx(4 * expected, abs=100)  # each message is rounded to bytes
    # The samples of whole batches are counted by row, so the formula by sample agrees.
    model = MeshTransformer(hidden, heads, 1, 1, length)
    outside = MeshTransformer(hidden, heads, 1, 0, length)
    inside = samples * (model.sample_wire(q) - outside.sample_wire(q)) + model.pass_wire(q) - outside.pass_wire(q)
    assert float(inside) == pytest.approx(expected)
    if q == 3:
        for sent in meshes_of(q).run(ranks.sent_by_megatron, q * q, *SHAPE[q]):
            assert sent == pytest.approx(4 * 8 * (1 - 1 / q**2) * tokens * hidden)
            assert 4 * expected < 0.8 * sent


def limits(most: int = 20, ranks_per_node: int = 4, **arguments: Any) -> Any:
    return Optimus2D(**{**SIZES, **arguments}).limits(Spec(64, 64, 64, 1, 0), most, ranks_per_node)


def test_the_numbers_of_gpus_that_make_meshes() -> None:
    """The largest mesh that divides the GPUs; the rest is data parallel."""
    assert [(row.gpus, row.replicas, row.quantum, row.together) for row in limits(q=(2, 3)).sizes] == [
        (4, 1, 2, 4),
        (8, 2, 4, 4),
        (9, 1, 3, 9),
        (12, 3, 6, 4),
        (16, 4, 8, 4),
        (18, 2, 6, 9),
        (20, 5, 10, 4),
    ]
    assert [(row.gpus, row.replicas) for row in limits(5, q=(1, 2)).sizes] == [(1, 1), (2, 2), (3, 3), (4, 1), (5, 5)]
    assert limits(q=2, ranks_per_node=1) == limits(q=2, ranks_per_node=8)
    assert limits(q=(1, 2)).reshards and not limits(q=2).reshards


def test_with_memory_the_smallest_mesh_that_holds_the_model() -> None:
    costs = MeshTransformer(**SIZES, layers=2, length=64)
    one, two = (4 * (costs.fixed(q) + q * costs.sample(q)) for q in (1, 2))
    known: dict[str, Any] = {"q": (1, 2, 3), "layers": 2, "length": 64}
    assert Optimus2D(**SIZES, **known, memory_bytes=int(one / 0.9)).side(16) == 1
    tight = Optimus2D(**SIZES, **known, memory_bytes=int(two / 0.9))
    assert [tight.side(world) for world in (1, 2, 4, 9, 16)] == [None, None, 2, 3, 2]
    rows = tight.limits(Spec(64, 64, 64, 1, 0), 16, 4).sizes
    assert all(row.most_local(int(two / 0.9)) >= row.quantum // row.replicas for row in rows)  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=r"no number of GPUs up to 8 makes a mesh of side 1, 2, 3 that holds the model"
    ):
        Optimus2D(**SIZES, **known, memory_bytes=1000).limits(Spec(64, 64, 64, 1, 0), 8, 4)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"q": 0}, "q=0 is no side of a mesh of q × q ranks"),
        ({"q": ()}, "is no side of a mesh"),
        ({"q": 5}, "hidden=72 does not divide over a mesh of 5 × 5 ranks; hidden=75 would, or leave 5 out of q"),
        ({"q": 2, "heads": 9}, "heads=9 does not divide over a mesh of 2 × 2 ranks; heads=10 would"),
        ({"q": 2, "vocab": 257}, "vocab=257 does not divide over a mesh of 2 × 2 ranks; vocab=258 would"),
        ({"q": 1, "heads": 7}, "hidden=72 does not divide over 7 heads"),
        ({"q": 1, "memory_bytes": 8}, "memory_bytes says which mesh holds the model only with layers and length"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"optimus2d: .*{sentence}"):
        Optimus2D(**{**SIZES, **wrong})


def test_ranks_that_make_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match="optimus2d: 6 GPUs cannot be used; 4, 8, 9 would fit"):
        Optimus2D(q=(2, 3), **SIZES).replicas(6)
    with pytest.raises(RuntimeError, match=r"make the model after ones\.init"):
        Optimus2D(q=2, **SIZES).linear(4, 4)

"""The strategy: what it does in a model, and what it says of numbers of GPUs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ones_wrapper.protocol import Spec
from ones_wrapper.strategies.ring.attention_module import RingAttention
from ones_wrapper.strategies.ring.strategy import Ring
from ones_wrapper.strategies.ring.transformer_sizes import Transformer
from tests.wrapper.forked import Team
from tests.wrapper.layouts import layer_ranks as ranks
from tests.wrapper.layouts.test_ring_attention import SIZES

SPEC = Spec(64, 64, 64, 0, 1)


@pytest.fixture
def team(teams: dict[int, Team]) -> Team:
    return teams[SIZES[-1]]


def test_a_layer_equals_torchs_own_on_meshes_of_data_and_sequence(team: Team) -> None:
    """Rings of 1, 2 and 4 of four ranks, by night also of 8 of eight, so that several replicas share the samples; with
    padding. Gradients added up over all ranks are those of one process."""
    for causal in (False, True):
        for size in SIZES:
            found = team.run(ranks.layer_errors, size, causal)
            assert max(map(max, found)) < 1e-12, (causal, size, found)


def test_dropout_is_the_same_at_any_size_of_the_ring(team: Team) -> None:
    """The gradients with dropout, of attention and by `ring.dropout`, are those of a ring of one rank."""
    found = [team.run(ranks.dropped_gradients, size) for size in SIZES]
    for one, other in pairwise(found):
        assert abs(sum(one[0])) > 0
        assert max(abs(a - b) for a, b in zip(one[0], other[0], strict=True)) < 1e-12
    without = team.run(ranks.dropped_gradients, 2, 0.0)
    assert max(abs(a - b) for a, b in zip(without[0], found[1][0], strict=True)) > 1e-3


@pytest.mark.parametrize("two_pass", [False, True])
def test_what_a_layer_keeps_is_the_formula(team: Team, two_pass: bool) -> None:
    """Within 2 % at each size."""
    for size in SIZES:
        for kept, said in team.run(ranks.kept_bytes, size, two_pass):
            assert abs(kept / said - 1) < 0.02, (size, kept, said)


def test_rings_as_small_as_the_memory_allows() -> None:
    """One sample needs four ranks; of eight, two rings are made. Fewer than four ranks are refused."""
    sizes = Transformer(layers=4, width=64, heads=4)
    needed = sizes.fixed_bytes + sizes.sample_bytes(1024, 4)
    ring = Ring(1024, model=sizes, memory_bytes=int(needed / 0.92) + 1)
    limits = ring.limits(SPEC, 16, 4)
    assert [(row.gpus, row.replicas, row.together) for row in limits.sizes] == [
        (4, 1, 4),
        (8, 2, 4),
        (12, 3, 4),
        (16, 4, 4),
    ]
    with pytest.raises(ValueError, match=r"^ring: 2 GPUs cannot be used; 4 would fit \(no ring of up to 2 splits"):
        ring.replicas(2)
    with pytest.raises(ValueError, match="none of 1 to 3 GPUs can be used: no ring of up to 3 splits length=1024"):
        ring.limits(SPEC, 3, 4)


def test_which_ranks_share_a_node() -> None:
    """The ranks of a ring, on whatever nodes it runs now: the companion knows those that it may run on."""
    assert Ring(64).limits(SPEC, 16, 1) == Ring(64).limits(SPEC, 16, 4)
    assert [row.together for row in Ring(64, ranks=2).limits(SPEC, 8, 4).sizes] == [2, 2, 2, 2]
    assert [(row.gpus, row.together) for row in Ring(64).limits(SPEC, 16, 4).sizes] == [
        (1, 1),
        (2, 2),
        (4, 4),
        (8, 8),
        (16, 16),
    ]


def test_what_does_not_fit_gets_a_sentence() -> None:
    ring = Ring(64, causal=True)
    with pytest.raises(ValueError, match=r"^ring: 3 GPUs cannot be used; 1, 2, 4 would fit \(length=64 is no"):
        ring.replicas(3)
    with pytest.raises(ValueError, match=r"ring: 3 GPUs cannot be used; 2, 4, 6 would fit \(rings have ranks=2\)"):
        Ring(64, ranks=2).replicas(3)
    with pytest.raises(ValueError, match=r"ring: length=63 must be even, .* pad to 64"):
        Ring(63, causal=True)
    with pytest.raises(ValueError, match="ring: 64 tokens over 3 ranks must be a multiple of 3; pad to 66 tokens"):
        Ring(64, ranks=3)
    with pytest.raises(ValueError, match="ring: length=0 must be 1 or more"):
        Ring(0)
    with pytest.raises(ValueError, match="ring: heads=5 must divide width=12; 1, 2, 3, 4, 6, 12 would"):
        RingAttention(ring, 12, 5)
    with pytest.raises(ValueError, match=r"ring: sequences of 60 tokens, where length=64; pad them with ring\.pad"):
        ring.shard(torch.zeros(2, 60))
    with pytest.raises(ValueError, match="ring: sequences of 70 tokens are longer than length=64"):
        ring.pad(torch.zeros(2, 70))
    with pytest.raises(ValueError, match=r"ring: the mask must be of whole sequences, \(2, 64\), not \(2, 60\)"):
        ring.attention(*[torch.zeros(2, 1, 64, 4)] * 3, real=torch.ones(2, 60))
    with pytest.raises(ValueError, match="ring: 60 tokens on this rank, where 1 ranks hold 64 each of 64"):
        ring.attention(*[torch.zeros(2, 1, 60, 4)] * 3)
    with pytest.raises(ValueError, match="Transformer: layers=0 must be 1 or more"):
        Transformer(0, 1, 1)


def test_padding_is_visible_and_does_not_count() -> None:
    ring = Ring(8)
    padded, real = ring.pad(torch.ones(2, 5), value=-1)
    assert padded.tolist() == [[1] * 5 + [-1] * 3] * 2
    assert real.tolist() == [[True] * 5 + [False] * 3] * 2
    assert float(ring.mean(padded, real)) == 1
    uneven = torch.tensor([[True] * 2 + [False] * 6, [False] * 8])
    assert float(ring.mean(torch.ones(2, 8), uneven)) == 0.5  # each sequence counts alike, also one without tokens

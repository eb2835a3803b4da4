"""Attention in a ring equals the dense one, forward and backward."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ones_wrapper.strategies.ring.circle import Circle
from ones_wrapper.strategies.ring.ring_attention import Arrangement
from ones_wrapper.strategies.ring.tile import uniform
from tests.marks import NIGHTLY, nightly
from tests.wrapper.forked import Team
from tests.wrapper.layouts import attention_ranks as ranks

SIZES = (1, 2, 4, 8) if NIGHTLY else (1, 2, 4)


@pytest.fixture
def team(teams: dict[int, Team]) -> Team:
    """As many ranks as the largest ring has; smaller ones lie side by side."""
    return teams[SIZES[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.FUNCTIONS)
@pytest.mark.parametrize("size", [nightly(1), *SIZES[1:]])
def test_it_equals_dense_attention_forward_and_backward(team: Team, name: str, size: int) -> None:
    """Protects exactness, of the gradients above all: a division by the number of ranks, or the sums of keys and
    values left one rank too far, would show here as errors of the size of the gradients."""
    for causal, mask, rate in product((False, True), (False, True), (0.0, 0.3)):
        found = team.run(ranks.errors, size, name, causal, mask, rate, torch.float64)
        assert max(map(max, found)) < 1e-12, f"causal {causal}, mask {mask}, dropout {rate}: {found}"


def test_in_single_precision_the_error_is_that_of_the_type(team: Team) -> None:
    for name in ranks.FUNCTIONS:
        found = team.run(ranks.errors, 4, name, True, True, 0.0, torch.float32)
        assert max(map(max, found)) < 1e-4, name  # gradients reach 10; 1e-5 of that


@pytest.mark.parametrize("name", ranks.FUNCTIONS)
def test_autocast_gives_the_type_of_torchs_attention(name: str) -> None:
    """Protects a model that turns queries and keys in single precision (rotary positions): the fused kernels take one
    type, and single precision is slow."""
    arrangement, above = Arrangement(Circle(), ranks.LENGTH, True), ranks.whole(0)[3]
    kinds = torch.float32, torch.float32, torch.bfloat16
    ours, its = ([x.to(kind).requires_grad_() for x, kind in zip(ranks.whole(0), kinds, strict=False)] for _ in "12")
    with torch.autocast("cpu", torch.bfloat16):
        found = ranks.FUNCTIONS[name](*ours, arrangement)
        expected = scaled_dot_product_attention(*its, is_causal=True)
    for output in (found, expected):
        torch.autograd.backward(output, above.to(output.dtype))
    for one, other in zip([found, *(x.grad for x in ours)], [expected, *(x.grad for x in its)], strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_bytes_on_the_wire_are_those_of_the_formula(team: Team, causal: bool) -> None:
    """2(N-1)c there and 4(N-1)c back, for c elements of one rank's keys; the last shift of the sums included."""
    block = 4 * ranks.BATCH * ranks.HEADS * ranks.LENGTH * ranks.WIDTH
    for name, size in product(ranks.FUNCTIONS, SIZES):
        found = team.run(ranks.sent, size, name, causal)
        assert found == [(2 * (size - 1) * block // size, 4 * (size - 1) * block // size)] * SIZES[-1], (name, size)


def test_chunks_of_queries_change_nothing(team: Team) -> None:
    found = team.run(ranks.errors_in_chunks, 2)
    assert max(map(max, found)) < 1e-12


def test_every_token_is_on_one_rank_and_causal_work_is_equal() -> None:
    for size in SIZES:
        for causal in (False, True):
            made = [Arrangement(Circle(rank, size), 32, causal) for rank in range(size)]
            positions = torch.cat([one.positions(rank) for rank, one in enumerate(made)])
            assert sorted(positions.tolist()) == list(range(32))
        work = []
        for rank in range(size):
            pairs = made[rank].positions(rank)[:, None] >= torch.arange(32)
            work.append(int(pairs.sum()))
        assert max(work) - min(work) == 0


def test_lengths_that_do_not_split_are_refused_with_what_fits() -> None:
    with pytest.raises(ValueError, match=r"ring: 36 tokens over 8 ranks must be a multiple of 16 .*pad to 48 tokens"):
        Arrangement(Circle(0, 8), 36, causal=True)
    with pytest.raises(ValueError, match=r"take 1, 2, 3, 6, 9, 18 ranks"):
        Arrangement(Circle(0, 8), 36, causal=True)


def test_dropout_is_uniform_and_a_function_of_place_and_key() -> None:
    places = torch.arange(1 << 16)
    first, second = uniform(places, 1), uniform(places, 2)
    assert float(first.min()) >= 0 and float(first.max()) < 1
    for one in (first, second, uniform(places + (1 << 40), 1)):
        counts = torch.histc(one.double(), 16, 0, 1)
        assert float(((counts - 4096) ** 2 / 4096).sum()) < 45  # chi-square of 15 degrees, 1e-4
    assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack((first[:-1], first[1:])))[0, 1])) < 0.02
    assert torch.equal(uniform(places[5:9], 1), first[5:9])

"""What surrounds the fused kernels. The kernels themselves need CUDA: without it flex attention computes the same
forward pass unfused and refuses the backward pass, for which a dense function stands in here."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from ones_wrapper.strategies.ring import sdpa_kernel as fused
from ones_wrapper.strategies.ring import tile as block
from ones_wrapper.strategies.ring.tile import Above, Place

SCALE = 0.5


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp as the kernels give them, differentiable by both."""
    hidden = place.hidden()
    scores = q @ k.mT * place.scale
    scores = scores if hidden is None else scores.masked_fill(hidden, -1e30)
    total = scores.logsumexp(-1)
    nothing = total < -1e29
    p = scores.softmax(-1).masked_fill(nothing[..., None], 0.0)
    return p @ v, total.masked_fill(nothing, -math.inf)


def cases() -> list[Place]:
    real = torch.ones(2, 16, dtype=torch.bool)
    real[1, 5:] = False
    real[0, :2] = False  # causal: its first queries see nothing
    rows, columns = torch.arange(16), torch.arange(16)
    return [Place(rows, columns, SCALE, triangular, mask) for triangular, mask in product((False, True), (None, real))]


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 16, 4, generator=generator, dtype=torch.float64) for _ in range(4)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_forward_gives_the_same_pair() -> None:
    q, k, v, _ = inputs()
    for place in cases():
        found, wanted = fused.forward(q, k, v, place), block.forward(q, k, v, place)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_backward_weighs_output_and_logsumexp_by_the_blocks_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_attend", dense)
    q, k, v, gradient = inputs()
    for place in cases():
        output, total = block.forward(q, k, v, place)
        other, its_total = block.forward(q, v, k, place)  # another block of the same softmax
        block.merge(output, total, other, its_total)
        above = Above(gradient, total, (gradient * output).sum(-1))
        found, wanted = (kernel.backward(q, k, v, place, above) for kernel in (fused, block))
        for one, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def test_what_the_kernels_lack_takes_the_ordinary_path() -> None:
    assert not fused.usable(torch.zeros(1, 1, 16, 16), None)  # no CUDA

"""Whether fusing pays: measured, and refused with a sentence where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ones_wrapper as ones
from ones_wrapper.strategies.fusion import NoGainError, gain, largest
from ones_wrapper.strategies.fusion.gain import Gain, most_members


def members(count: int, width: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models: list[nn.Module] = [
        nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
        for _ in range(count)
    ]
    return models, [torch.optim.AdamW(m.parameters(), lr=1e-3 * (i + 1)) for i, m in enumerate(models)]


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 16), torch.randint(0, 4, (samples,))


def test_many_tiny_members_pay_and_one_does_not() -> None:
    torch.set_num_threads(1)
    models, optimizers = members(16, 16)
    before = [p.clone() for m in models for p in m.parameters()]
    found = gain(models, optimizers, loss=cross_entropy, batch=batch(8))
    assert found.members == 16 and found.pays, str(found)
    assert all(torch.equal(a, p) for a, p in zip(before, (p for m in models for p in m.parameters()), strict=True))
    assert not any(optimizer.state for optimizer in optimizers)
    ones.strategies.fuse(models, optimizers, loss=cross_entropy, probe=batch(8))
    with pytest.raises(NoGainError, match=r"1 members? fused .* does not pay"):
        ones.strategies.fuse(models[:1], optimizers[:1], loss=cross_entropy, probe=batch(8))


def test_what_does_not_save_a_fifth_does_not_pay() -> None:
    assert Gain(4, 1.2, 1.0).pays and not Gain(4, 1.19, 1.0).pays and not Gain(1, 2.0, 1.0).pays
    assert "1.19 times as fast, which does not pay" in str(Gain(4, 1.19, 1.0))


def test_as_many_as_fit() -> None:
    asked: list[int] = []

    def fits(most: int, count: int) -> bool:
        asked.append(count)
        if count > most:
            raise torch.cuda.OutOfMemoryError
        return True

    for limit in range(41):
        for most in (0, 1, 2, 7, 8, 40):
            asked.clear()
            assert most_members(lambda count, limit=limit: fits(limit, count), most) == min(limit, most)  # type: ignore[misc]
            assert len(asked) <= 12 and max(asked, default=0) <= most
    models, optimizers = members(5, 8)
    assert largest(models, optimizers, loss=cross_entropy, batch=batch(4)) == 5

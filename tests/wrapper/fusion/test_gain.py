"""Whether fusing pays: measured, and refused with a sentence where it does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.strategies import fusion
from ones_wrapper.strategies.fusion import NoGainError, gain
from ones_wrapper.strategies.fusion.gain import Gain


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


def fuse_on_ranks(first_s: float) -> None:
    """Puts whether this rank may fuse: rank 1 measures a loss, rank 0 what it is given."""
    job = ones.init(batch=4, epochs=1)
    found = Gain(2, *((first_s, 1.0), (1.0, 1.5))[job.rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ones_wrapper.strategies.fusion.measure", lambda *_: found)
        try:
            ones.strategies.fuse(*members(2, 4), loss=cross_entropy, probe=batch(8))
        except NoGainError as error:
            testing.put(f"{error.gain.speedup:.1f}")
        else:
            testing.put("fused")


@pytest.mark.slow
@pytest.mark.parametrize(("first_s", "all_say"), [(4.0, "fused"), (1.5, "1.0")])
def test_ranks_are_refused_together(first_s: float, all_say: str) -> None:
    """Protects a job whose ranks measure differently: one that was refused by itself would leave others waiting."""
    assert [put.value for put in testing.run(partial(fuse_on_ranks, first_s), ranks=2)] == [all_say] * 2


@pytest.mark.parametrize("held", [0, 1, 3, 5, 8])
def test_as_many_as_fit(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    fuse_all = fusion.fuse

    def fuse(models: dict[str, nn.Module], *given: Any, **options: Any) -> Any:
        if len(models) > held:
            raise torch.OutOfMemoryError("emulated")
        return fuse_all(models, *given, **options)

    monkeypatch.setattr(fusion, "fuse", fuse)
    models, optimizers = members(5, 8)
    assert fusion.largest(models, optimizers, loss=cross_entropy, batch=batch(4)) == min(held, 5)

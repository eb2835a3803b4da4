"""Batch size and learning rate."""

from __future__ import annotations

import pytest
import torch

from ones_wrapper.batch import LrScale, clamp_batch, lr_factor


def test_batch_in_force_is_what_fits() -> None:
    """Protects memory and honesty: never more than the job or its GPUs take, and back to the wish when they
    do.
    """
    assert clamp_batch(256, world=1, max_batch=512, max_local_batch=64) == 64
    assert clamp_batch(256, world=8, max_batch=512, max_local_batch=64) == 256
    assert clamp_batch(1024, world=16, max_batch=512, max_local_batch=64) == 512


@pytest.mark.parametrize(
    ("batch", "rule", "factor"),
    [(64, "linear", 1.0), (256, "linear", 4.0), (1024, "linear", 8.0), (32, "linear", 0.5), (256, "sqrt", 2.0),
     (256, "none", 1.0)],
)  # fmt: skip
def test_lr_rules(batch: int, rule: str, factor: float) -> None:
    """Protects the rules and their cap."""
    assert lr_factor(batch, 64, rule, 8.0) == factor


def test_scale_acts_in_the_step_alone() -> None:
    """Protects schedulers and checkpoints, which must see the script's own learning rate."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.5}])
    scale = LrScale(optimizer)
    scale.factor = 4.0
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == -2.0
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    assert scale.stepped

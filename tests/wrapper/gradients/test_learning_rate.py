"""The learning rate's factor: rules, ramps and what the script sees of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.gradients.learning_rate import RULES, LrRule, LrScale
from ones_wrapper.gradients.noise import efficiency

BATCHES = st.integers(1, 4096)
NOISES = st.none() | st.floats(0.0, 1e9)


@pytest.mark.parametrize(
    ("batch", "rule", "noise", "factor"),
    [(64, "linear", None, 1.0), (256, "linear", None, 4.0), (1024, "linear", 5.0, 8.0), (32, "linear", None, 0.5),
     (256, "sqrt", None, 2.0), (256, "none", None, 1.0), (32, "none", None, 1.0),
     (256, "adascale", None, 1.0), (256, "adascale", 0.0, 1.0), (256, "adascale", 128.0, 2.0),
     (256, "adascale", 1e12, 4.0), (1024, "adascale", 1e12, 8.0), (32, "adascale", 1e12, 0.5)],
)  # fmt: skip
def test_lr_rules(batch: int, rule: str, noise: float | None, factor: float) -> None:
    """Protects the rules and their cap."""
    assert LrRule(64, rule, 8.0).factor(batch, noise) == pytest.approx(factor)


@given(BATCHES, BATCHES, NOISES, st.sampled_from(RULES), st.floats(0.01, 100.0))
def test_no_rule_leaves_its_bounds(base: int, batch: int, noise: float | None, rule: str, cap: float) -> None:
    """Protects training from a learning rate that no paper stands for: between 1 and the linear rule, under the cap,
    and the script's own at the base batch."""
    factor = LrRule(base, rule, cap).factor(batch, noise)
    ratio = batch / base
    assert 0 < factor <= cap
    assert factor == cap or min(1.0, ratio) * (1 - 1e-9) <= factor <= max(1.0, ratio) * (1 + 1e-9)
    assert LrRule(base, rule, 200.0).factor(base, noise) == pytest.approx(1.0)


@given(st.integers(1, 512), BATCHES, st.floats(0.0, 1e6))
def test_adascale_counts_as_our_progress_does(base: int, batch: int, noise: float) -> None:
    """Protects what README says: a step's gain is its progress in samples of the base batch, over that batch."""
    batch = max(base, batch)
    gain = LrRule(base, "adascale", 1e9).factor(batch, noise)
    assert gain == pytest.approx(batch * efficiency(batch, base, noise) / base)


def test_adascale_gain_is_the_papers() -> None:
    """Protects the formula: (σ² + μ²)/(σ²/S + μ²), with variance σ² and squared norm μ² at the base batch."""
    variance, square, base, scale = 3.0, 0.5, 32, 8
    noise = variance * base / square
    assert LrRule(base, "adascale").factor(base * scale, noise) == pytest.approx(
        (variance + square) / (variance / scale + square)
    )


@pytest.mark.parametrize(("rule", "cap"), [("cubic", 8.0), ("linear", 0.0), ("linear", math.nan)])
def test_nonsense_is_refused(rule: str, cap: float) -> None:
    """Protects against a rule or cap that would only show in the loss."""
    with pytest.raises(ValueError, match="lr_"):
        LrRule(64, rule, cap)


def one_weight(lr: float = 0.5) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    return weight, torch.optim.SGD([{"params": [weight], "lr": lr}])


def test_scale_acts_in_the_step_alone() -> None:
    """Protects schedulers and checkpoints, which must see the script's own learning rate."""
    weight, optimizer = one_weight()
    scale = LrScale(optimizer)
    scale.aim(4.0)
    optimizer.step()
    assert weight.item() == -2.0
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    assert scale.stepped


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.integers(0, 30), st.integers(0, 30))
def test_ramp_is_a_straight_line_whatever_interrupts_it(start: float, target: float, steps: int, cut: int) -> None:
    """Protects gradual warm-up over a restart in its middle: two numbers are all that goes on."""
    _, optimizer = one_weight()
    scale = LrScale(optimizer)
    scale.aim(start)
    scale.aim(target, steps)
    for step in range(35):
        if step == cut:
            factor, left = scale.factor, scale.left
            _, optimizer = one_weight()
            scale = LrScale(optimizer)
            scale.factor = factor
            scale.aim(target, left)
        part = min(1.0, step / steps) if steps else 1.0
        assert scale.factor == pytest.approx(start + (target - start) * part)
        optimizer.step()
        scale.advance()
    assert scale.factor == pytest.approx(target)
    assert scale.left == 0


def test_ramp_counts_no_steps_at_rate_zero() -> None:
    """Protects the ramp from the step at rate 0 by which torch.distributed.checkpoint learns an optimizer's state."""
    _, optimizer = one_weight(lr=0.0)
    scale = LrScale(optimizer)
    scale.aim(2.0, 10)
    optimizer.step()
    scale.advance()
    assert (scale.factor, scale.left) == (1.0, 10)


def test_ramp_moves_once_a_step_of_the_loop() -> None:
    """Protects several optimizers: all get the same factor within a step, and one that steps more often, or not at all,
    does not shorten the ramp."""
    (one, first), (other, second) = one_weight(), one_weight()
    scale = LrScale(first, second)
    scale.aim(4.0, 3)
    for step in range(3):
        scale.expect()
        for _ in range(5):
            first.step()
        if step:
            second.step()
        scale.advance()
    assert (scale.factor, scale.left) == (4.0, 0)
    assert (one.item(), other.item()) == (-0.5 * 5 * (1 + 2 + 3), -0.5 * (2 + 3))

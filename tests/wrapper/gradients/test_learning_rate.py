"""How optimizers' steps follow the batch: by their classes, within the noise scale's bound and beyond it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.gradients.learning_rate import CAP, Rate, common_rule

BASE = 16
KNOWN = TrainingProgress(noise=1e4, noise_low=1e4)
SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}


def weight() -> torch.nn.Parameter:
    found = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    found.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    return found


class Steps:
    """Steps of one optimizer along a constant gradient."""

    def __init__(self, kind: Any, progress: TrainingProgress, **options: Any) -> None:
        self.weight, self.progress = weight(), copy.deepcopy(progress)
        self.optimizer = kind([self.weight], **options)
        self.rate = Rate(BASE, self.optimizer)
        self.inside: dict[str, Any] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self.inside.update(self.optimizer.param_groups[0]))

    def make(self, batch: int, total: int | None = None, steps: int = 1) -> float:
        """How far the last of the steps went along the gradient, in units of the script's rate."""
        before = self.weight
        for _ in range(steps):
            self.rate.admit(self.progress, batch)
            self.rate.begin(self.progress, batch, total or batch)
            before = self.weight.detach().clone()
            self.optimizer.step()
            self.rate.remember(self.progress)
        return float((before - self.weight.detach())[0]) / self.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("kinds", "rule"),
    [((torch.optim.SGD,), "sgd"), ((torch.optim.Adam,), "adam"), ((torch.optim.AdamW, torch.optim.Adam), "adam"),
     ((torch.optim.Adagrad,), "other"), ((torch.optim.RMSprop,), "other"), ((torch.optim.NAdam,), "other"),
     ((torch.optim.SGD, torch.optim.Adam), "other")],
)  # fmt: skip
def test_the_class_decides(kinds: tuple[Any, ...], rule: str) -> None:
    """Protects against a rule that was never tried with an optimizer: also of several that differ."""
    assert common_rule([kind([weight()], lr=0.1) for kind in kinds]) == rule
    assert Rate(BASE, *(kind([weight()], lr=0.1) for kind in kinds), follows=False).rule == "none"


@pytest.mark.parametrize("options", [SGD, {**SGD, "nesterov": True}, {**SGD, "dampening": 0.5}, {"lr": 0.5}])
def test_sgd_goes_as_far_a_sample_from_the_first_step_on(options: dict[str, Any]) -> None:
    """Protects the buffer's measure, growing and shrinking: along a constant gradient k base batches go k times as far
    at once, and what comes back is what was."""
    steps = Steps(torch.optim.SGD, KNOWN, **options)
    steady = steps.make(BASE, steps=400)
    for batch in (2 * BASE, 8 * BASE, 3 * BASE, BASE // 2, BASE):
        assert steps.make(batch) == pytest.approx(steady * batch / BASE, rel=1e-9)
        assert steps.inside.get("momentum", 0) == pytest.approx(
            options.get("momentum", 0) ** (batch / BASE) if batch else 0
        )
    assert steps.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_forgets_by_samples(kind: Any) -> None:
    """Protects the rule of Adam: rate times k, the first beta to the power k, all else as the script set it, and only
    while a step is made."""
    steps = Steps(kind, TrainingProgress(noise=1e4, noise_low=1e4, lr_peaks=[0.04]), lr=0.01, betas=(0.9, 0.95))
    steps.rate.resume(steps.progress)
    steps.make(4 * BASE)
    group = steps.optimizer.param_groups[0]
    assert (steps.inside["lr"], steps.inside["betas"]) == (pytest.approx(0.04), (pytest.approx(0.9**4), 0.95))
    assert (group["lr"], group["betas"]) == (0.01, (0.9, 0.95))
    assert steps.optimizer.state_dict()["param_groups"][0]["betas"] == (0.9, 0.95)
    assert steps.rate.stepped


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_nothing_changes_at_the_script_s_batch(kind: Any) -> None:
    """Protects the promise that a fixed batch is the script's own training, to the bit: also in an epoch's last step,
    and in a job whose script sees to it itself."""
    plain, steps, silent = weight(), Steps(kind, KNOWN, lr=0.1), Steps(kind, KNOWN, lr=0.1)
    silent.rate = Rate(BASE, silent.optimizer, follows=False)
    optimizer = kind([plain], lr=0.1)
    for total in (BASE, BASE, 5, BASE):
        optimizer.step()
        steps.make(BASE, total)
        silent.make(4 * BASE, 3 * total)
    assert torch.equal(steps.weight, plain) and torch.equal(silent.weight, plain)


BEYOND = [
    (torch.optim.SGD, SGD, KNOWN, 16 * BASE, 1.0, CAP),
    (torch.optim.SGD, SGD, TrainingProgress(noise=200.0, noise_low=100.0), 2 * BASE, 1.0, CAP),
    (torch.optim.SGD, SGD, TrainingProgress(noise=200.0, noise_low=128.0), 2 * BASE, 2.0, 2.0),
    (torch.optim.Adam, {"lr": 0.1}, TrainingProgress(noise=200.0, noise_low=64.0), 2 * BASE, 2.0, 2.0),
    (torch.optim.Adam, {"lr": 0.1}, TrainingProgress(noise=200.0, noise_low=63.0), 2 * BASE, 1.0, 2.0),
    (torch.optim.Adam, {"lr": 0.1}, KNOWN, 8 * BASE, 8.0, CAP),
    (torch.optim.Adam, {"lr": 0.1}, TrainingProgress(), 2 * BASE, 1.0, 2.0),
    (torch.optim.Adam, {"lr": 0.1}, TrainingProgress(), 8 * BASE, 1.0, CAP),
    (torch.optim.Adagrad, {"lr": 0.1}, KNOWN, 2 * BASE, 1.0, 2.0**0.5),
    (torch.optim.Adagrad, {"lr": 0.1}, KNOWN, 64 * BASE, 1.0, CAP),
]


@pytest.mark.parametrize(("kind", "options", "progress", "batch", "power", "factor"), BEYOND)
def test_the_limit_and_the_cap(
    kind: Any, options: dict[str, Any], progress: TrainingProgress, batch: int, power: float, factor: float
) -> None:
    """Protects training from divergence: beyond the bound, eight base batches or without a noise scale momentum stays;
    but SGD's within its bound no rate is more than twice the largest of the schedule."""
    steps = Steps(kind, progress, **options)
    steps.make(batch)
    assert steps.rate.power(steps.progress, batch) == power == steps.progress.momentum_power
    assert steps.rate.factor(steps.progress, batch) == pytest.approx(factor)
    words = steps.rate.words(steps.progress, batch)
    assert ("momentum as it is" in words) == (power == 1.0 and kind is not torch.optim.Adagrad)


def test_the_cap_is_of_the_schedule_not_of_the_moment() -> None:
    """Protects growth late in a schedule, when its rate is low."""
    steps = Steps(torch.optim.AdamW, KNOWN, lr=0.1)
    steps.make(BASE)
    steps.optimizer.param_groups[0]["lr"] = 0.025
    assert steps.rate.factor(steps.progress, 4 * BASE) == pytest.approx(4.0) or steps.make(4 * BASE)
    steps.make(4 * BASE)
    assert steps.rate.factor(steps.progress, 4 * BASE) == pytest.approx(4.0)
    assert steps.rate.factor(steps.progress, 8 * BASE) <= 8.0


def test_a_smaller_last_step_gets_the_factor_of_its_own_samples() -> None:
    """Protects an epoch's end, which cost 0.6 % of the loss: the step after is that of the whole batch again."""
    steps = Steps(torch.optim.SGD, KNOWN, **SGD)
    steady = steps.make(BASE, steps=400)
    assert steps.make(8 * BASE) == pytest.approx(8 * steady, rel=1e-9)
    assert steps.make(8 * BASE, 3 * BASE) == pytest.approx(3 * steady, rel=1e-9)
    assert steps.make(8 * BASE, BASE // 4) == pytest.approx(steady, rel=1e-9)
    assert steps.make(8 * BASE) == pytest.approx(8 * steady, rel=1e-9)


def test_the_lower_bound_admits_and_the_mean_keeps() -> None:
    """Protects momentum from turning to and fro as the estimate of the noise scale moves."""
    steps = Steps(torch.optim.AdamW, TrainingProgress(), lr=0.1)
    rate, progress = steps.rate, steps.progress
    assert not rate.admit(progress, 4 * BASE) and rate.free(progress) == BASE
    for low, mean, changes, free in (
        (127.0, 300.0, False, 2 * BASE), (128.0, 300.0, True, 4 * BASE), (60.0, 130.0, False, 4 * BASE),
        (60.0, 127.0, True, BASE), (127.0, 300.0, False, 2 * BASE),
    ):  # fmt: skip
        progress.noise_low, progress.noise = low, mean
        assert rate.admit(progress, 4 * BASE) == changes
        assert rate.free(progress) == free


@given(st.lists(st.sampled_from([BASE // 2, BASE, 2 * BASE, 8 * BASE, 16 * BASE]), min_size=2, max_size=8), st.data())
def test_a_restart_changes_nothing(batches: list[int], data: st.DataObject) -> None:
    """Protects a checkpoint between any two steps: buffers, peaks and what was admitted go on."""
    cut = data.draw(st.integers(1, len(batches) - 1))
    steps = Steps(torch.optim.SGD, KNOWN, **SGD)
    for batch in batches[:cut]:
        steps.make(batch)
    again = Steps(torch.optim.SGD, steps.progress, **SGD)
    again.optimizer.load_state_dict(copy.deepcopy(steps.optimizer.state_dict()))
    again.weight.data.copy_(steps.weight)
    again.rate.resume(again.progress)
    for batch in batches[cut:]:
        assert steps.make(batch) == again.make(batch)
    assert torch.equal(steps.weight, again.weight)


def test_an_empty_step_changes_nothing() -> None:
    """Protects the state that torch.distributed.checkpoint learns from a step at rate zero."""
    steps = Steps(torch.optim.AdamW, TrainingProgress(), lr=0.0)
    assert steps.rate.factor(steps.progress, 4 * BASE) == 4.0
    steps.optimizer.step()
    assert steps.progress == TrainingProgress() and not steps.weight.detach().any()


def test_each_optimizer_has_a_peak_of_its_own() -> None:
    """Protects a job of two models whose schedules differ: neither takes the other's for its own."""
    first, second = (torch.optim.AdamW([weight()], lr=lr) for lr in (0.1, 0.001))
    rate, progress = Rate(BASE, first, second), copy.deepcopy(KNOWN)
    rate.admit(progress, 8 * BASE)
    rate.begin(progress, 8 * BASE, 8 * BASE)
    seen: list[float] = []
    second.register_step_pre_hook(lambda *_: seen.append(second.param_groups[0]["lr"]))
    for _ in range(5):
        first.step()
        second.step()
    rate.remember(progress)
    assert seen == pytest.approx([CAP * 0.001] * 5) and progress.lr_peaks == [0.1, 0.001]

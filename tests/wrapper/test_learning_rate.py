"""Batch size, learning rate and passes."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ones_wrapper.data.feed import passes, split
from ones_wrapper.gradients.exchange import DdpExchange, Exchange
from ones_wrapper.gradients.fsdp import FsdpExchange
from ones_wrapper.gradients.noise import efficiency
from ones_wrapper.group import Group
from ones_wrapper.learning_rate import RULES, Gate, LrRule, LrScale, clamp_batch
from tests.wrapper.forked import Team

BATCHES = st.integers(1, 4096)
SIZES = st.integers(1, 64)
NOISES = st.none() | st.floats(0.0, 1e9)


def test_batch_in_force_is_what_fits() -> None:
    """Protects memory and honesty: never more than the job or its GPUs take, and back to the wish when they do."""
    assert clamp_batch(256, world=1, max_batch=512, max_local_batch=64) == 64
    assert clamp_batch(256, world=8, max_batch=512, max_local_batch=64) == 256
    assert clamp_batch(1024, world=16, max_batch=512, max_local_batch=64) == 512
    assert clamp_batch(256, world=1, max_batch=512, max_local_batch=64, max_passes=3) == 192


@settings(deadline=None)
@given(BATCHES, SIZES, BATCHES, SIZES, SIZES)
def test_batch_in_force_needs_no_more_passes(wanted: int, world: int, most: int, local: int, passes: int) -> None:
    """Protects the bound on passes: split over the ranks as evenly as possible, no rank needs more."""
    batch = clamp_batch(wanted, world, most, local, passes)
    assert 1 <= batch <= max(1, min(wanted, most))
    assert math.ceil(math.ceil(batch / world) / local) <= passes
    assert batch == wanted or batch in (most, local * passes * world)


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


@settings(deadline=None)
@given(BATCHES, BATCHES, NOISES, st.sampled_from(RULES), st.floats(0.01, 100.0))
def test_no_rule_leaves_its_bounds(base: int, batch: int, noise: float | None, rule: str, cap: float) -> None:
    """Protects training from a learning rate that no paper stands for: between 1 and the linear rule, under the cap,
    and the script's own at the base batch."""
    factor = LrRule(base, rule, cap).factor(batch, noise)
    ratio = batch / base
    assert 0 < factor <= cap
    assert factor == cap or min(1.0, ratio) * (1 - 1e-9) <= factor <= max(1.0, ratio) * (1 + 1e-9)
    assert LrRule(base, rule, 200.0).factor(base, noise) == pytest.approx(1.0)


@settings(deadline=None)
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


@settings(deadline=None)
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
    assert scale.factor == pytest.approx(target)
    assert scale.left == 0


def test_ramp_counts_no_steps_at_rate_zero() -> None:
    """Protects the ramp from the step at rate 0 by which torch.distributed.checkpoint learns an optimizer's state."""
    _, optimizer = one_weight(lr=0.0)
    scale = LrScale(optimizer)
    scale.aim(2.0, 10)
    optimizer.step()
    assert (scale.factor, scale.left) == (1.0, 10)


PASSES = st.lists(st.integers(1, 4), min_size=1, max_size=5)
"""Passes of each step."""


def model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def batch(step: int, passes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(12, 3, generator=generator, dtype=torch.float64).chunk(passes))


@settings(deadline=None)
@given(
    PASSES,
    st.sampled_from(["before", "after", "both", "model", "zeros"]),
    st.sampled_from(["step", "epoch"]),
    st.booleans(),
    st.booleans(),
)
def test_unchanged_loop_ends_as_without_passes(
    passes: list[int], zero: str, schedule: str, scheduler_first: bool, scaled: bool
) -> None:
    """Protects accumulation in loops as they are: zeroing in either order, schedulers made before or after, stepped by
    step or by epoch, with a gradient scaler or without; and torch warns of nothing."""

    def train(split: bool) -> tuple[list[torch.Tensor], float, dict[str, Any]]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, growth_interval=2)
        if scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            gate = Gate(optimizer, scheduler, scaler, net)
        else:
            gate = Gate(optimizer, scaler, net)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scale = LrScale(optimizer)
        scale.aim(1.5)
        for step, count in enumerate(passes):
            parts = batch(step, count) if split else [torch.cat(batch(step, count))]
            for index, x in enumerate(parts):
                gate.begin(index, len(parts))
                if zero in ("before", "both"):
                    optimizer.zero_grad()
                elif zero == "model":
                    net.zero_grad()
                loss = net(x).square().sum() / 12
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                if zero in ("after", "both"):
                    optimizer.zero_grad()
                elif zero == "zeros":
                    optimizer.zero_grad(set_to_none=False)
                if schedule == "step" and (scheduler_first or gate.updates):
                    scheduler.step()
        if schedule == "epoch":
            scheduler.step()
        return [p.detach() for p in net.parameters()], optimizer.param_groups[0]["lr"], scaler.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (one, one_lr, one_scale), (other, other_lr, other_scale) = train(False), train(True)
    assert one_lr == other_lr
    assert one_scale == other_scale
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def passes_of(gate: Gate, optimizer: torch.optim.Optimizer, net: torch.nn.Module, count: int, run: Any) -> None:
    for index in range(count):
        gate.begin(index, count)
        net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        run()


def test_hooks_run_for_real_steps_alone() -> None:
    """Protects the ramp and the count of steps, which hang on the optimizer's hooks."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    gate = Gate(optimizer)
    passes_of(gate, optimizer, net, 3, optimizer.step)
    assert len(steps) == 1
    assert optimizer.state[next(net.parameters())]["step"] == 1


@pytest.mark.parametrize("guard", [False, True])
def test_clipping_is_refused_where_it_would_be_wrong(guard: bool) -> None:
    """Protects training from clipping a part of the sum of gradients, which no one would see; and lets it pass where
    the script does it once a step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gate = Gate(optimizer)

    def run() -> None:
        if gate.updates or not guard:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()

    if guard:
        passes_of(gate, optimizer, net, 3, run)
    else:
        with pytest.raises(RuntimeError, match=r"if job\.updates"):
            passes_of(gate, optimizer, net, 3, run)
    passes_of(gate, optimizer, net, 1, run)


def test_guarded_step_and_plain_zeroing() -> None:
    """Protects the gradients of the first pass in a loop that guards its step alone."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    gate = Gate(optimizer)
    norms: list[float] = []
    bias = list(net.parameters())[-1]

    def run() -> None:
        if gate.updates:
            assert bias.grad is not None
            norms.append(float(bias.grad))
            optimizer.step()
        optimizer.zero_grad()

    passes_of(gate, optimizer, net, 3, run)
    assert norms == [6.0]
    assert bias.grad is None


@pytest.mark.parametrize("fused", [False, True])
def test_unregistered_scaler_is_refused(fused: bool) -> None:
    """Protects the gradients of earlier passes, which a scaler would divide again in each pass."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    gate = Gate(optimizer)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="scaler=scaler"):
        passes_of(gate, optimizer, net, 2, lambda: scaler.step(optimizer))


def test_overflow_leaves_no_gradients_behind() -> None:
    """Protects the steps after one that a scaler skipped: its infinite gradients must go, though no step was made."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    gate = Gate(optimizer, scaler)
    for index in range(2):
        gate.begin(index, 2)
        scaler.scale(net(torch.full((1, 3), math.inf * index, dtype=torch.float64)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    assert scaler.get_scale() == 2.0


def test_closures_are_refused() -> None:
    """Protects against an optimizer that would train on its own rank's samples."""
    net = model()
    with pytest.raises(ValueError, match="LBFGS"):
        Gate(torch.optim.LBFGS(net.parameters()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Gate(optimizer)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(closure=lambda: 1.0)
    optimizer.step(closure=None)


def test_step_left_midway_is_dropped() -> None:
    """Protects the next step from gradients of passes that no step followed."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gate = Gate(optimizer)
    gate.begin(0, 4)
    net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    gate.begin(0, 1)
    assert all(p.grad is None for p in net.parameters())


def test_gated_things_still_save_and_copy() -> None:
    """Protects checkpoints and moving averages: nothing of the gate gets into states and copies."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.amp.GradScaler("cpu")
    before = [set(thing.state_dict()) for thing in (optimizer, scheduler, scaler, net)]
    Gate(optimizer, scheduler, scaler, net)
    assert [set(thing.state_dict()) for thing in (optimizer, scheduler, scaler, net)] == before
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    scheduler.load_state_dict(scheduler.state_dict())
    average = torch.optim.swa_utils.AveragedModel(net)
    average.update_parameters(net)
    copy.deepcopy(net).zero_grad()


EXCHANGES: dict[str, type[Exchange]] = {"ddp": DdpExchange, "fsdp": FsdpExchange}


def train_on_rank(group: Group, kind: str, order: str, max_local: int, totals: list[int]) -> list[float]:
    """An unchanged loop on one rank; the parameters that it ends with."""
    exchange = EXCHANGES[kind](group, None)
    net = exchange.wrap(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    gate = Gate(optimizer, scheduler, net)
    for step, total in enumerate(totals):
        x = torch.randn(total, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for passed in passes(split(0, total, group.world, group.rank), group.world, max_local):
            gate.begin(passed.index, passed.count)
            with exchange.during(passed):
                if order == "before":
                    optimizer.zero_grad()
                net(x[passed.start : passed.start + max(passed.samples, 1)]).square().mean().backward()
                if gate.updates:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
                optimizer.step()
                if order == "after":
                    optimizer.zero_grad()
                scheduler.step()
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters())
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """Two ranks."""
    team = Team(2)
    yield team
    team.close()


@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_passes_on_ranks_end_as_one_pass(team: Team, kind: str, order: str) -> None:
    """Protects accumulation with a real exchange: uneven ranks and passes, some without samples."""
    totals = [13, 8, 1, 13]
    whole = team.run(train_on_rank, kind, order, 16, totals)
    parts = team.run(train_on_rank, kind, order, 2, totals)
    assert whole[0] == whole[1]
    assert parts[0] == parts[1] == pytest.approx(whole[0], rel=1e-10, abs=1e-12)

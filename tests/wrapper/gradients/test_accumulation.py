"""Gradient accumulation: an unchanged loop with the wrappers ends where one large forward pass ends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.data.feed import Cut, step_passes
from ones_wrapper.gradients.accumulation import Accumulation
from ones_wrapper.gradients.schedule import Schedules
from ones_wrapper.group import Group
from tests.wrapper.forked import Team
from tests.wrapper.steps import EXCHANGES

STEPS = st.lists(st.integers(1, 4), min_size=1, max_size=5)
"""Accumulation steps of each step."""


def model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def batch(step: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(12, 3, generator=generator, dtype=torch.float64).chunk(count))


@given(
    STEPS,
    st.sampled_from(["before", "after", "both", "zeros"]),
    st.sampled_from(["step", "epoch"]),
    st.booleans(),
    st.sampled_from([(False, False), (True, False), (True, True)]),
)
def test_unchanged_loop_ends_as_without_accumulation(
    counts: list[int], zero: str, schedule: str, scheduler_first: bool, scaled_fused: tuple[bool, bool]
) -> None:
    """Protects accumulation in loops as they are: zeroing in either order, schedulers made before or after, stepped by
    step or by epoch, with a gradient scaler or without, which gives fused optimizers the scale beside the gradients
    rather than in them; and torch warns of nothing."""
    scaled, fused = scaled_fused

    def train(split: bool) -> tuple[list[torch.Tensor], float, dict[str, Any]]:
        net, accumulation = model(), Accumulation()
        schedules = Schedules(1, accumulation.due)
        own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
        scaler = accumulation.wrap(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
        if scheduler_first:
            scheduler = schedules.wrap(torch.optim.lr_scheduler.StepLR(own, 2, 0.5))
            optimizer = accumulation.wrap(own)
        else:
            optimizer = accumulation.wrap(own)
            scheduler = torch.optim.lr_scheduler.StepLR(own if scaled else optimizer, 2, 0.5)
        for step, count in enumerate(counts):
            parts = batch(step, count) if split else [torch.cat(batch(step, count))]
            schedules.enter(1)
            for index, x in enumerate(parts):
                with accumulation.during(index, len(parts)):
                    if zero in ("before", "both"):
                        optimizer.zero_grad()
                    loss = net(x).square().sum() / 12
                    if scaled:
                        scaler.scale(loss).backward()
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        loss.backward()
                        optimizer.step()
                    if zero in ("after", "both"):
                        optimizer.zero_grad()
                    elif zero == "zeros":
                        optimizer.zero_grad(set_to_none=False)
                    if schedule == "step" and (scheduler_first or accumulation.updates):
                        scheduler.step()
        accumulation.drop()
        schedules.leave()
        if schedule == "epoch":
            scheduler.step()
        return [p.detach() for p in net.parameters()], own.param_groups[0]["lr"], scaler.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (one, one_lr, one_scale), (other, other_lr, other_scale) = train(False), train(True)
    assert one_lr == other_lr
    assert one_scale == other_scale
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def accumulate(accumulation: Accumulation, net: torch.nn.Module, count: int, run: Callable[[], object]) -> None:
    """A step of `count` accumulation steps; `run` is what the script does after each backward."""
    for index in range(count):
        with accumulation.during(index, count):
            net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
            run()


def test_hooks_run_for_real_steps_alone() -> None:
    """Protects the ramp and the count of steps, which hang on the optimizer's hooks; those of the wrapper are the
    optimizer's own."""
    net, accumulation = model(), Accumulation()
    own = torch.optim.Adam(net.parameters())
    steps: list[int] = []
    optimizer = accumulation.wrap(own)
    own.register_step_post_hook(lambda *_: steps.append(1))
    optimizer.register_step_post_hook(lambda *_: steps.append(2))
    accumulate(accumulation, net, 3, optimizer.step)
    assert steps == [1, 2]
    assert own.state[next(net.parameters())]["step"] == 1
    assert optimizer.state is own.state and optimizer.param_groups is own.param_groups


@pytest.mark.parametrize("guard", [False, True])
def test_clipping_is_refused_where_it_would_be_wrong(guard: bool) -> None:
    """Protects training from clipping a part of the sum of gradients, which no one would see; and lets it pass where
    the script does it once a step."""
    net, accumulation = model(), Accumulation()
    optimizer = accumulation.wrap(torch.optim.SGD(net.parameters(), lr=0.1))

    def run() -> None:
        if accumulation.updates or not guard:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()

    if guard:
        accumulate(accumulation, net, 3, run)
    else:
        with pytest.raises(RuntimeError, match=r"if job\.updates"):
            accumulate(accumulation, net, 3, run)
    accumulate(accumulation, net, 1, run)


def test_guarded_step_and_plain_zeroing() -> None:
    """Protects the gradients of the first accumulation step in a loop that guards its step alone."""
    net, accumulation = model(), Accumulation()
    optimizer = accumulation.wrap(torch.optim.SGD(net.parameters(), lr=0.0))
    norms: list[float] = []
    bias = list(net.parameters())[-1]

    def run() -> None:
        if accumulation.updates:
            assert bias.grad is not None
            norms.append(float(bias.grad))
            optimizer.step()
        optimizer.zero_grad()

    accumulate(accumulation, net, 3, run)
    assert norms == [6.0]
    assert bias.grad is None


@pytest.mark.parametrize("count", [1, 3])
def test_the_unwrapped_optimizer_is_refused(count: int) -> None:
    """Protects training from an optimizer that would step in each accumulation step: it says so at the first step, not
    when the batch grows."""
    net, accumulation = model(), Accumulation()
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulation.wrap(own)
    with pytest.raises(RuntimeError, match=r"optimizer = job\.prepare"):
        accumulate(accumulation, net, count, own.step)
    own.step()  # outside the loop, as torch.distributed.checkpoint does to learn the state


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("moment", ["first", "between", "last"])
def test_zeroing_past_the_wrapper_is_refused(to_none: bool, moment: str) -> None:
    """Protects the gradients of earlier accumulation steps from `model.zero_grad()`, wherever a loop has it; a step of
    one accumulation step takes it."""
    net, accumulation = model(), Accumulation()
    optimizer = accumulation.wrap(torch.optim.SGD(net.parameters(), lr=0.1))

    def step(count: int) -> None:
        for index in range(count):
            with accumulation.during(index, count):
                if moment == "first":
                    net.zero_grad(to_none)
                loss = net(torch.ones(2, 3, dtype=torch.float64)).sum()
                if moment == "between":
                    net.zero_grad(to_none)
                loss.backward()
                optimizer.step()
                if moment == "last":
                    net.zero_grad(to_none)

    step(1)
    with pytest.raises(RuntimeError, match=r"not by the model"):
        step(2)


@pytest.mark.parametrize("fused", [False, True])
def test_unregistered_scaler_is_refused(fused: bool) -> None:
    """Protects the gradients of earlier accumulation steps, which a scaler would divide again in each."""
    net, accumulation = model(), Accumulation()
    optimizer = accumulation.wrap(torch.optim.SGD(net.parameters(), lr=0.1, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"job\.prepare\(model, optimizer, scaler\)"):
        accumulate(accumulation, net, 2, lambda: scaler.step(optimizer))


def test_overflow_leaves_no_gradients_behind() -> None:
    """Protects the steps after one that a scaler skipped: its infinite gradients must go, though no step was made."""
    net, accumulation = model(), Accumulation()
    optimizer = accumulation.wrap(torch.optim.SGD(net.parameters(), lr=0.1))
    scaler = accumulation.wrap(torch.amp.GradScaler("cpu", init_scale=4.0))
    for index in range(2):
        with accumulation.during(index, 2):
            scaler.scale(net(torch.full((1, 3), math.inf * index, dtype=torch.float64)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    assert scaler.get_scale() == 2.0


def test_closures_are_refused() -> None:
    """Protects against an optimizer that would train on its own rank's samples."""
    net, accumulation = model(), Accumulation()
    with pytest.raises(ValueError, match="LBFGS"):
        accumulation.wrap(torch.optim.LBFGS(net.parameters()))
    optimizer = accumulation.wrap(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"a closure is not taken.*call loss\.backward\(\) yourself"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(closure=lambda: 1.0)
    optimizer.step(closure=None)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("left", [1, 2], ids=["midway", "in its last pass"])
def test_a_step_that_is_left_is_dropped(left: int, count: int) -> None:
    """Protects the next step from gradients of one that all ranks left out (`if job.any(bad): continue`)."""
    net, accumulation = model(), Accumulation()
    optimizer = accumulation.wrap(torch.optim.SGD(net.parameters(), lr=0.1))
    found: list[float] = []

    def run() -> None:
        if accumulation.updates:
            found.append(float(list(net.parameters())[-1].grad))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()

    for index in range(left + 1):
        with accumulation.during(index, 3):
            if index < left:  # then a loss is no number
                net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
                run()
    accumulate(accumulation, net, count, run)
    assert found == [2.0 * count]


def test_nothing_is_patched() -> None:
    """Protects checkpoints, copies and readers: what the script made stays as it is, and states are the same through
    the wrappers."""
    net, accumulation = model(), Accumulation()
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler, scaler = torch.optim.lr_scheduler.StepLR(own, 2), torch.amp.GradScaler("cpu")
    things = [own, scheduler, scaler, net]
    before = [(type(thing), set(vars(thing)), thing.state_dict()) for thing in things[:3]]
    wrapped = [accumulation.wrap(thing) for thing in things]
    assert wrapped[1] is scheduler and wrapped[3] is net and "zero_grad" not in vars(net)
    for thing, wrapper, (kind, names, state) in zip(things, wrapped, before, strict=False):
        assert (type(thing), set(vars(thing)), thing.state_dict()) == (kind, names, state)
        wrapper.load_state_dict(wrapper.state_dict())
        assert wrapper.state_dict() == state
    wrapped[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(own.param_groups) == 2


def train_on_rank(
    group: Group, kind: str, order: str, max_local: int, totals: list[int], options: dict[str, Any]
) -> list[float]:
    """An unchanged loop on one rank; the parameters that it ends with."""
    exchange, accumulation = EXCHANGES[kind](group, None), Accumulation()
    schedules = Schedules(1, accumulation.due)
    net = exchange.wrap(model(), **options)
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedules.wrap(torch.optim.lr_scheduler.ExponentialLR(own, 0.9))
    optimizer = accumulation.wrap(own)
    for step, total in enumerate(totals):
        x = torch.randn(total, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        schedules.enter(1)
        for part in step_passes(0, total, Cut(total, group.world, group.rank, max_local)):
            with exchange.during(part), accumulation.during(part.index, part.count):
                if order == "before":
                    optimizer.zero_grad()
                elif order.startswith("model"):
                    net.zero_grad(set_to_none=order == "model")
                loss = net(x[part.start : part.start + max(part.samples, 1)]).square().mean()
                loss.backward()
                if accumulation.updates:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
                optimizer.step()
                if order == "after":
                    optimizer.zero_grad()
                scheduler.step()
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters())
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


@pytest.fixture(scope="module")
def team(teams: dict[int, Team]) -> Team:
    return teams[2]


OPTIONS: list[tuple[str, dict[str, Any]]] = [("ddp", {}), ("ddp", {"gradient_as_bucket_view": True}), ("fsdp", {})]


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("order", ["before", "after"])
def test_accumulation_on_ranks_ends_as_one_pass(team: Team, kind: str, options: dict[str, Any], order: str) -> None:
    """Protects accumulation with a real exchange: uneven ranks and passes, some without samples."""
    totals = [13, 8, 1, 13]
    whole = team.run(train_on_rank, kind, order, 16, totals, options)
    parts = team.run(train_on_rank, kind, order, 2, totals, options)
    assert whole[0] == whole[1]
    assert parts[0] == parts[1] == pytest.approx(whole[0], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("order", ["model", "model, zeros"])
def test_zeroing_by_the_model_is_refused_on_ranks(team: Team, kind: str, options: dict[str, Any], order: str) -> None:
    with pytest.raises(AssertionError, match="not by the model"):
        team.run(train_on_rank, kind, order, 2, [12], options)

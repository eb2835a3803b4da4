"""Fused members against as many trainings of their own, in double precision; and what cannot be fused."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler

import ones_wrapper as ones
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import StrategyLimits
from ones_wrapper.strategies.fusion import Fused, FusedModel, FusedOptimizer, Lamb
from tests.wrapper.waits import NoWaits

pytestmark = pytest.mark.filterwarnings("error")
EXACT = 1e-11
MEMBERS = 4
STEPS = 12

Make = Callable[[nn.Module, int], torch.optim.Optimizer]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3)).double()


def conv() -> nn.Module:
    """No bias before the batch norm: its gradient is rounding alone, which Adam makes steps of."""
    layers = nn.Conv1d(1, 4, 3, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), *layers).double()


class Tied(nn.Module):
    """Two layers with one weight, and a number of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.scale * self.two(torch.tanh(self.one(x))))
        return found


def sgd(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.02 * (i + 1), momentum=0.3 * i, dampening=0.1 * (i == 2), weight_decay=0.01 * (i % 2)
    )


def nesterov(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01 * (i + 1), momentum=0.5 + 0.1 * i, nesterov=True)


def adam(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3 * (i + 1), betas=(0.8 + 0.05 * i, 0.99), weight_decay=0.1 * i)


def adamw(model: nn.Module, i: int) -> torch.optim.Optimizer:
    """Two groups: no decay for vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05 * i}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3 * (i + 1), betas=(0.9, 0.9 + 0.02 * i), eps=10.0 ** -(6 + i))


def lamb(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=0.01 * (i + 1), betas=(0.6 + 0.1 * i, 0.99), weight_decay=0.1 * i)


def members(build: Callable[[], nn.Module], make: Make) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = [build() for _ in range(MEMBERS)]
    return models, [make(model, i) for i, model in enumerate(models)]


def fused_twins(
    models: list[nn.Module], make: Make, loss: Any = cross_entropy
) -> tuple[FusedModel, FusedOptimizer, list[torch.optim.Optimizer]]:
    """Copies, fused, and the optimizers of their own that go with them."""
    twins = copy.deepcopy(models)
    optimizers = [make(twin, i) for i, twin in enumerate(twins)]
    return *ones.strategies.fuse(twins, optimizers, loss=loss), optimizers


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 6, generator=draw, dtype=torch.float64), torch.randint(0, 3, (12,), generator=draw))
        for _ in range(steps)
    ]


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def step_fused(fused: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    losses: torch.Tensor = fused(x, y)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return losses.detach()


def far(one: Any, other: Any) -> float:
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype
        return float((one.detach().double() - other.detach().double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, dict):
        assert list(one) == list(other)
        return max([far(one[key], other[key]) for key in one], default=0.0)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return max([far(a, b) for a, b in zip(one, other, strict=True)], default=0.0)
    if isinstance(one, float):
        return abs(one - other)
    assert one == other
    return 0.0


@pytest.mark.parametrize(
    ("build", "make"),
    [(mlp, sgd), (mlp, nesterov), (mlp, adam), (mlp, adamw), (mlp, lamb), (conv, sgd), (conv, adamw), (Tied, lamb)],
)
def test_fused_members_train_as_each_alone(build: Callable[[], nn.Module], make: Make) -> None:
    models, alone = members(build, make)
    fused, optimizer, _ = fused_twins(models, make)
    for x, y in batches():
        apart = [step_alone(m, o, x, y) for m, o in zip(models, alone, strict=True)]
        assert step_fused(fused, optimizer, x, y).tolist() == pytest.approx(apart, abs=EXACT)
    for i, (model, its) in enumerate(zip(models, alone, strict=True)):
        found = optimizer.member(str(i))
        assert far(found, {"model": dict(model.state_dict()), "optimizer": its.state_dict()}) < EXACT
    fused.eval()
    for model in models:
        model.eval()
    x, _ = batches(1)[0]
    assert far(fused(x), torch.stack([model(x) for model in models])) < EXACT


def test_own_schedules() -> None:
    """A member's schedule is an ordinary one of its own optimizer; a factor of all acts beside it."""
    models, alone = members(mlp, adamw)
    fused, optimizer, theirs = fused_twins(models, adamw)

    def schedules(of: list[torch.optim.Optimizer]) -> list[LRScheduler]:
        return [CosineAnnealingLR(one, T_max=STEPS) if i % 2 else ExponentialLR(one, 0.9) for i, one in enumerate(of)]

    plans, fused_plans = schedules(alone), schedules(theirs)
    for count, (x, y) in enumerate(batches()):
        for model, its, plan in zip(models, alone, plans, strict=True):
            kept = [group["lr"] for group in its.param_groups]
            for group in its.param_groups:
                group["lr"] *= 1 + count % 3
            step_alone(model, its, x, y)
            for group, lr in zip(its.param_groups, kept, strict=True):
                group["lr"] = lr
            plan.step()
        for group in optimizer.param_groups:
            group["lr"] = float(1 + count % 3)
        step_fused(fused, optimizer, x, y)
        for plan in fused_plans:
            plan.step()
    for i, model in enumerate(models):
        assert far(fused.member(str(i)), dict(model.state_dict())) < EXACT


def test_a_stopped_member_stays_as_it_is_and_the_others_go_on() -> None:
    models, alone = members(conv, adamw)
    fused, optimizer, _ = fused_twins(models, adamw)
    trained = list(range(MEMBERS))
    computed: list[int] = []

    def count_members(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        computed.append(torch._C._functorch.get_unwrapped(output).numel())

    fused.stack.get_submodule("1").register_forward_hook(count_members)
    for count, (x, y) in enumerate(batches()):
        if count in (4, 8):
            gone = trained.pop(0)
            fused.stop(str(gone))
        for i in trained:
            step_alone(models[i], alone[i], x, y)
        losses = step_fused(fused, optimizer, x, y)
        assert [i for i in range(MEMBERS) if losses[i]] == trained
    for i, (model, its) in enumerate(zip(models, alone, strict=True)):
        found = optimizer.member(str(i))
        assert far(found, {"model": dict(model.state_dict()), "optimizer": its.state_dict()}) < EXACT
    # What is stopped is not computed.
    assert computed[-1] * MEMBERS == computed[0] * len(trained)
    before = copy.deepcopy(fused.state_dict())
    for name in fused.members:
        if fused.active[fused.row(name)]:
            fused.stop(name)
    x, y = batches(1)[0]
    assert not step_fused(fused, optimizer, x, y).any()
    assert far(dict(fused.state_dict()), dict(before)) == 0


def test_a_step_never_waits_for_the_gpu() -> None:
    """Protects the head start of the processor, with all members and after one has stopped."""
    models = [nn.Linear(4, 3) for _ in range(3)]
    fused, optimizer = ones.strategies.fuse(
        models, [adamw(model, i) for i, model in enumerate(models)], loss=scaled, values={"by": [1.0, 2.0, 3.0]}
    )
    x, y = (torch.ones(5, size, device="meta") for size in (4, 3))
    fused.to("meta")
    for left in (["0", "1", "2"], ["0", "2"]):
        assert [fused.members[row] for row in fused.rows()] == left
        with NoWaits("meta"):
            fused(x, y).sum().backward()
            optimizer.step()
        fused.stop("1")


def scaled(output: torch.Tensor, target: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean() * by


def test_the_state_of_all_goes_on_where_it_was() -> None:
    """What a checkpoint of the job holds: model and optimizer, with the members' numbers and who is stopped."""
    models, _ = members(mlp, adamw)
    fused, optimizer, theirs = fused_twins(models, adamw)
    plans = [ExponentialLR(one, 0.8) for one in theirs]
    for x, y in batches(5):
        step_fused(fused, optimizer, x, y)
        for plan in plans:
            plan.step()
    fused.stop("2")
    saved = copy.deepcopy((fused.state_dict(), optimizer.state_dict()))
    other, its, others = fused_twins(members(mlp, adamw)[0], adamw)
    other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    assert other.active == [True, True, False, True]
    assert [o.param_groups[1]["lr"] for o in others] == [o.param_groups[1]["lr"] for o in theirs]
    for x, y in batches(3):
        step_fused(fused, optimizer, x, y)
        step_fused(other, its, x, y)
    assert far(dict(other.state_dict()), dict(fused.state_dict())) == 0


@pytest.mark.parametrize("make", [sgd, adamw, lamb])
def test_members_leave_for_ordinary_scripts_and_come_back(make: Make, tmp_path: Path) -> None:
    models, alone = members(conv, make)
    fused, optimizer, _ = fused_twins(models, make)
    for x, y in batches(8):
        step_fused(fused, optimizer, x, y)
    optimizer.save(tmp_path / "results")
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [f"{i}.pt" for i in range(MEMBERS)]
    for i, (model, its) in enumerate(zip(models, alone, strict=True)):
        saved = torch.load(tmp_path / "results" / f"{i}.pt")  # weights_only: plain data
        model.load_state_dict(saved["model"])
        its.load_state_dict(saved["optimizer"])
    for x, y in batches(8):
        step_fused(fused, optimizer, x, y)
        for model, its in zip(models, alone, strict=True):
            step_alone(model, its, x, y)
    for i, model in enumerate(models):
        assert far(fused.member(str(i)), dict(model.state_dict())) < EXACT
    # And back: one that trained alone joins others that have never stepped.
    other, others, _ = fused_twins(members(conv, make)[0], make)
    others.load_member("1", {"model": models[1].state_dict(), "optimizer": alone[1].state_dict()})
    for x, y in batches(8):
        step_fused(other, others, x, y)
        step_alone(models[1], alone[1], x, y)
    assert far(other.member("1"), dict(models[1].state_dict())) < EXACT


def test_own_losses() -> None:
    models, alone = members(mlp, adamw)
    smoothing = [0.0, 0.1, 0.2, 0.3]
    own = [partial(cross_entropy, label_smoothing=value) for value in smoothing]

    def smoothed(output: torch.Tensor, target: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
        return (1 - smooth) * cross_entropy(output, target) - smooth * output.log_softmax(1).mean()

    twins = copy.deepcopy(models)
    of_values = ones.strategies.fuse(
        twins, [adamw(m, i) for i, m in enumerate(twins)], loss=smoothed, values={"smooth": smoothing}
    )
    listed = fused_twins(models, adamw, own)
    for x, y in batches(10):
        for model, its, loss in zip(models, alone, own, strict=True):
            its.zero_grad()
            loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            its.step()
        step_fused(*of_values, x, y)
        step_fused(*listed[:2], x, y)
    for i, model in enumerate(models):
        assert far(of_values[0].member(str(i)), dict(model.state_dict())) < EXACT
        assert far(listed[0].member(str(i)), dict(model.state_dict())) < EXACT


def test_dropout_and_clipping_are_each_members_own() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    models = [copy.deepcopy(model) for _ in range(3)]
    made = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    fused, _ = ones.strategies.fuse(models, made, loss=cross_entropy)
    x, y = batches(1)[0]
    losses = fused(x, y)
    assert len(set(losses.tolist())) == 3
    same, _ = ones.strategies.fuse(models, made, loss=cross_entropy, randomness="same")
    assert len(set(same(x, y).tolist())) == 1

    (losses * torch.tensor([1.0, 100.0, 0.01])).sum().backward()
    before = [p.grad.clone() for p in fused.parameters() if p.grad is not None]
    norms = fused.clip_grad_norm_(1.0)
    for i in range(3):
        its = [nn.Parameter(torch.zeros_like(g[i])) for g in before]
        for p, g in zip(its, before, strict=True):
            p.grad = g[i].clone()
        assert float(nn.utils.clip_grad_norm_(its, 1.0)) == pytest.approx(float(norms[i]))
        found = [p.grad[i] for p in fused.parameters() if p.grad is not None]
        assert far(found, [p.grad for p in its]) < 1e-12


def test_a_member_that_diverges_harms_no_other() -> None:
    models, alone = members(mlp, adamw)
    fused, optimizer, _ = fused_twins(models, adamw)
    with torch.no_grad():
        next(fused.parameters())[0].fill_(torch.nan)
    for x, y in batches(5):
        losses = step_fused(fused, optimizer, x, y)
        for model, its in zip(models[1:], alone[1:], strict=True):
            step_alone(model, its, x, y)
    assert losses.isnan().tolist() == [True, False, False, False]
    for i in range(1, MEMBERS):
        assert far(fused.member(str(i)), dict(models[i].state_dict())) < EXACT


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3)).double()


def gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3)).double()


def drop(p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Dropout(p)).double()


class Scaled(nn.Linear):
    def __init__(self, by: float) -> None:
        super().__init__(6, 3)
        self.by = by


def fuse_two(one: nn.Module, other: nn.Module, make: Make = adamw) -> None:
    ones.strategies.fuse({"a": one, "b": other}, {"a": make(one, 0), "b": make(other, 1)}, loss=cross_entropy)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (mlp(), wide(), "member 'b' .* setting of 0 is in_features=6, out_features=10"),
        (mlp(), gelu(), "member 'b' .* type of 2 is .*GELU, and .*Tanh"),
        (mlp(), mlp().float(), "member 'b' .* type of 0.weight is torch.float32"),
        (drop(0.1), drop(0.2), "member 'b' .* p=0.2"),
        (Scaled(1.0), Scaled(2.0), "member 'b' .*: by is 2.0, and 1.0 there"),
    ],
)
def test_unlike_members_are_refused_by_name(one: nn.Module, other: nn.Module, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fuse_two(one, other)


def test_what_else_is_refused() -> None:
    one, other = mlp(), mlp()
    with pytest.raises(ValueError, match="share a parameter"):
        fuse_two(one, one)
    with pytest.raises(ValueError, match="kind of optimizer"):
        fuse_two(one, other, lambda m, i: adam(m, i) if i else sgd(m, i))
    with pytest.raises(ValueError, match="'b' has nesterov=True"):
        fuse_two(one, other, lambda m, i: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=bool(i)))
    with pytest.raises(ValueError, match="amsgrad=True of member 'a'"):
        fuse_two(one, other, lambda m, i: torch.optim.Adam(m.parameters(), amsgrad=True))
    with pytest.raises(ValueError, match=r"Rprop.*SGD, Adam, AdamW and ones_wrapper.strategies.fusion.Lamb"):
        fuse_two(one, other, lambda m, i: torch.optim.Rprop(m.parameters()))
    with pytest.raises(ValueError, match="2 losses for 4 members"):
        fused_twins([mlp() for _ in range(4)], adamw, [cross_entropy] * 2)
    with pytest.raises(ValueError, match="cannot be a member's name"):
        ones.strategies.fuse({"a/b": one}, {"a/b": adam(one, 0)}, loss=cross_entropy)
    with pytest.raises(KeyError, match="no member 'x'; there are 0, 1"):
        fused_twins([mlp(), mlp()], adamw)[0].stop("x")


def test_the_strategy_says_what_all_members_take() -> None:
    spec = Spec(32, 256, 64, 0, 1)
    assert Fused(4).limits(spec, 8, 4) == StrategyLimits("fused")
    rows = Fused(4, parameter_bytes=1000, sample_bytes=10).limits(spec, 8, 4).sizes
    assert [row.gpus for row in rows] == [row.replicas for row in rows] == list(range(1, 9))
    assert (rows[3].fixed_bytes, rows[3].sample_bytes, rows[3].data_bytes, rows[0].data_bytes) == (16000, 40, 6000, 0)
    with pytest.raises(ValueError, match="fused: members=0"):
        Fused(0)


def test_results_are_durable_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects results: a member's job ends as soon as its file is there, and a power cut must not empty that."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    def renamed(path: Path, to: Path) -> Path:
        done.append("renamed")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    _, optimizer, _ = fused_twins(members(mlp, sgd)[0], sgd)
    (tmp_path / ".0.pt.part").write_bytes(b"of a run that was killed")
    optimizer.save(tmp_path, "0")
    assert done == [str(tmp_path / ".0.pt.part"), "renamed", str(tmp_path)]

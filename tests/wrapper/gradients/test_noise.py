"""The gradient noise scale that a run reports, and the progress that follows from it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.gradients import noise
from ones_wrapper.gradients.noise import EVERY, FIRST, LEAST, PENDING, NoiseScale
from ones_wrapper.group import Group
from ones_wrapper.protocol import Hello, Throughput
from tests.marks import nightly
from tests.wrapper.forked import Team
from tests.wrapper.runs import reports_in
from tests.wrapper.steps import EXCHANGES, passes_of

pytestmark = pytest.mark.slow


def linear() -> tuple[torch.Tensor, torch.Tensor, nn.Module, float]:
    """A regression, a model that stays where it is, and the true noise scale there."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 8, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 2.0 * torch.randn(4096, 1, generator=generator, dtype=torch.float64)
    plain = nn.Linear(8, 1, bias=False).double()
    nn.init.zeros_(plain.weight)
    each = -2.0 * y * x  # of the squared error
    return x, y, plain, float(each.var(0).sum() / each.mean(0).square().sum())


def test_a_run_reports_it_and_the_next_one_knows_it(tmp_path: Path) -> None:
    """With the progress that follows from it: at the base batch every sample counts whole."""
    x, y, plain, true = linear()

    def body() -> int | None:
        start = int(os.environ["SLURM_RESTART_COUNT"])
        job = ones.init(batch=16, max_batch=64, epochs=1 + start)
        model = job.ddp(plain)
        optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        loader = job.loader(TensorDataset(x, y), seed=3)
        for _ in job.epochs():
            for inputs, target in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), target).backward()
                optimizer.step()
        return None if start else 1

    testing.run(body, ranks=2, env={"ONES_JOB_DIR": str(tmp_path), "ONES_REPORT_EVERY_S": "0.2"})
    last = [one for one in reports_in(tmp_path / "reports-0.jsonl") if isinstance(one, Throughput)][-1]
    assert last.noise == pytest.approx(true, rel=0.5)
    assert last.progress == last.epoch * 4096 + last.cursor
    hello = next(one for one in reports_in(tmp_path / "reports-1.jsonl") if isinstance(one, Hello))
    assert hello.noise == pytest.approx(last.noise, rel=0.2)
    assert hello.progress == 4096


def noise_scale(group: Group, kind: str, passes_each: int, steps: int) -> tuple[float, float]:
    """The measured noise scale of a linear model that stays where it is, and its true one."""
    x, y, plain, true = linear()
    noise = NoiseScale(group)
    exchange = EXCHANGES[kind](group, noise)
    model = exchange.wrap(plain)
    sizes = [[4] * passes_each] * group.world
    batch = 4 * passes_each * group.world
    for step in range(steps):
        for part in passes_of(sizes, group.rank, step * batch):
            chosen = torch.arange(part.start, part.start + part.samples) % len(x)
            with exchange.during(part):
                nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
        noise.step(batch)
        model.zero_grad()
    noise.exchange()
    assert noise.samples is not None
    return noise.samples, true


@pytest.mark.parametrize(
    ("kind", "world", "passes_each"),
    [
        ("ddp", 2, 1),
        nightly("ddp", 1, 1),
        nightly("ddp", 3, 2),
        ("fsdp", 1, 3),
        nightly("fsdp", 2, 1),
        nightly("fsdp", 3, 2),
    ],
)
def test_the_noise_scale_is_the_true_one(teams: dict[int, Team], kind: str, world: int, passes_each: int) -> None:
    """tr(Σ)/|G|² of the per-sample gradients, as near as a few hundred steps tell."""
    for found, true in teams[world].run(noise_scale, kind, passes_each, 300):
        assert found == pytest.approx(true, rel=0.25)


@pytest.mark.parametrize("autocast", [False, True])
def test_squares_are_added_up_together(autocast: bool) -> None:
    """Protects: the estimates are those of each step on its own, whatever the dtypes of buckets and however many. A
    script may hold its whole loop under autocast."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _add_up()


def _add_up() -> None:
    noise = NoiseScale(cast(Group, SimpleNamespace(rank=0, world=2, total=list)))
    torch.manual_seed(1)
    trace = square = 0.0
    for _ in range(PENDING):
        for bucket, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
            own, mean = 3 + 2 * torch.randn(5, dtype=dtype), 3 + torch.randn(5, dtype=dtype) / 2
            noise.local(bucket, own, 8, 8)
            noise.whole(mean, 8)
            small, large = (float(one.double().square().sum()) for one in (own, mean))
            trace += 8 * (small - large)
            square += 2 * large - small
        noise.step(8)
    noise.exchange()
    assert noise.samples == pytest.approx(trace / square, rel=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_most_steps_are_not_measured(world: int) -> None:
    """Protects throughput, and the estimate: of each `EVERY` steps one counts, on its own or beside the step before."""
    noise = NoiseScale(cast(Group, SimpleNamespace(rank=0, world=world, total=list)))
    looked = []
    for number in range(FIRST, FIRST + 2 * EVERY + 1):
        noise.begin(number)
        if noise.looks:
            looked.append(number - FIRST)
        gradient = torch.tensor([1.0, 3.0 if number % 2 else 1.0])
        noise.local(0, gradient, 8 if world == 1 else 4, 8)
        noise.whole(torch.tensor([1.0, 1.0]), 8)
        noise.step(8)
    assert looked == ([0, 3, 4, 7, 8] if world == 1 else [0, 4, 8])
    # Alone: two differences, of 2 in one of two numbers. Two ranks: their gradients are one in even steps.
    assert noise._steps == (2 if world == 1 else 3)
    noise.exchange()
    assert noise.samples == pytest.approx(8 * 4 / 2 / 4 if world == 1 else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_square_without_cublas_is_the_same(dtype: torch.dtype) -> None:
    """Protects the memory of rank 0's GPU from workspaces on 32 streams, and a model with complex parameters (a Fourier
    neural operator) from an error in its first step."""
    gradient = torch.linspace(-3.0, 5.0, 60).reshape(3, 4, 5).to(dtype) * (1 + 2j if dtype.is_complex else 1)
    expected = gradient.abs().double().square().sum()
    for found in (noise._square_by_norm(gradient), noise._dot(gradient, gradient)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("steps", [4, 20])
def test_the_lower_bound_is_mostly_below(steps: int) -> None:
    """Protects growth from an estimate that is too large by chance: of many runs four in five have a larger noise scale
    than the bound says, and with few steps it is further below. Nothing is known of few windows."""
    generator, below, bounds = torch.Generator().manual_seed(5), 0, []
    true = 8 * 20 * 0.5**2 / 1.0  # tr(Σ)/|G|² in samples: deviation 0.5 of a mean over 8, in 20 numbers, |G| = 1
    mean = torch.full((20,), 20**-0.5)
    for _ in range(60):
        noise = NoiseScale(cast(Group, SimpleNamespace(rank=0, world=1, total=list)))
        for window in range(10):
            for _ in range(steps):
                noise.begin(0)
                noise.local(0, mean + 0.5 * torch.randn(20, generator=generator), 8, 8)
                noise.step(8)
            noise.exchange()
            assert (noise.low > 0) <= (window >= LEAST - 1)
        below += noise.low < true
        bounds.append(noise.low)
    assert 40 <= below <= 58
    assert (sorted(bounds)[30] < 0.9 * true) == (steps == 4)
    noise.ranks_changed(7.0, 5.0)
    assert (noise.samples, noise.low) == (7.0, 5.0)


def test_a_run_s_first_gradients_do_not_outweigh_later_ones() -> None:
    """Protects growth from a noise scale that seems small for long, since the first gradients were ten times as long.
    Without it the estimate is a hundredth of the true one here."""
    generator = torch.Generator().manual_seed(2)
    noise = NoiseScale(cast(Group, SimpleNamespace(rank=0, world=1, total=list)))
    for number in range(400):
        noise.begin(number)
        mean = torch.full((200,), (1.0 if number < FIRST else 0.1) / 200**0.5)
        noise.local(0, mean + 0.01 * torch.randn(200, generator=generator), 8, 8)
        noise.step(8)
        if number % 20 == 19:
            noise.exchange()
    true = 8 * 200 * 0.01**2 / 0.1**2
    assert noise.samples == pytest.approx(true, rel=0.1)
    assert true / 1.2 < noise.low <= noise.samples

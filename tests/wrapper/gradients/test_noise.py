"""The gradient noise scale that a run reports, and the progress that follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ones_wrapper.gradients import noise
from ones_wrapper.gradients.noise import EVERY, FIRST, LEAST, PENDING, NoiseScale
from ones_wrapper.group import Group
from ones_wrapper.protocol import Hello, Throughput
from tests.marks import nightly
from tests.wrapper.runs import Run

pytestmark = pytest.mark.slow

NOISY = Path(__file__).parents[1] / "noisy.py"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two ranks, that has ended."""
    return ended(tmp_path_factory.mktemp("two"), 2)


def ended(folder: Path, ranks: int, restart: int = 0) -> Run:
    run = Run(folder, ranks=ranks, restart=restart, script=NOISY)
    assert run.end() == 0, run.errors
    return run


@pytest.mark.parametrize("ranks", [nightly(1), 2, nightly(3)])
def test_the_noise_scale_is_the_true_one(tmp_path: Path, two: Run, ranks: int) -> None:
    """On one rank, on two, and on three with unequal shares: what is reported is tr(Σ)/|G|² of the per-sample
    gradients, as near as a few hundred steps tell."""
    run = two if ranks == 2 else ended(tmp_path, ranks)
    true = json.loads((run.job_dir / "true-noise").read_text())
    told = [report.noise for report in run.of(Throughput) if report.noise is not None]
    assert told[-1] == pytest.approx(true, rel=0.35)
    samples = run.of(Throughput)[-1].epoch * 4096 + run.of(Throughput)[-1].cursor
    assert run.of(Throughput)[-1].progress == samples, "at the base batch every sample counts whole"


def test_it_outlives_a_restart(two: Run) -> None:
    """The next run begins with what the last one knew, and with its progress."""
    last, hello = two.of(Throughput)[-1], ended(two.job_dir, 1, restart=1).of(Hello)[0]
    assert hello.noise == pytest.approx(last.noise, rel=0.2)
    assert hello.progress == 3 * 4096


def test_squares_are_added_up_together() -> None:
    """Protects: the estimates are those of each step on its own, whatever the dtypes of buckets and however many."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_square_without_cublas_is_the_same(dtype: torch.dtype) -> None:
    """Protects the memory of rank 0's GPU from workspaces on 32 streams."""
    gradient = torch.linspace(-3.0, 5.0, 60, dtype=dtype).reshape(3, 4, 5)
    torch.testing.assert_close(noise._square_by_norm(gradient), noise._dot(gradient, gradient))


@pytest.mark.parametrize("steps", [4, 60])
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

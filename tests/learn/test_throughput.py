"""The throughput model: ONES' curve, other batches, larger sizes, and figures that make no sense."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ones.learn.throughput import MeasuredThroughput, Measurement


def measured(gpus: int, speed: float, *, local: int = 64, time: float = 0.0) -> Measurement:
    return Measurement(1, gpus, local * gpus, speed, time)


def at(model: MeasuredThroughput, gpus: int, batch: int | None = None) -> float:
    batches = np.array([64 * gpus if batch is None else batch])
    return float(model.throughput(np.array([gpus]), batches)[0])


def test_mean_of_the_last_five_at_each_size() -> None:
    """An old slow stretch (a cold cache) does not weigh on the figure for ever, whatever order lines come
    in.
    """
    lines = [measured(2, speed, time=float(t)) for t, speed in enumerate([1.0, 100, 110, 120, 130, 140])]
    assert at(MeasuredThroughput(lines[::-1]), 2) == pytest.approx(120.0)


def test_linear_between_sizes_and_from_zero() -> None:
    """As published: linear between measured sizes, anchored at (0, 0)."""
    model = MeasuredThroughput([measured(2, 200.0), measured(8, 500.0)])
    assert [at(model, n) for n in (1, 2, 5, 8)] == pytest.approx([100.0, 200.0, 350.0, 500.0])
    assert at(model, 0) == 0.0


def test_larger_sizes_are_worth_trying_but_bounded() -> None:
    """Beyond one measured size each doubling promises more, and never as much as twice."""
    model = MeasuredThroughput([measured(1, 100.0)])
    speeds = [at(model, n) for n in (1, 2, 4, 8, 16)]
    ratios = [b / a for a, b in pairwise(speeds)]
    assert ratios == pytest.approx([2**0.8] * 4)


def test_measured_scaling_replaces_optimism() -> None:
    """A job that gained nothing from 2 → 4 GPUs is not promised anything at 8; nor is noise a promise."""
    assert at(MeasuredThroughput([measured(2, 200.0), measured(4, 200.0)]), 8) == pytest.approx(200.0)
    assert at(MeasuredThroughput([measured(2, 200.0), measured(4, 150.0)]), 16) == pytest.approx(150.0)
    superlinear = MeasuredThroughput([measured(2, 200.0), measured(4, 500.0)])
    assert at(superlinear, 8) < 1000.0


def test_other_batches_follow_the_step_time() -> None:
    """Steps of 0.1 s + 1 ms a sample measured at two batches predict a third at the same size."""

    def speed(local: int) -> float:
        return local / (0.1 + 0.001 * local)

    lines = [measured(1, speed(local), local=local) for local in (32, 128)]
    model = MeasuredThroughput(lines)
    assert at(model, 1, 64) == pytest.approx(speed(64), rel=0.02)
    assert at(model, 1, 256) == pytest.approx(speed(256), rel=0.05)
    assert at(model, 1, 10**9) < 2 * speed(512), "no faster for ever with the batch"


def test_a_fixed_batch_over_more_gpus_gets_slower_per_gpu() -> None:
    """With the global batch fixed, the overhead that two sizes showed bounds what a third can bring."""
    lines = [Measurement(1, n, 64, 64 / (0.1 + 0.001 * 64 / n), 0.0) for n in (1, 2)]
    model = MeasuredThroughput(lines)
    assert at(model, 4, 64) == pytest.approx(64 / (0.1 + 0.001 * 16), rel=0.25)


def test_nothing_measured_is_a_cautious_guess() -> None:
    """A job without a figure gets the prior, and no prior that makes no sense."""
    assert at(MeasuredThroughput([]), 1) == 1.0
    assert at(MeasuredThroughput([], prior_per_gpu=50.0), 1) == 50.0
    assert at(MeasuredThroughput([], prior_per_gpu=math.nan), 1) == 1.0
    assert MeasuredThroughput([]).measured == ()


def test_nonsense_costs_that_figure_alone() -> None:
    """Zero, negative, infinite and absurd figures leave the good ones as they are."""
    bad = [0.0, -5.0, math.nan, math.inf, 1e300]
    lines = [measured(2, 200.0), *(measured(2, speed, time=9.0) for speed in bad)]
    lines += [
        Measurement(0, 2, 64, 9.0, 9.0),
        Measurement(1, 2, 0, 9.0, 9.0),
        measured(2, 9.0, time=math.nan),
    ]
    assert at(MeasuredThroughput(lines), 2) == pytest.approx(200.0)


anything = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-9, 1e11)
lines = st.builds(Measurement, st.integers(-1, 40), st.integers(-1, 8), st.integers(-1, 2**40), anything, anything)


@settings(max_examples=60, deadline=None)
@given(st.lists(lines, max_size=25))
def test_always_finite_and_never_negative(measurements: list[Measurement]) -> None:
    """Whatever a job reports, a policy gets numbers it can compute with, in the shape it asked for."""
    gpus, batches = np.array([0, 1, 2, 7, 64, 4096]), np.array([0, 1, 64, 500, 10**6, 2**40])
    speeds = MeasuredThroughput(measurements).throughput(gpus, batches)
    assert speeds.shape == gpus.shape
    assert np.isfinite(speeds).all()
    assert (speeds >= 0).all()

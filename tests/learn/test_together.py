"""Models of many jobs, asked at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import ThroughputPoint
from ones_db.shape import Shape
from slurm_ones.learn.step_time import CAUTIOUS, PLAIN, StepLayout, fit_all
from slurm_ones.learn.throughput import MeasuredThroughput, points_of

SIZES = np.array([1, 2, 4, 8, 16])
RING = StepLayout(
    64.0,
    np.array([2, 4, 8]),
    np.array([1.0, 2.0, 4.0]),
    np.array([32.0, 32.0, 16.0]),
    np.array([0.01, 0.01, 0.01]),
    np.array([0.0, 0.1, 0.1]),
)


@st.composite
def models(draw: st.DrawFn) -> MeasuredThroughput:
    """A job that measured nothing, one size or several, alone or beside peers, laid out in one way or another."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=4, unique=True))
    power = draw(st.sampled_from([0.5, 0.8, 1.2]))
    layout = draw(st.sampled_from([PLAIN, StepLayout(32.0), StepLayout(32.0, gradient_gb=0.4), RING]))
    measured = [ThroughputPoint(Shape(max(n // 4, 1), min(n, 4)), 64 * n, 100.0 * n**power, float(n)) for n in sizes]
    fit = fit_all([(points_of(measured, 64.0, layout), 64.0, CAUTIOUS)])[0]
    peers = replace(CAUTIOUS, mean=CAUTIOUS.mean + 0.1) if draw(st.booleans()) else None
    return MeasuredThroughput(fit, layout, peers)


@given(st.lists(models(), min_size=1, max_size=6))
def test_asked_together_they_say_what_each_says_alone(jobs: list[MeasuredThroughput]) -> None:
    gpus = np.tile(SIZES, (len(jobs), 1))
    asked = (np.maximum(gpus // 4, 1), gpus, 48 * gpus)
    together = MeasuredThroughput.together(jobs)
    for name in ("throughput", "uncertainty", "plausible"):
        found = getattr(together, name)(*asked)
        assert np.isfinite(found).all()
        for j, job in enumerate(jobs):
            alone = getattr(job, name)(*(array[j] for array in asked))
            assert found[j] == pytest.approx(alone, rel=1e-9)


def test_shapes_of_arrays_stay() -> None:
    model = MeasuredThroughput.of()
    gpus = np.array([[1, 2], [4, 0]])
    found = model.throughput(np.ones_like(gpus), gpus, 64 * gpus)
    assert found.shape == (2, 2) and found[1, 1] == 0 and (found.ravel()[:3] > 0).all()

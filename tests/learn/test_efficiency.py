"""Statistical efficiency from the gradient noise scale."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_ones.learn.histories import LEAST, MOST, NoiseEfficiency, noise_ratio


def test_a_sample_is_worth_less_in_a_larger_batch() -> None:
    """(noise + M0)/(noise + M): at noise = M0 twice the batch is worth 2/3 a sample; never above 1."""
    model = NoiseEfficiency(64, 64.0)
    batches = np.array([[1, 64], [128, 10**9]])
    assert model.efficiency(batches) == pytest.approx(np.array([[1.0, 1.0], [2 / 3, 128 / (64 + 1e9)]]))
    assert (NoiseEfficiency(64, math.inf).efficiency(batches) == 1.0).all()
    assert NoiseEfficiency(64, 0.0).efficiency(np.array([256]))[0] == 0.25
    assert NoiseEfficiency(64, 64.0, 128).efficiency(batches) == pytest.approx(
        np.array([[1.0, 1.0], [1.0, 128 / (64 + 1e9)]])
    )


def test_the_newest_reports_are_averaged_robustly() -> None:
    """One report of a step whose gradient was nearly zero does not make all batches equal; nonsense does not count."""
    assert noise_ratio(10, [20.0, 21.0, 1e9, 19.0, 20.0]) == 2.0
    assert noise_ratio(10, [math.nan, math.inf, 0.0, -3.0]) is None
    assert noise_ratio(10, []) is None
    assert (noise_ratio(10, [1e300]), noise_ratio(10, [1e-300])) == (MOST, LEAST)

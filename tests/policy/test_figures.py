"""How much faster a job is expected to train after a change."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from ones_db.shape import PARKED, Shape
from slurm_ones.policy.contract import Floats, Ints
from slurm_ones.policy.tables import expected_gain
from slurm_ones.testing.rounds import job


@dataclass(frozen=True)
class Speed:
    """10 samples/s a GPU, without doubt."""

    each: float = 10.0

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return self.each * gpus.astype(float)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return np.zeros(np.shape(gpus))


class Half:
    """A sample of a batch above 64 is worth half of one."""

    def efficiency(self, batches: Ints) -> Floats:
        return np.where(batches > 64, 0.5, 1.0)


def test_the_expected_gain_counts_useful_samples() -> None:
    """Protects the job's log: more GPUs with a batch that is worth less are not as much faster as they are busier."""
    one = job(1, {"n1": 1}, model=Speed(), efficiency=Half(), batch=64)
    assert expected_gain(one, Shape(1, 4), 64) == 4.0
    assert expected_gain(one, Shape(1, 4), 128) == 2.0
    assert expected_gain(one, Shape(1, 4), None) == 4.0
    # Its GPUs hold no more than 256 samples each.
    assert expected_gain(one, Shape(1, 1), 100_000) == 0.5


@pytest.mark.parametrize("each", [0.0, math.nan, math.inf])
def test_no_gain_is_better_than_a_wrong_one(each: float) -> None:
    """Protects orders from numbers that JSON does not have."""
    assert expected_gain(job(1, {"n1": 1}, model=Speed(each)), Shape(1, 4), 64) is None
    assert expected_gain(job(1, model=Speed()), Shape(1, 4), 64) is None
    assert expected_gain(job(1, {"n1": 1}, model=Speed()), PARKED, None) is None
    assert expected_gain(None, Shape(1, 4), 64) is None

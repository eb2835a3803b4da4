"""Statistical efficiency, as far as ONES has it."""

from __future__ import annotations

import numpy as np

from slurm_ones.learn.efficiency import ConstantEfficiency


def test_every_batch_is_worth_the_same() -> None:
    """ONES counts samples: no batch is better, and the result has the shape that was asked for."""
    batches = np.array([[1, 64], [10**6, 2]])
    assert (ConstantEfficiency().efficiency(batches) == np.ones((2, 2))).all()

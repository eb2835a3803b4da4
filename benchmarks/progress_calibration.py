"""Whether the progress model keeps what it promises: its predictions beside what then came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slurm_ones.learn.progress import LEVELS, BetaProgress, FinishedJob
from slurm_ones.policy.contract import Floats


@dataclass(frozen=True)
class Calibration:
    """Predictions and truth at each moment of each job that was held out, (moments,) each."""

    predicted: Floats
    """Epochs to come, as β says."""
    true: Floats
    low: Floats
    high: Floats
    """Ends of the interval that is to hold the truth in 80 % of the cases."""

    @property
    def coverage(self) -> float:
        """How often the interval held the truth, an end within a hundredth."""
        return float(np.mean((self.low <= 1.01 * self.true) & (self.true <= 1.01 * self.high)))

    @property
    def error(self) -> float:
        """Median of |log(predicted / true)|."""
        return float(np.median(np.abs(np.log(self.predicted / self.true))))

    @property
    def width(self) -> float:
        """Median of log(high / low)."""
        return float(np.median(np.log(self.high / np.maximum(self.low, 1e-9))))


def calibration(finished: Sequence[FinishedJob], *, blocks: int = 8, seed: int = 0) -> Calibration:
    """Predictions for each block of jobs, in the order in which they finished, by a model that knows those before.

    The first block only teaches. Epochs in which nothing was left to come do not count. Raises `ValueError` where there
    are fewer jobs than blocks, or none had an epoch to predict.
    """
    if len(finished) < blocks or blocks < 2:
        raise ValueError(f"{len(finished)} finished jobs cannot be cut in {blocks} blocks of which one teaches")
    edges = np.linspace(0, len(finished), blocks + 1).astype(int)
    rows: list[tuple[float, float, float, float]] = []
    for first, last in pairwise(edges[1:]):
        model = BetaProgress(finished[:first], seed)
        for job in finished[first:last]:
            for now in job.history:
                if 0 < now.epochs < job.epochs:
                    found = model.progress(now, job.declared)
                    low, high = (found.to_come(level) for level in LEVELS)
                    rows.append((found.beta, job.epochs - now.epochs, low, high))
    if not rows:
        raise ValueError("no held-out job had an epoch before its last")
    return Calibration(*np.array(rows).T)

"""Who fares worse than alone on a fair share of the cluster (finish-time fairness, Themis, NSDI 2020 §3)."""

from __future__ import annotations

import numpy as np

from slurm_ones.schedule.policy import Floats, Ints

STEEPNESS = 2.0
HEAVIEST = 16.0


def weights(
    goodput: Floats, sizes: Ints, done: Floats, remaining: Floats, age_s: Floats, gpus: int, bound: float
) -> Floats:
    """(J,) what a second of each job's waiting counts: 1, and more from `bound` times its fair JCT on.

    The fair JCT is that of all its work alone on 1/J of the GPUs; the predicted one its age plus what is left at that
    share. So a job that was passed over for long rises until it is served, whatever its length. What it holds now does
    not enter: its weight would fall as soon as it is served, and rise again when that is taken away.
    """
    if bound <= 0 or not len(goodput):
        return np.ones(len(goodput))
    share = max(gpus // len(goodput), 1)
    can = goodput > 0
    within = can & (sizes <= np.maximum(share, np.where(can, sizes, np.iinfo(np.int64).max).min(axis=1))[:, None])
    rate = np.where(within, goodput, 0.0).max(axis=1)
    rate[rate == 0] = np.inf  # a job that can have no size waits, whatever its weight
    fair = np.maximum((done + remaining) / rate, 1.0)
    late = (age_s + remaining / rate) / fair / bound
    result: Floats = np.clip(late, 1.0, HEAVIEST ** (1 / STEEPNESS)) ** STEEPNESS
    return result

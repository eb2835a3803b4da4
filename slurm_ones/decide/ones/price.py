"""What a unit of each job's progress is worth to everybody: the co-states of minimising the sum of JCTs.

Each second costs Σ w, one for every job that has not ended, and saves Σ v g(n), with v the worth of a unit of a job's
progress and g(n) its speed on n GPUs. By Pontryagin's principle v stays the same all the job's life, the GPUs go where
Σ v g(n) is highest, and there the two are equal at every moment. With λ as the price of a GPU, and N GPUs, this reads
Σ w = min over λ of [Σ max over n of (v g(n) − λ n) + λ N].

After the k-th but last job ends, only the jobs that end after it are left. So the equation gives one v after another,
from the last end backwards. For speed-ups n^p this is heSRPT (Berg, Vesilo, Harchol-Balter, Performance Evaluation
2020), which it extends to any curves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurm_ones.schedule.policy import Floats, Ints

Bools = npt.NDArray[np.bool_]

PRICES: Floats = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 112)])
"""Prices that are told apart, in seconds of waiting per GPU-second."""
CELLS = 1 << 18
"""Costs that are weighed at once."""


def worth_of_progress(
    goodput: Floats, sizes: Ints, remaining: Floats, weight: Floats, gpus: int, *, recursive: bool = True
) -> tuple[Floats, Floats]:
    """(v, C): worth (J,) of a unit of progress in weighted seconds, and predicted seconds (J,) to each job's end.

    `goodput` (J, U) is progress/s at each of the `sizes` (U,), ascending from 0; it is 0 where the job cannot be, and
    in the first column. `remaining` (J,) is progress to come; `weight` (J,) what a second of a job's waiting counts.
    Without `recursive` today's price holds for all. Jobs without any size are worth 0. Costs jobs × prices × sizes.
    """
    jobs = len(goodput)
    possible: Bools = np.asarray((goodput > 0).any(axis=1))
    worth, demand = np.zeros((jobs, len(PRICES))), np.zeros((jobs, len(PRICES)))
    at = np.zeros((jobs, len(PRICES)), dtype=np.int64)
    with np.errstate(divide="ignore"):
        slowness = np.where(goodput > 0, 1.0 / goodput, np.inf)
    bill = PRICES[:, None] * sizes
    each = max(CELLS // bill.size, 1)
    for some in np.split(np.flatnonzero(possible), range(each, jobs, each)):
        cost = (weight[some, None, None] + bill) * slowness[some, None, :]
        at[some] = best = cost.argmin(axis=2)
        worth[some] = np.take_along_axis(cost, best[:, :, None], axis=2)[:, :, 0]
        demand[some] = sizes[best]
    today = _clearing(demand.sum(axis=0), gpus)
    ends = np.full(jobs, np.inf)
    ends[possible] = remaining[possible] / goodput[possible, at[possible, today]]
    if not recursive:
        return worth[:, today], ends
    found = np.zeros(jobs)
    owed = -PRICES * gpus
    """What is left of Σ w, at each price, for the next job to save."""
    for j in np.argsort(-ends, kind="stable"):
        if not possible[j]:
            continue
        can = goodput[j] > 0
        owed += weight[j]
        found[j] = max(float(((owed[:, None] + bill[:, can]) * slowness[j, can]).min(axis=1).max()), 0.0)
        # Waiting, the first column, saves nothing.
        owed -= (found[j] * goodput[j] - bill).max(axis=1)
    return found, ends


def _clearing(demand: Floats, gpus: int) -> int:
    """The lowest price at which the GPUs suffice for the demand (P,); the highest where they never do."""
    enough = np.asarray(demand <= gpus)
    return int(np.argmax(enough)) if enough.any() else len(demand) - 1

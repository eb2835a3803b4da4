"""Worth of a unit of each job's progress: the co-states of minimising the sum of JCTs.

Each second costs Σ w, summed over all jobs that have not ended. Training saves Σ v g(n) per second: v is the worth of a
unit of a job's progress, g(n) the job's speed on n GPUs. By Pontryagin's principle v is constant over the job's life,
the GPUs go where Σ v g(n) is highest, and cost and saving are equal at every moment. With the price λ of a GPU, and N
GPUs, this is: Σ w = min over λ of [Σ max over n of (v g(n) − λ n) + λ N].

After a job's end only the jobs that end later are left. So the equation gives one v after another, from the job that
ends last to the one that ends first. For speed-ups n^p this is heSRPT (Berg, Vesilo, Harchol-Balter, Performance
Evaluation 2020); here the curves are arbitrary.

`worth_of_progress` computes v, and `fair_weights` computes w. `Choices` has the worth of each size to each job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slurm_ones.policy.contract import Bools, Floats, Ints

PRICES: Floats = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 112)])
"""Prices that are tried, in seconds of waiting per GPU-second."""
CELLS = 1 << 18
"""Largest number of cells in one array of costs, to bound memory."""


def worth_of_progress(
    goodput: Floats,
    sizes: Floats | Ints,
    remaining: Floats,
    weight: Floats,
    gpus: float,
    *,
    recursive: bool = True,
) -> tuple[Floats, Floats]:
    """Return v (J,), the worth of a unit of each job's progress in weighted seconds, and the predicted seconds (J,) to
    its end.

    `goodput` (J, U) is the progress/s at each of the `sizes` (U,): 0 in column 0 (no GPUs) and at a size that the job
    may not have. `remaining` (J,) is the remaining progress, `weight` (J,) the weight of a second of waiting. Without
    `recursive`, today's price is used for all jobs. A job without a size is worth 0.
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
    enough: Bools = np.asarray(demand.sum(axis=0) <= gpus)
    today = int(np.argmax(enough)) if enough.any() else len(PRICES) - 1
    ends = np.full(jobs, np.inf)
    ends[possible] = remaining[possible] / goodput[possible, at[possible, today]]
    if not recursive:
        return worth[:, today], ends
    found = np.zeros(jobs)
    owed = -PRICES * gpus
    """Part of Σ w, at each price, that no later-ending job saves, and so the next job must."""
    for j in np.argsort(-ends, kind="stable"):
        if not possible[j]:
            continue
        can = goodput[j] > 0
        owed += weight[j]
        found[j] = max(float(((owed[:, None] + bill[:, can]) * slowness[j, can]).min(axis=1).max()), 0.0)
        # In column 0 the job waits, which saves nothing.
        owed -= (found[j] * goodput[j] - bill).max(axis=1)
    return found, ends


STEEPNESS = 2.0
HEAVIEST = 16.0


def fair_weights(
    goodput: Floats, sizes: Ints, done: Floats, remaining: Floats, age_s: Floats, gpus: int, bound: float
) -> Floats:
    """Return the weight (J,) of a second of each job's waiting. It is 1, and more for a job whose predicted JCT exceeds
    `bound` times its fair JCT (finish-time fairness, Themis, NSDI 2020 §3).

    The fair JCT is the time of all the job's work on 1/J of the GPUs. The predicted JCT is the job's age plus the time
    of its remaining work on this share, whatever GPUs it has now. So a waiting job gains weight until it is served.
    """
    if bound <= 0 or not len(goodput):
        return np.ones(len(goodput))
    share = max(gpus // len(goodput), 1)
    can = goodput > 0
    within = can & (sizes <= np.maximum(share, np.where(can, sizes, np.iinfo(np.int64).max).min(axis=1))[:, None])
    rate = np.where(within, goodput, 0.0).max(axis=1)
    rate[rate == 0] = np.inf  # a job without any size waits, whatever its weight
    late = (age_s + remaining / rate) / np.maximum((done + remaining) / rate, 1.0) / bound
    weight: Floats = np.clip(late, 1.0, HEAVIEST ** (1 / STEEPNESS)) ** STEEPNESS
    return weight


@dataclass(frozen=True)
class Choices:
    """Input of the search: the sizes that each job may have, their worth, and the number of GPUs. In column 0 a job
    waits."""

    sizes: Ints
    """(U,) GPUs, ascending from 0."""
    worth: Floats
    """(J, U) seconds of waiting saved per second; -inf at a column that the job may not have."""
    current: Ints
    """(J,) column of the job's present size; 0 if it waits."""
    gpus: int
    """GPUs that all jobs together may have."""
    up: Ints = field(init=False)
    down: Ints = field(init=False)
    """(J, U) column of the next smaller size that the job may have, or the column itself. `up` is the next larger."""
    more: Ints = field(init=False)
    less: Ints = field(init=False)
    """(J, U) GPUs that a step down frees. `more` is the GPUs that a step up takes."""
    gain: Floats = field(init=False)
    loss: Floats = field(init=False)
    """(J, U) worth that a step down costs; inf without a step. `gain` is the worth that a step up brings; -inf without
    a step."""

    def __post_init__(self) -> None:
        may = np.isfinite(self.worth)
        columns = np.arange(len(self.sizes))
        beyond = np.where(may, columns, len(self.sizes))
        above = np.minimum.accumulate(beyond[:, ::-1], axis=1)[:, ::-1]
        up = np.concatenate([above[:, 1:], np.full((len(may), 1), len(self.sizes))], axis=1)
        object.__setattr__(self, "up", np.where(up < len(self.sizes), up, columns))
        below = np.maximum.accumulate(np.where(may, columns, -1), axis=1)
        down = np.concatenate([np.full((len(may), 1), -1), below[:, :-1]], axis=1)
        object.__setattr__(self, "down", np.where(down >= 0, down, columns))
        rows = np.arange(len(may))[:, None]
        more, less = self.sizes[self.up] - self.sizes, self.sizes - self.sizes[self.down]
        with np.errstate(invalid="ignore"):
            gain = np.where(more > 0, self.worth[rows, self.up] - self.worth, -np.inf)
            loss = np.where(less > 0, self.worth - self.worth[rows, self.down], np.inf)
        for name, table in (("more", more), ("less", less), ("gain", gain), ("loss", loss)):
            object.__setattr__(self, name, table)

    def value(self, candidates: Ints) -> Floats:
        """Return the worth (K, J) of each candidate (K, J) to each job."""
        return self.worth[np.arange(candidates.shape[-1]), candidates]

"""How wide an interval must be to hold as often as it says: measured on what the database's own jobs did next.

Each size that a finished job measured is predicted from its other sizes, and from what the other half of the jobs
teaches about one like it. How far off these predictions are, in their own deviations, gives one factor for sizes inside
a node and one across nodes, such that intervals of `HOLDS` hold that often (split conformal prediction; Vovk, Gammerman
and Shafer, Algorithmic Learning in a Random World, 2005). With few predictions the factor stays near 1.

No user's predictions count for more than those of all others together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from slurm_ones.learn.hierarchy import Heard, Kin, Tree
from slurm_ones.learn.step_time import NOISE, Fit, Points, Prior, Sizes, fit_all
from slurm_ones.learn.throughput import MeasuredThroughput
from slurm_ones.schedule.policy import Bools

HOLDS, BEYOND = 0.8, 1.2816
"""Of a normal distribution, so much lies within so many deviations."""
UNSURE = 10.0
"""Predictions that the factor 1 counts for."""
LEAST, MOST = 0.4, 2.5
TESTED = 60
"""Jobs that are predicted: those that finished last."""


def found_widths(jobs: Sequence[tuple[Kin, Fit]], around: Prior) -> tuple[float, float]:
    """The factors inside a node and across nodes, from finished jobs, newest first."""
    jobs = [(kin, fit) for kin, fit in jobs if len(fit.misfit)]
    held = [
        (half, kin, fit, out)
        for half, some in enumerate((jobs[0::2], jobs[1::2]))
        for kin, fit in some[: TESTED // 2]
        for out in _sizes(fit.points)
    ]
    if not held:
        return 1.0, 1.0
    trees = [Tree([(kin, Heard.of(fit)) for kin, fit in some], around) for some in (jobs[1::2], jobs[0::2])]
    priors = {(half, kin): trees[half].expect(kin) for half, kin in {(half, kin) for half, kin, _, _ in held}}
    fits = fit_all([(_some(fit.points, ~out), fit.reference, priors[half, kin]) for half, kin, fit, out in held])
    models = MeasuredThroughput.together([MeasuredThroughput(fit) for fit in fits])
    tests = [_some(fit.points, np.arange(len(out)) == np.argmax(out)) for _, _, fit, out in held]
    at = Sizes(*(np.stack([getattr(test.at, field.name) for test in tests]) for field in fields(Sizes)))
    measured = np.array([test.log_step[0] for test in tests])
    count = np.array([test.count[0] for test in tests])
    deviation = np.sqrt(models.variance(at)[:, 0] + NOISE**2 / count)
    off = np.abs(measured - models.log_step(at)[:, 0]) / deviation
    across = at.across[:, 0] > 0
    users = [kin.user for _, kin, _, _ in held]
    inside, outside = (_factor(off[rows], [users[i] for i in np.flatnonzero(rows)]) for rows in (~across, across))
    return inside, outside


def _factor(off: np.ndarray, users: Sequence[str]) -> float:
    if not len(off):
        return 1.0
    counts = Counter(users)
    others = {user: len(users) - count for user, count in counts.items()}
    weight = np.array([min(1.0, others[user] / counts[user]) if others[user] else 1.0 for user in users])
    order = np.argsort(off)
    # One prediction more, of which nothing is known, is to be held as well.
    reached = np.cumsum(weight[order]) >= HOLDS * (weight.sum() + 1.0)
    quantile = off[order[np.argmax(reached)]] if reached.any() else off.max()
    sure = weight.sum() / (weight.sum() + UNSURE)
    return float(np.clip(np.exp(sure * np.log(max(quantile, 1e-3) / BEYOND)), LEAST, MOST))


def _sizes(points: Points) -> list[Bools]:
    """The points of each size that was measured, where there are several."""
    kinds = np.stack([points.at.gpus, points.at.across], axis=1)
    each = np.unique(kinds, axis=0)
    return [(kinds == kind).all(axis=1) for kind in each] if len(each) > 1 else []


def _some(points: Points, rows: Bools) -> Points:
    at = Sizes(*(getattr(points.at, field.name)[rows] for field in fields(Sizes)))
    return replace(points, at=at, log_step=points.log_step[rows], count=points.count[rows])

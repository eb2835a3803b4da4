"""The fluid schedule: the prices of `ones`, with fractions of GPUs, changes that cost nothing, and true curves.

It is no schedule that a cluster could run, but one that the bound allows: so the bound lies below its mean JCT. What
lies between the two is what it costs to decide without knowledge of later arrivals, and what is lost in the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_ones.decide.ones.worth import worth_of_progress
from slurm_ones.schedule.policy import Floats, Ints
from slurm_ones.simulate.bound.curves import Curve
from slurm_ones.simulate.bound.work import Work

COUNTS: Ints = np.array([0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64])
"""GPUs that are weighed, those of larger jobs besides, and each job's two smallest sizes: a rigid one has no more."""
STEPS = 1500
"""Decisions, at least, over the time in which jobs are submitted."""
SHARE = 0.1
"""Of the shortest remaining time, that a decision lasts at most where nobody comes."""


def fluid_mean_jct_s(work: Work) -> float:
    """Mean JCT of the fluid schedule, in seconds."""
    sizes = _sizes(work.curves)
    order = np.argsort(work.submitted, kind="stable")
    rates = [_rates(curve, sizes) for curve in work.curves]
    ends = [np.cumsum(curve.work) for curve in work.curves]
    step = max(float(np.ptp(work.submitted)) / STEPS, 1.0)
    now, waiting, live = float(work.submitted.min()), list(order), list[int]()
    done = np.zeros(len(order))
    total = 0.0
    while waiting or live:
        if not live:
            now = max(now, float(work.submitted[waiting[0]]))
        while waiting and work.submitted[waiting[0]] <= now:
            live.append(int(waiting.pop(0)))
        own = [int(work.curve[j]) for j in live]
        part = [int(np.searchsorted(ends[c][:-1], done[j], side="right")) for c, j in zip(own, live, strict=True)]
        speed = np.array([rates[c][k] for c, k in zip(own, part, strict=True)])
        left = np.array([ends[c][-1] - done[j] for c, j in zip(own, live, strict=True)])
        worth, _ = worth_of_progress(speed, sizes, left, np.ones(len(live)), work.gpus)
        mixes = _mixes(speed, sizes, worth, work.gpus)
        ways = [
            _Way(rates[c][k:] @ mix, ends[c][k:], done[j]) for c, k, mix, j in zip(own, part, mixes, live, strict=True)
        ]
        needs = np.array([way.seconds[-1] for way in ways])
        until = float(work.submitted[waiting[0]]) - now if waiting else np.inf
        seconds = max(min(until, max(step, SHARE * float(needs.min())), float(needs.min())), 1e-6)
        now += seconds
        for j, way, need in zip(live, ways, needs, strict=True):
            done[j] = way.after(seconds)
            if need <= seconds * (1 + 1e-9):
                total += now - float(work.submitted[j])
        live = [j for j, need in zip(live, needs, strict=True) if need > seconds * (1 + 1e-9)]
    return total / len(order)


def _sizes(curves: Sequence[Curve]) -> Ints:
    most = max(int(curve.sizes[-1]) for curve in curves)
    fixed = [int(size) for curve in curves for size in curve.sizes[:2]]
    return np.unique(np.concatenate([COUNTS[most >= COUNTS], [most], fixed])).astype(np.int64)


def _rates(curve: Curve, sizes: Ints) -> Floats:
    """(K, U) progress/s at these sizes; 0 where it cannot have one."""
    found = np.zeros((len(curve.rate), len(sizes)))
    at = np.searchsorted(curve.sizes, sizes)
    can = (at < len(curve.sizes)) & (curve.sizes[np.minimum(at, len(curve.sizes) - 1)] == sizes)
    found[:, can] = curve.rate[:, at[can]]
    return found


class _Way:
    """How a job comes on with the sizes that it has: at these speeds (K,) in the parts that end at `ends` (K,)."""

    def __init__(self, speed: Floats, ends: Floats, done: float) -> None:
        with np.errstate(divide="ignore"):
            self.seconds: Floats = np.cumsum(np.diff(ends, prepend=done) / speed)
        self._ends, self._done = ends, done

    def after(self, seconds: float) -> float:
        """Progress so much later."""
        if not np.isfinite(self.seconds[-1]):
            return self._done
        return float(np.interp(seconds, np.append(0.0, self.seconds), np.append(self._done, self._ends)))


def _mixes(speed: Floats, sizes: Ints, worth: Floats, gpus: int) -> Floats:
    """(J, U) share of its time that each job has each size, where the GPUs go to where they are worth most."""
    steps: list[tuple[float, int, int, int]] = []
    for j, row in enumerate(speed):
        for before, after in _hull(row, sizes):
            gain, more = float(row[after] - row[before]), int(sizes[after] - sizes[before])
            steps.append((-worth[j] * gain / more, j, before, after))
    left, mix = float(gpus), np.zeros_like(speed)
    mix[:, 0] = 1.0
    for _, j, before, after in sorted(steps):
        share = min(left / float(sizes[after] - sizes[before]), 1.0)
        mix[j, before] -= share
        mix[j, after] += share
        left -= share * float(sizes[after] - sizes[before])
        if left <= 1e-9:
            break
    return mix


def _hull(row: Floats, sizes: Ints) -> list[tuple[int, int]]:
    """Steps between the sizes that are on the concave hull of the speeds."""
    found, at, top = [], 0, int(row.argmax())
    while at < top:
        later = np.flatnonzero((np.arange(len(row)) > at) & (row > row[at]))
        slopes = (row[later] - row[at]) / (sizes[later] - sizes[at])
        best = int(later[slopes.argmax()])
        found.append((at, best))
        at = best
    return found

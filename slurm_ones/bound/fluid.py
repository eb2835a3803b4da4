"""The fluid schedule: the prices of `ones` with fractional GPUs, free changes and the true speed curves.

No real cluster could run the fluid schedule, but the bound covers it, so its mean JCT is at least the bound. Their gap
has two causes: the fluid schedule does not know later arrivals, and the bound is not tight.

With several kinds of GPU, a linear program divides the GPUs among the jobs. As in `ones`, a GPU of each kind counts as
its price in that program. A job gets GPUs of several kinds if one kind does not have enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, vstack

from slurm_ones.bound.curves import KindCurve, KindWork, hull
from slurm_ones.ones.worth import worth_of_progress
from slurm_ones.policy.contract import Floats, Ints

COUNTS: Ints = np.array([0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64])
"""GPU counts considered, in addition to the largest count of any job and each job's two smallest."""
Columns = Sequence[tuple[int, bool, int]]
"""Sizes of a job: (index of the kind that sets the pace, whether faster kinds are mixed in, GPUs in total)."""
WAITS = (-1, False, 0)
DEAREST = 30.0
"""Largest ratio between the price of a GPU kind and that of the fastest kind, in either direction."""
STEPS = 1500
"""Shortest interval between decisions: the time from first to last submission over this number."""
SHARE = 0.1
"""Longest interval between decisions, as a share of the shortest remaining time of a job."""


def fluid_mean_jct_s(work: KindWork, weights: Floats) -> float:
    """Return the mean JCT of the fluid schedule in seconds. Initially a GPU of kind k counts as `weights[k]`."""
    columns, takes = _columns(work)
    order = np.argsort(work.submitted, kind="stable")
    rates = [_rates(curve, columns) for curve in work.curves]
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
        counts, ones = takes @ weights, np.ones(len(live))
        worth, _ = worth_of_progress(speed, counts, left, ones, float(weights @ work.there))
        if len(work.there) == 1:
            mixes = _mixes(speed, takes[:, 0], worth, int(work.there[0]))
        else:
            mixes, prices = _mixes_of_kinds(speed * worth[:, None], takes, work.there)
            if (prices > 0).all():
                weights = np.sqrt(weights / weights[-1] * np.clip(prices / prices[-1], 1.0 / DEAREST, DEAREST))
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


def _columns(work: KindWork) -> tuple[Columns, Ints]:
    """Return the sizes considered (U,), the first one 0 GPUs, and their GPUs of each kind (U, K)."""
    found, takes = [WAITS], [np.zeros(len(work.there), dtype=np.int64)]
    for k, here in enumerate(work.there.tolist()):
        for mixed in (False, True):
            # Of several kinds, the slowest first, where one has not enough.
            each = [curve.sizes[(curve.kind == k) & (curve.mixed == mixed)] for curve in work.curves]
            each = [sizes[sizes > here] if mixed else sizes for sizes in each]
            most = max((int(sizes[-1]) for sizes in each if len(sizes)), default=0)
            usual = {size for size in COUNTS.tolist() if (here if mixed else 0) < size < most}
            for size in sorted({*usual, *(int(size) for sizes in each for size in sizes[:2]), most} - {0}):
                found.append((k, mixed, size))
                before = np.append(0, np.cumsum(work.there[k:])[:-1])
                takes.append(np.append(np.zeros(k, dtype=np.int64), np.clip(size - before, 0, work.there[k:])))
    return tuple(found), np.array(takes)


def _rates(curve: KindCurve, columns: Columns) -> Floats:
    """Return (K, U) progress/s in each part of the training at each size; 0 if the job has no such size."""
    found = np.zeros((len(curve.rate), len(columns)))
    mine = zip(curve.kind.tolist(), curve.mixed.tolist(), curve.sizes.tolist(), strict=True)
    place = {column: u for u, column in enumerate(columns)}
    for n, column in enumerate(mine):
        if column in place:
            found[:, place[column]] = curve.rate[:, n]
    return found


class _Way:
    """Progress over time of a job at its present sizes: speeds (K,) in the training parts that end at `ends` (K,)."""

    def __init__(self, speed: Floats, ends: Floats, done: float) -> None:
        with np.errstate(divide="ignore"):
            self.seconds: Floats = np.cumsum(np.diff(ends, prepend=done) / speed)
        self._ends, self._done = ends, done

    def after(self, seconds: float) -> float:
        """Return the job's progress `seconds` from now."""
        if not np.isfinite(self.seconds[-1]):
            return self._done
        return float(np.interp(seconds, np.append(0.0, self.seconds), np.append(self._done, self._ends)))


def _mixes(speed: Floats, sizes: Ints, worth: Floats, gpus: int) -> Floats:
    """Return (J, U) each job's share of time at each size if every GPU goes to the largest gain in worth."""
    steps: list[tuple[float, int, int, int]] = []
    for j, row in enumerate(speed):
        for before, after in pairwise([0, *hull(sizes, row)]):
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


def _mixes_of_kinds(worth: Floats, takes: Ints, there: Ints) -> tuple[Floats, Floats]:
    """Return the time shares (J, U) of the jobs' largest total worth, and the price (K,) of each GPU kind."""
    job, column = np.nonzero(worth > 0)
    whole = coo_array((np.ones(len(job)), (job, np.arange(len(job)))), (len(worth), len(job)))
    rows: Any = vstack([csr_array(takes[column].T), whole])
    each, scale = worth[job, column], float(worth.max())
    found: Any = linprog(-each / scale, rows, np.append(there, np.ones(len(worth))), method="highs")
    mix = np.zeros_like(worth)
    mix[job, column] = np.clip(found.x, 0.0, 1.0)
    mix[:, 0] = 1.0 - mix[:, 1:].sum(axis=1)
    return mix, -found.ineqlin.marginals[: len(there)] * scale

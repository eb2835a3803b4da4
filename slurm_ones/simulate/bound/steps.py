"""What it costs a job to come so far in one interval of time: GPU-seconds, never more than the truth.

A job of one curve makes progress x from p on in D seconds. Whatever sizes it takes, for each θ ≥ 0

    GPU-seconds ≥ W_θ(p + x) − W_θ(p) − θ D,   W_θ(p) = Σ (parts before p) min over n of work (n + θ) / rate(n),

since (n + θ) / rate(n) is at least its minimum in every part, and the seconds of all parts add up to D at most. The
best θ gives the least GPU-seconds of a job that may divide its time between sizes (linear duality), so fractions of
GPUs are allowed, and nothing is lost by a long interval.

Progress is counted in parts, so W is linear between whole numbers. Dynamic programming knows a job's value at whole
numbers alone, and takes it to be linear between them. So that this adds nothing to what a step costs, all starts p
within a part and all x within a bin share one θ, and a whole number takes the less of its two parts'.

One thing is not covered by that: where the value itself bends upwards, the line between two whole numbers lies above
it, by an eighth of its second derivative times the square of a part. More parts show what this comes to: a test does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurm_ones.schedule.policy import Floats, Ints
from slurm_ones.simulate.bound.curves import Curve

THETAS: Floats = np.concatenate([[0.0], np.geomspace(0.3, 1000.0, 31)])
"""Values of θ that are tried, in GPUs; a bound follows from any."""
ENDS = 20
"""Sizes at most whose speeds are ends of bins: between two of them one θ is right, as long as a curve stays the same.
Whole numbers are ends as well."""


def shares(curve: Curve) -> Floats:
    """(ENDS,) speeds of sizes over the highest, half-way through: of none, and of those on the concave hull."""
    rate = curve.rate[len(curve.rate) // 2] / curve.rate[len(curve.rate) // 2].max()
    gpus, speed = np.append(0, curve.sizes), np.append(0.0, rate)
    hull = [0]
    while speed[hull[-1]] < 1.0:
        later = np.flatnonzero(speed > speed[hull[-1]])
        each = (gpus[later] - gpus[hull[-1]]) / (speed[later] - speed[hull[-1]])
        hull.append(int(later[len(each) - 1 - each[::-1].argmin()]))
    while len(hull) > ENDS:
        # Of two sizes that are nearly as fast one is enough.
        gaps = np.diff(speed[hull])
        del hull[max(int(gaps[1:-1].argmin()) + 1, 1)]
    found = np.ones(ENDS)
    found[: len(hull)] = speed[hull]
    return found


def at(values: Floats, where: Floats) -> Floats:
    """(R, …) values (R, B) between whole numbers, at places (R, …) of each row."""
    floor = np.clip(np.floor(where), 0, values.shape[1] - 2).astype(np.int64)
    rows = np.arange(len(values)).reshape(-1, *[1] * (where.ndim - 1))
    low = values[rows, floor]
    result: Floats = low + (where - floor) * (values[rows, floor + 1] - low)
    return result


@dataclass(frozen=True)
class Bins:
    """Steps by x that rows (R,) of curves are offered, in bins between whole numbers."""

    begin: Floats
    end: Floats
    """(R, Y) parts; a bin without width is none."""

    @property
    def middle(self) -> Floats:
        return (self.begin + self.end) / 2.0

    @staticmethod
    def up_to(furthest: Floats, shares: Floats, parts: int) -> Bins:
        """Up to the furthest (R,) that can be reached, with ends at shares (R, ENDS) of it."""
        most = np.minimum(furthest, parts)[:, None]
        wholes = np.arange(1.0, min(parts, int(np.ceil(most.max()))) + 1.0)
        ends = np.sort(
            np.concatenate([np.minimum(furthest[:, None] * shares, most), np.minimum(wholes, most)], axis=1), axis=1
        )
        begin, end = ends[:, :-1], ends[:, 1:]
        return Bins(begin, end)


@dataclass(frozen=True)
class Ways:
    """Steps of so many seconds in which no job ends, from each whole number: (A, M, Y) each."""

    seconds: float
    gpu_s: Floats
    """GPU-seconds; inf where the step is impossible."""
    floor: Ints
    above: Floats
    """Where it leads to: a whole number, and how far above it."""

    @cached_property
    def _flat(self) -> Ints:
        width = self.gpu_s.shape[1] + 1
        result: Ints = self.floor + (np.arange(len(self.floor)) * width)[:, None, None]
        return result

    def values(self, after: Floats) -> Floats:
        """(A, M, Y) the value (A, K + 2) of wherever each step leads."""
        rises = np.diff(after, axis=1, append=0.0)
        result: Floats = np.take(rises, self._flat)
        result *= self.above
        result += np.take(after, self._flat)
        return result


class Steps:
    """The costs of steps of A curves in K parts."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.parts = parts = len(curves[0].work)
        each = np.empty((len(curves), len(THETAS), parts))
        for row, curve in enumerate(curves):
            slowness = curve.work[:, None] / curve.rate
            for column, theta in enumerate(THETAS):
                each[row, column] = ((curve.sizes + theta) * slowness).min(axis=1)
        self._last = [(curve.sizes, curve.work[-1] / curve.rate[-1]) for curve in curves]
        self.part_s: Floats = np.array([(curve.work / curve.rate.max(axis=1)).min() for curve in curves])
        """(A,) seconds of a part with every GPU: the same for all parts, as nearly as they could be cut."""
        self._shares: Floats = np.array([shares(curve) for curve in curves])
        nothing = np.zeros((len(curves), len(THETAS), 1))
        self.bill: Floats = np.cumsum(np.concatenate([nothing, each, each[:, :, -1:]], axis=2), axis=2)
        """(A, θ, K + 2) W at whole numbers, and as if the last part went on for one more."""

    @property
    def left(self) -> Floats:
        """(A, M) seconds from each whole number to the end with every GPU."""
        result: Floats = (self.parts - np.arange(self.parts + 1)) * self.part_s[:, None]
        return result

    def last(self, price: float) -> Floats:
        """(A,) what a part beyond the last would cost at a price, alone: seconds and GPU-seconds."""
        return np.array([((1.0 + price * sizes) * slow).min() for sizes, slow in self._last])

    def ways(self, seconds: float) -> Ways:
        """Steps of so many seconds, from any progress."""
        parts = self.parts
        bins = Bins.up_to(seconds / self.part_s, self._shares, parts)
        starts = np.arange(parts)[None, :, None]
        ends = np.stack([bins.begin, bins.end])
        middle = np.minimum(starts + bins.middle[:, None], parts + 1.0)
        theta = self._best(middle, starts, seconds)
        rows = np.arange(len(self.bill))[:, None, None]
        usable = (starts + bins.begin[:, None] < parts) & (bins.end > bins.begin)[:, None]
        moves = np.concatenate([bins.begin, bins.end[:, -1:]], axis=1)
        gpu_s = np.full((len(self.bill), parts + 1, moves.shape[1]), np.inf)
        for later in (0, 1):  # the start of the part, and its end
            start = np.arange(parts)[None, :, None] + later
            for which, end in enumerate(ends):
                place = np.minimum(start + end[:, None], parts + 1.0)
                floor = np.minimum(np.floor(place), parts).astype(np.int64)
                low = self.bill[rows, theta, floor]
                bill = low + (place - floor) * (self.bill[rows, theta, floor + 1] - low)
                cost = bill - self.bill[rows, theta, start] - THETAS[theta] * seconds
                part = gpu_s[:, later : parts + later, which : len(moves[0]) - 1 + which]
                np.minimum(part, np.where(usable, cost, np.inf), out=part)
        place = np.minimum(np.arange(parts + 1)[None, :, None] + moves[:, None], parts + 1.0)
        floor = np.minimum(np.floor(place), parts).astype(np.int64)
        return Ways(seconds, gpu_s, floor, place - floor)

    def _best(self, middle: Floats, starts: Ints, seconds: float) -> Ints:
        """(A, K, Y) the θ that all steps from within a part and within a bin share."""
        best = np.full(middle.shape, -np.inf)
        found = np.zeros(middle.shape, dtype=np.int64)
        for column, theta in enumerate(THETAS):
            bill = self.bill[:, column]
            cost = at(bill, middle) - bill[:, : self.parts, None] - theta * seconds
            better = cost > best
            best, found = np.where(better, cost, best), np.where(better, column, found)
        return found

    def first(self, curve: Ints, seconds: Floats) -> tuple[Floats, Floats]:
        """(GPU-seconds, where it leads to), each (J, 2 Y): the first step of jobs (J,) of these curves, in so many
        seconds each."""
        bins = Bins.up_to(seconds / self.part_s[curve], self._shares[curve], self.parts)
        best = np.full(bins.begin.shape, -np.inf)
        costs = np.zeros((2, *bins.begin.shape))
        for column, theta in enumerate(THETAS):
            bill = self.bill[curve, column]
            cost = at(bill, bins.middle) - theta * seconds[:, None]
            better = cost > best
            best = np.where(better, cost, best)
            for which, end in enumerate((bins.begin, bins.end)):
                costs[which] = np.where(better, at(bill, end) - theta * seconds[:, None], costs[which])
        costs = np.where(bins.end > bins.begin, costs, np.inf)
        return np.concatenate([costs[0], costs[1]], axis=1), np.concatenate([bins.begin, bins.end], axis=1)

    def ending(self, price: float, seconds: float) -> tuple[Floats, Floats]:
        """(cost, GPU-seconds), each (A, M): what a job that ends within the interval still costs, at least.

        Its seconds cost 1 and its GPU-seconds the price: for each κ ≥ 0 that is, by the same duality, at least
        price × W_θ − κ D with θ = (1 + κ) / price.
        """
        parts = self.parts
        costs, gpus = self._planes(price, self.bill[:, :, : parts + 1], np.array([[seconds]]), self.left)
        # The plane that is best at the end of a part, from where a job can certainly end if it can at all.
        best = costs[:, :, 1:].argmax(axis=0)
        best[:, -1] = 0  # a job at its end costs nothing, so no plane may say less
        usable = self.left[:, 1:] <= seconds
        found, needs = np.full((len(self.bill), parts + 1), np.inf), np.zeros((len(self.bill), parts + 1))
        for later in (0, 1):
            where = slice(later, parts + later)
            cost = np.take_along_axis(costs[:, :, where], best[None], axis=0)[0]
            gpu = np.take_along_axis(gpus[:, :, where], best[None], axis=0)[0]
            better = usable & (cost < found[:, where])
            found[:, where] = np.where(better, cost, found[:, where])
            needs[:, where] = np.where(better, gpu, needs[:, where])
        return found, needs

    def ending_first(self, price: float, seconds: Floats, curve: Ints) -> tuple[Floats, Floats]:
        """The same (J,) of jobs that begin, each in its own seconds."""
        bill, ends = self.bill[curve][:, :, [0, self.parts]], [0, self.parts]
        costs, gpus = self._planes(price, bill, seconds[:, None], self.left[curve][:, ends])
        best = costs[:, :, 0].argmax(axis=0)[None]
        cost = np.take_along_axis(costs[:, :, 0], best, axis=0)[0]
        gpu = np.take_along_axis(gpus[:, :, 0], best, axis=0)[0]
        return np.where(self.part_s[curve] * self.parts <= seconds * (1 + 1e-9), cost, np.inf), gpu

    def _planes(self, price: float, bill: Floats, seconds: Floats, left: Floats) -> tuple[Floats, Floats]:
        """(cost, GPU-seconds), each (planes, R, M), of bills (R, θ, M) up to the last of the M."""
        whole = bill[:, :, -1:] - bill
        at_price = 1.0 / price
        low = min(int(np.searchsorted(THETAS, at_price, side="right")) - 1, len(THETAS) - 2)
        # W is concave in θ: a chord lies below it, and beyond the last θ it rises by no less than at the highest rate.
        slope = (whole[:, low + 1] - whole[:, low]) / (THETAS[low + 1] - THETAS[low])
        if at_price > THETAS[-1]:
            low, slope = len(THETAS) - 1, left
        gpus = [whole[:, low] - THETAS[low] * slope]
        costs = [slope + price * gpus[0]]
        for column in range(low + 1, len(THETAS)):
            gpus.append(whole[:, column] - THETAS[column] * seconds)
            costs.append(price * gpus[-1] + seconds)
        return np.array(costs), np.array(gpus)

"""A lower bound on the mean JCT, and two ideal mean JCTs: the fluid schedule's, and that of jobs that each have the
whole cluster.

The bound holds for every schedule, even one that pauses jobs and knows the future, under these assumptions:

- A job progresses as its application truly does (`training.application`), always at its best placement and batch,
  unaffected by other jobs. Changes, starts and stops take no time, and a job may have fractions of GPUs.
- All nodes are as fast as the fastest node of their kind, and the network never slows a job.
- A job on GPUs of several kinds trains at the speed of the slowest kind, on nodes as large as the largest.
- A rigid job always uses its one batch, and may be paused. It has its requested number of GPUs, or that number rounded
  up to be equal on all nodes, whichever is faster.
- A job ends once its application has trained all epochs. If early stopping may end it sooner, it ends at the least
  progress at which that can happen.

So the bound is below the mean JCT of the best real schedule. `dual` and `curves` derive it.

Each kind of GPU has its own price, and any prices give a valid bound. Here the prices of the kinds have a constant
ratio, so a GPU counts as a fixed number of GPUs of the fastest kind. The search for the highest bound varies this ratio
too, starting from the relative speeds of the kinds.

Batches that differ by less than 0.4 % are treated as one, with the best speed and the best efficiency among them.
Because of numerical errors (`dual`) the bound is lowered by a thousandth. The search for prices divides a training into
few parts, and computes costs at few moments; the final bound uses more of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import numpy as np
from scipy.optimize import linprog, minimize
from scipy.sparse import coo_array, csr_array, vstack

from slurm_ones.bound.curves import Curve, Work, hull, pools_of, work_of
from slurm_ones.bound.dual import Dual, improved
from slurm_ones.ones.worth import worth_of_progress
from slurm_ones.policy.contract import Floats, Ints
from slurm_ones.simulate.study.figures import Bound
from slurm_ones.simulate.study.plan import StudyPlan
from slurm_ones.simulate.workloads.profiles import Workload

COUNTS: Ints = np.array([0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64])
"""Numbers of GPUs tried for each job in the fluid schedule. Each job's two smallest sizes and the largest size of all
jobs are tried too."""
Columns = Sequence[tuple[int, bool, int]]
"""Sizes, each as (slowest kind of GPU, whether faster kinds are used too, total GPUs). Kinds are indexed from the
slowest."""
WAITS = (-1, False, 0)
DEAREST = 30.0
"""Largest ratio of one kind's price to the fastest kind's price. The smallest ratio is 1 / `DEAREST`."""
STEPS = 1500
"""Largest number of decisions of the fluid schedule between the first and the last submission. Decisions at a
submission or a job's end are not counted."""
SHARE = 0.1
"""Time to the fluid schedule's next decision, as a share of the shortest remaining time of a job."""


def fluid_mean_jct_s(work: Work, weights: Floats) -> float:
    """Return the mean JCT of the fluid schedule in seconds; it is at least the bound.

    The fluid schedule is an ideal form of `ones`: jobs hold fractions of GPUs, changes cost nothing, and the true
    speeds are known, but not later submissions.

    If there are several kinds of GPU, a linear program assigns GPUs to jobs. A GPU of kind k counts as `weights[k]`
    GPUs. After each decision the weights move towards the kinds' prices in the program's solution, as in `ones`.
    """
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


def _columns(work: Work) -> tuple[Columns, Ints]:
    """Return the sizes to try, first no GPUs, and the GPUs of each kind in them (sizes, kinds)."""
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


def _rates(curve: Curve, columns: Columns) -> Floats:
    """Return progress/s (parts of the training, sizes); 0 at a size that the job cannot have."""
    found = np.zeros((len(curve.rate), len(columns)))
    mine = zip(curve.kind.tolist(), curve.mixed.tolist(), curve.sizes.tolist(), strict=True)
    place = {column: u for u, column in enumerate(columns)}
    for n, column in enumerate(mine):
        if column in place:
            found[:, place[column]] = curve.rate[:, n]
    return found


class _Way:
    """Progress of a job over time, from its speed in each part of its training and the progress at which each part
    ends."""

    def __init__(self, speed: Floats, ends: Floats, done: float) -> None:
        with np.errstate(divide="ignore"):
            self.seconds: Floats = np.cumsum(np.diff(ends, prepend=done) / speed)
        self._ends, self._done = ends, done

    def after(self, seconds: float) -> float:
        if not np.isfinite(self.seconds[-1]):
            return self._done
        return float(np.interp(seconds, np.append(0.0, self.seconds), np.append(self._done, self._ends)))


def _mixes(speed: Floats, sizes: Ints, worth: Floats, gpus: int) -> Floats:
    """Return the share of time that each job spends at each size (jobs, sizes). GPUs go first to the jobs that gain the
    most worth per GPU."""
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
    """Return the share of time that each job spends at each size (jobs, sizes), and the price of each kind of GPU
    (kinds,). The shares maximize the total worth."""
    job, column = np.nonzero(worth > 0)
    whole = coo_array((np.ones(len(job)), (job, np.arange(len(job)))), (len(worth), len(job)))
    rows: Any = vstack([csr_array(takes[column].T), whole])
    each, scale = worth[job, column], float(worth.max())
    found: Any = linprog(-each / scale, rows, np.append(there, np.ones(len(worth))), method="highs")
    mix = np.zeros_like(worth)
    mix[job, column] = np.clip(found.x, 0.0, 1.0)
    mix[:, 0] = 1.0 - mix[:, 1:].sum(axis=1)
    return mix, -found.ineqlin.marginals[: len(there)] * scale


PARTS, MOMENTS = 32, 4
"""Number of parts of a training, and of moments in each price interval, in the search for prices."""
FINE_PARTS, FINE_MOMENTS = 256, 16
"""Number of parts of a training, and of moments in each price interval, for the final bound."""
SAFE = 0.999
"""Factor on the computed bound, which lowers it by more than any numerical error that was seen."""
INTERVALS = 64
"""Number of price intervals between the first and the last submission; a price is constant in its interval."""
LATER = 10
"""Number of equally long price intervals after the last submission. As many of twice this length follow, and so on up
to `LONGEST` times the length."""
LONGEST = 8
EVALUATIONS = 60
"""Approximate number of evaluations of the dual function in the search for prices."""
TRIED, EACH = 8, 12
"""Number of price ratios tried for each kind except the fastest, and evaluations of the dual function for each
ratio."""


def bounds_of(plan: StudyPlan, processes: int) -> dict[int, Bound]:
    """Compute the bound for the workload of each seed, in parallel processes; return it by seed."""
    if min(processes, len(plan.seeds)) <= 1:
        return {seed: _bound(plan, seed) for seed in plan.seeds}
    with ProcessPoolExecutor(min(processes, len(plan.seeds)), mp_context=get_context("spawn")) as pool:
        found = [pool.submit(_bound, plan, seed) for seed in plan.seeds]
        return {seed: future.result() for seed, future in zip(plan.seeds, found, strict=True)}


def _bound(plan: StudyPlan, seed: int) -> Bound:
    return bound_of(plan.workload(seed), plan.cluster.all_parts)


def bound_of(workload: Workload, parts: Sequence[tuple[int, int, str]], evaluations: int = EVALUATIONS) -> Bound:
    """Compute the bound for a workload. `parts` are groups of equal nodes of the cluster: (nodes, GPUs per node,
    kind)."""
    pools = pools_of(parts)
    coarse, work = (work_of(workload, pools, cuts) for cuts in (PARTS, FINE_PARTS))
    jobs, edges = len(work.submitted), _edges(work.counted(np.ones(len(pools))))
    weights, start = weights_of(coarse, edges)
    _, prices = improved(Dual(coarse.counted(weights), edges, MOMENTS), evaluations, start)
    counted = work.counted(weights)
    found, _ = Dual(counted, edges, FINE_MOMENTS).value(prices)
    alone = float(counted.alone_s.mean())
    return Bound(max(SAFE * found / jobs, alone), fluid_mean_jct_s(work, weights), alone)


def weights_of(work: Work, edges: Floats) -> tuple[Floats, Floats | None]:
    """Return the weight of each kind of GPU (kinds,), and prices from which to start the search for the highest bound
    (intervals,).

    A GPU of weight 0.5 counts as half a GPU of the fastest kind. The prices are for a GPU of the fastest kind, in the
    time intervals between `edges`; None if there is only one kind.
    """
    weights = _faster(work)
    if len(weights) == 1:
        return weights, None
    best: tuple[float, Floats, Floats | None] = (-np.inf, weights, None)

    def negative(logs: Floats) -> float:
        nonlocal best
        tried = np.append(np.exp(np.minimum(logs, 0.0)), 1.0)
        value, prices = improved(Dual(work.counted(tried), edges, MOMENTS), EACH, best[2])
        if value > best[0]:
            best = (value, tried, prices)
        return -value

    logs = np.log(weights[:-1])
    simplex = np.concatenate([logs[None], logs - np.eye(len(logs))])
    minimize(negative, logs, method="Nelder-Mead", options={"maxfev": TRIED * len(logs), "initial_simplex": simplex})
    return best[1], best[2]


def _faster(work: Work) -> Floats:
    """Return each kind's speed (kinds,), divided by that of the fastest kind. It is the median over jobs, halfway
    through their training."""
    each = []
    for curve in (work.curves[c] for c in work.curve):
        alone = [np.flatnonzero((curve.kind == k) & ~curve.mixed)[:1] for k in range(len(work.there))]
        if all(len(column) for column in alone):
            rate = curve.rate[len(curve.rate) // 2, np.concatenate(alone)]
            each.append(rate / rate[-1])
    return np.median(each, axis=0) if each else np.ones(len(work.there))


def _edges(work: Work) -> Floats:
    """Return the times between which a price is constant, ascending. The last is late enough for all jobs to end before
    it."""
    first, last = float(work.submitted.min()), float(work.submitted.max())
    alone = work.alone_s
    length = max((last - first) / INTERVALS, float(np.median(alone)) / 8.0, 1.0)
    edges = [first + length * i for i in range(int((last - first) // length) + 2)]
    least = sum((c.work[:, None] * c.sizes / c.rate).min(axis=1).sum() for c in (work.curves[k] for k in work.curve))
    over = max(edges[-1] + 2.0 * float(alone.max()), first + 1.5 * float(least) / work.gpus)
    count, factor = 0, 1.0
    while edges[-1] < over:
        edges.append(edges[-1] + length * factor)
        count += 1
        if count % LATER == 0:
            factor = min(2.0 * factor, LONGEST)
    return np.array(edges)

"""Three mean JCTs: a lower bound for every schedule, the fluid schedule's, and that of jobs alone on the cluster.

The bound holds for every schedule, preemptive and clairvoyant ones included, where

- a job makes progress as its application truly does (`training.application`), at the best placement and batch of each
  moment whatever the others hold. Changes, starts and stops cost nothing, and it may have fractions of GPUs;
- nodes are at most as fast as the fastest of their kind, and the network as where jobs do not notice it;
- a job on GPUs of several kinds trains at the pace of the slowest, on nodes as large as the largest;
- a rigid job has its one batch. Its size is what it asks for, or that rounded up to equally many GPUs on each node,
  whichever suits it. It may be paused all the same;
- a job is done when its application is, at the earliest: where patience may end a training, at the least progress at
  which it ever could.

What it leaves out makes it lower than the best schedule's mean JCT. How it is derived: `dual` and `curves`.

With GPUs of several kinds, one of each has a price. Any prices give a bound. These keep their ratio all the time, so
that a GPU counts as a fixed number of the fastest kind. The rest works as for one kind. The ratio is sought as well,
from how much faster the kinds are.

Batches are weighed in blocks of 0.4 %, in the job's favour. `dual` names what else is numerical, and a thousandth is
taken off for it. Prices are sought with few parts of each training and few moments, and the bound is the value that
they have with many.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
from scipy.optimize import minimize

from slurm_ones.bound.curves import KindWork, Work, pools_of, work_of
from slurm_ones.bound.dual import Dual, improved
from slurm_ones.bound.fluid import fluid_mean_jct_s
from slurm_ones.policy.contract import Floats
from slurm_ones.simulate.study.figures import Bound
from slurm_ones.simulate.study.plan import StudyPlan
from slurm_ones.simulate.workloads.profiles import Workload

PARTS, MOMENTS = 32, 4
"""Parts of a training, and moments in an interval, while prices are sought."""
FINE_PARTS, FINE_MOMENTS = 256, 16
"""Parts and moments for the bound that the prices give."""
SAFE = 0.999
"""Safety factor on the computed bound: larger than any numerical error that was seen."""
INTERVALS = 64
"""Intervals of equal price, over the time in which jobs are submitted."""
LATER = 10
"""Intervals after the last submission after which their length doubles."""
LONGEST = 8
EVALUATIONS = 60
"""Number of evaluations of the dual function."""
TRIED, EACH = 8, 12
"""Ratios of prices that are tried, for each kind but one, and evaluations of each."""


def bounds_of(plan: StudyPlan, processes: int) -> dict[int, Bound]:
    """Compute the bound of each seed's workload, in parallel processes."""
    if min(processes, len(plan.seeds)) <= 1:
        return {seed: _bound(plan, seed) for seed in plan.seeds}
    with ProcessPoolExecutor(min(processes, len(plan.seeds)), mp_context=get_context("spawn")) as pool:
        found = [pool.submit(_bound, plan, seed) for seed in plan.seeds]
        return {seed: future.result() for seed, future in zip(plan.seeds, found, strict=True)}


def _bound(plan: StudyPlan, seed: int) -> Bound:
    return bound_of(plan.workload(seed), plan.cluster.all_parts)


def bound_of(workload: Workload, parts: Sequence[tuple[int, int, str]], evaluations: int = EVALUATIONS) -> Bound:
    """Compute the bound of a workload on parts of a cluster: (nodes, GPUs of each, kind)."""
    pools = pools_of(parts)
    coarse, work = (work_of(workload, pools, cuts) for cuts in (PARTS, FINE_PARTS))
    jobs, edges = len(work.submitted), _edges(work.counted(np.ones(len(pools))))
    weights, start = weights_of(coarse, edges)
    _, prices = improved(Dual(coarse.counted(weights), edges, MOMENTS), evaluations, start)
    counted = work.counted(weights)
    found, _ = Dual(counted, edges, FINE_MOMENTS).value(prices)
    alone = float(counted.alone_s.mean())
    return Bound(max(SAFE * found / jobs, alone), fluid_mean_jct_s(work, weights), alone)


def weights_of(work: KindWork, edges: Floats) -> tuple[Floats, Floats | None]:
    """(K,) as how many of the fastest kind a GPU of each kind counts, and prices (I,) that go with it."""
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


def _faster(work: KindWork) -> Floats:
    """(K,) speed of a GPU of each kind over that of one of the fastest, in the middle of the jobs."""
    each = []
    for curve in (work.curves[c] for c in work.curve):
        alone = [np.flatnonzero((curve.kind == k) & ~curve.mixed)[:1] for k in range(len(work.there))]
        if all(len(column) for column in alone):
            rate = curve.rate[len(curve.rate) // 2, np.concatenate(alone)]
            each.append(rate / rate[-1])
    return np.median(each, axis=0) if each else np.ones(len(work.there))


def _edges(work: Work) -> Floats:
    """Return the edges of the intervals, up to when all jobs would have ended at half of the GPUs' best speed."""
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

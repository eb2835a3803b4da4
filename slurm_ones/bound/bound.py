"""Three mean JCTs: a lower bound for every schedule, the fluid schedule's, and that of jobs by themselves.

The bound holds for every schedule, preemptive and clairvoyant ones included, under these assumptions:

- A job progresses as its application truly does (`training.application`), always at its best placement and batch,
  unaffected by other jobs. Changes, starts and stops cost nothing, and the job may have fractions of GPUs.
- Nodes are at most as fast as the fastest of their kind, and the network never slows a job.
- A job on GPUs of several kinds trains at the pace of the slowest kind, on nodes as large as the largest.
- A rigid job has its one batch. It may be paused. Its size is the requested one, or the requested one rounded up to
  equally many GPUs on each node, whichever is better.
- A job is done no earlier than its application is. If patience may end a training, the job is done at the least
  progress at which patience ever could.

These assumptions lower the bound below the best schedule's mean JCT. Derivation: `dual` and `curves`.

With several kinds of GPU, each kind has its own price. Any prices give a bound. Here the prices of the kinds keep a
constant ratio, so a GPU counts as a fixed number of GPUs of the fastest kind. The rest works as for one kind. The ratio
is optimised too, starting from the relative speeds of the kinds.

Batches are grouped in blocks of 0.4 %, in the job's favour. `dual` lists the other numerical errors, for which the
bound is lowered by a thousandth. Prices are optimised with few parts of each training and few moments. The bound is
their dual value with many parts and moments.
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
"""Parts of a training, and moments in each price interval, while prices are optimised."""
FINE_PARTS, FINE_MOMENTS = 256, 16
"""Parts of a training, and moments in each price interval, for the final bound."""
SAFE = 0.999
"""Safety factor on the computed bound; it covers more than any numerical error observed."""
INTERVALS = 64
"""Intervals of constant price between the first and the last submission."""
LATER = 10
"""Number of intervals after the last submission before interval lengths double."""
LONGEST = 8
EVALUATIONS = 60
"""Number of evaluations of the dual function in the search for prices."""
TRIED, EACH = 8, 12
"""Price ratios tried for each kind but the fastest, and evaluations of the dual function for each ratio."""


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
    """Return (K,) each kind's weight in GPUs of the fastest kind, and start prices (I,), None with one kind."""
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
    """Return (K,) the speed of each kind of GPU over the fastest: the median of the jobs, halfway through them."""
    each = []
    for curve in (work.curves[c] for c in work.curve):
        alone = [np.flatnonzero((curve.kind == k) & ~curve.mixed)[:1] for k in range(len(work.there))]
        if all(len(column) for column in alone):
            rate = curve.rate[len(curve.rate) // 2, np.concatenate(alone)]
            each.append(rate / rate[-1])
    return np.median(each, axis=0) if each else np.ones(len(work.there))


def _edges(work: Work) -> Floats:
    """Return the edges of the price intervals, up to well after the jobs could end at the GPUs' best speed."""
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

"""ElasticFlow: admits jobs whose deadlines can be met. Each job gets the fewest GPUs that meet its deadline, then a
part of the remaining GPUs.

Gu et al., "ElasticFlow: An Elastic Serverless Training Platform for Distributed Deep Learning", ASPLOS 2023. Our
sources are its abstract, other authors' accounts of §4 and the released scheduler, not the paper itself. From these
sources:

- Admission: in order of deadlines, each job is given its minimum satisfactory share, the fewest GPUs with which it ends
  in time (`policy.timeline`). A new job is admitted if it and all jobs admitted before it end in time.
- Allocation: every admitted job gets its share. With the remaining GPUs, jobs grow to their next size one at a time.
  The next is the job whose total GPU-seconds rise least per added GPU. Jobs without GPUs come first.
- Sizes are powers of two within a node, and powers of two of whole nodes. The global batch is the user's.
- Running jobs may be stopped.

Differences because of Slurm: ElasticFlow drops a job that it does not admit. Here such a job runs on remaining GPUs,
like a job without a deadline. A job's remaining work and speed are predictions by the caller, which are taken as exact.
ElasticFlow's buddy allocation migrates jobs to avoid fragmentation. Here a job that keeps its size keeps its nodes, so
another job may not find enough free GPUs on a node. An admitted job stays admitted (`JobView.promised`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ones_db.reasons import reason
from slurm_ones.policy.build import build_schedule, fixed_jobs, free_after_fixed, mobile_jobs
from slurm_ones.policy.contract import ClusterView, JobView, Promise, Schedule
from slurm_ones.policy.tables import Tables, build_tables, to_come, within
from slurm_ones.policy.timeline import Filled, FreeTimeline, SpeedCurve, admitted, filled

WHY = reason("least_gpu_time")
NEVER = 1e12
"""Deadline, in seconds from now, of a job without one."""


@dataclass(frozen=True)
class ElasticFlowOptions:
    """Options of ElasticFlow."""

    slot_s: float = 60.0
    """Expected seconds from one decision to the next, for which remaining GPUs are given out. The default is the
    authors'."""

    def __post_init__(self) -> None:
        if not 0 < self.slot_s < float("inf"):
            raise ValueError(f"slot_s: {self.slot_s!r} must be a number above 0")


class ElasticFlow:
    """ElasticFlow (ASPLOS 2023). It has no state: `JobView.promised` shows which jobs were admitted before."""

    name = "elasticflow"
    options_type = ElasticFlowOptions

    def __init__(self, options: ElasticFlowOptions | None = None) -> None:
        self.options = options or ElasticFlowOptions()

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        fixed = fixed_jobs(cluster, jobs)
        mobile = mobile_jobs(jobs, fixed)
        tables = build_tables(cluster, [_limited(cluster, job) for job in mobile], "requested")
        free = int(free_after_fixed(cluster, jobs, fixed).sum())
        curves = [_curve(tables, j, now) for j in range(len(mobile))]
        moments = [self.options.slot_s, *(curve.due_s for curve in curves if 0 < curve.due_s < NEVER)]
        timeline = FreeTimeline.of(free, moments, now, cluster.reserved)
        promised = [j for j, job in enumerate(mobile) if job.promised and job.deadline is not None]
        promises: dict[int, Promise] = {}
        for j, job in enumerate(mobile):
            if job.deadline is None or job.promised is not None:
                continue
            promises[job.job_id] = _admission(timeline, [curves[p] for p in promised], curves[j])
            if promises[job.job_id].given:
                promised.append(j)
        wanted = self._wanted(timeline, curves, promised, mobile)
        made = build_schedule(cluster, jobs, fixed, tables, wanted, WHY)
        return replace(made, promises=promises)

    def _wanted(
        self, timeline: FreeTimeline, curves: Sequence[SpeedCurve], promised: Sequence[int], mobile: Sequence[JobView]
    ) -> Mapping[int, int]:
        """Return the GPUs that each job gets now, by job id, admitted jobs first."""
        shares = dict(zip(promised, filled(timeline, [curves[j] for j in promised]), strict=True))
        gpus = {j: int(shares[j].gpus[0]) if j in shares else 0 for j in range(len(mobile))}
        left = int(timeline.free[0]) - sum(gpus.values())
        idle = timeline
        for share in shares.values():
            idle = idle.taken(share)
        cost = {j: _marginal(idle, curves[j], gpus[j], shares.get(j)) for j in gpus}
        while True:
            fits = [j for j in gpus if (size := _next(curves[j], gpus[j])) and size - gpus[j] <= left]
            if not fits:
                break
            best = min(fits, key=lambda j: (gpus[j] > 0, cost[j], j))
            size = _next(curves[best], gpus[best])
            left -= size - gpus[best]
            gpus[best] = size
            cost[best] = _marginal(idle, curves[best], size, shares.get(best))
        order = sorted(gpus, key=lambda j: (j not in shares, curves[j].due_s, j))
        return {mobile[j].job_id: gpus[j] for j in order}


def _limited(cluster: ClusterView, job: JobView) -> JobView:
    each = max(cluster.gpus_per_node, 1)
    sizes = tuple(n for n in job.limits.gpus if (_power(n) and n < each) or (n % each == 0 and _power(n // each)))
    return replace(job, limits=replace(job.limits, gpus=sizes or job.limits.gpus))


def _power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _curve(tables: Tables, j: int, now: float) -> SpeedCurve:
    job = tables.jobs[j]
    due = NEVER if job.deadline is None else within(job.deadline - now, 0.0, NEVER)
    return SpeedCurve.of(tables.sizes, tables.goodput[j], to_come(job), due, within(job.resize_s, 0.0, NEVER))


def _admission(timeline: FreeTimeline, promised: Sequence[SpeedCurve], new: SpeedCurve) -> Promise:
    found, broken = admitted(timeline, promised, new)
    if not found.met:
        return Promise(False, reason("deadline_no_room", percent=100 * found.share))
    if broken is not None:
        return Promise(False, reason("deadline_breaks"))
    return Promise(True, reason("deadline_promised", gpus=int(found.gpus.max(initial=0))))


def _next(curve: SpeedCurve, gpus: int) -> int:
    above = np.searchsorted(curve.sizes, gpus, side="right")
    return int(curve.sizes[above]) if above < len(curve.sizes) else 0


def _marginal(idle: FreeTimeline, curve: SpeedCurve, gpus: int, share: Filled | None) -> float:
    """Return the rise of a job's total GPU-seconds per added GPU at its next larger size; 0 if there is none."""
    size = _next(curve, gpus)
    if not size:
        return 0.0
    if share is None or not share.met:
        rate: dict[int, float] = dict(zip(curve.sizes.tolist(), curve.rate.tolist(), strict=True))
        held = gpus / rate[gpus] if gpus else 0.0
        return curve.work * (size / rate[size] - held) / (size - gpus)
    mine = replace(idle, free=idle.free + share.gpus)
    return float(mine.fill(curve, size).gpu_s - mine.fill(curve, gpus).gpu_s) / (size - gpus)

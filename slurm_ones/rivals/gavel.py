"""Gavel: rigid jobs take turns on GPUs of several kinds, according to their speeds on each kind.

Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning Workloads", OSDI 2020. Our sources
are the abstract, the talk's outline and summaries of the public code, not the paper itself. From these sources:

- An allocation X: job j runs on GPUs of kind k for the fraction X_jk of the time. The effective throughput of a job is
  Σ_k X_jk T_jk. The fractions of a job sum to at most 1. On average no kind has more GPUs in use than the cluster has.
- The objective: a job's effective throughput is divided by its throughput with equal time on every kind. `max_min`
  maximises the least of these relative throughputs, `max_sum` their sum.
- Rounds: a job's priority on a kind is X_jk divided by the fraction of rounds in which it has had this kind. In each
  round jobs get GPUs in order of priority.

Differences: a job always has its requested size and batch, and T_jk is its goodput with them. With `max_min`, GPUs that
do not raise the minimum are given so that the sum is largest. Two jobs never share one GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import scipy

from ones_db.reasons import reason
from ones_wrapper.protocol.choices import listed
from slurm_ones.policy.build import build_by_kind, fixed_jobs, mobile_jobs
from slurm_ones.policy.contract import ClusterView, Floats, Ints, JobView, Schedule
from slurm_ones.policy.ledger import free_of_kind
from slurm_ones.policy.tables import build_tables, predict, requested_allocation

Objective = Literal["max_min", "max_sum"]
LEFT_OVER = 1e-3
"""Weight of the sum of relative throughputs in the objective of `max_min`, so small that it decides only about GPUs
that are left over."""


@dataclass(frozen=True)
class GavelOptions:
    """Options of Gavel."""

    objective: Objective = "max_min"
    """Objective to maximise: the minimum of the jobs' relative throughputs, or their sum."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective: {self.objective!r} is none of {listed(get_args(Objective), self.objective)}")


class Gavel:
    """Gavel (OSDI 2020). It remembers how many rounds each job has had on each kind of GPU."""

    name = "gavel"
    options_type = GavelOptions

    def __init__(self, options: GavelOptions | None = None) -> None:
        self.options = options or GavelOptions()
        self._had: dict[int, dict[str, float]] = {}
        self._rounds: dict[int, int] = {}

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        fixed = fixed_jobs(cluster, jobs)
        mobile = mobile_jobs(jobs, fixed)
        self._had = {job.job_id: self._had.get(job.job_id, {}) for job in jobs}
        self._rounds = {job.job_id: self._rounds.get(job.job_id, 0) for job in jobs}
        gpus, speeds = _speeds(cluster, mobile)
        there = free_of_kind(cluster, [job for job in jobs if job.job_id in fixed])
        shares = allocate(gpus, speeds, there, self.options.objective)
        wanted = self._round(cluster, mobile, gpus, speeds, shares, there)
        why = reason("turn", first="jobs that have had the least of their share of time")
        parts = [
            build_tables(cluster.of_kind(kind), cluster.views_on(kind, mobile), "requested")
            for kind in cluster.kinds or ("",)
        ]
        schedule = build_by_kind(cluster, jobs, fixed, parts, wanted, why)
        for id_ in self._rounds:
            self._rounds[id_] += 1
        for id_, got in schedule.allocations.items():
            self._had[id_][got.kind] = self._had[id_].get(got.kind, 0.0) + 1.0
        return schedule

    def _round(
        self, cluster: ClusterView, jobs: Sequence[JobView], gpus: Ints, speeds: Floats, shares: Floats, there: Ints
    ) -> dict[int, tuple[str, int]]:
        """Return kind and GPUs of each job that runs in this round, by job id."""
        owed = defaultdict(float)
        for j, job in enumerate(jobs):
            for k, kind in enumerate(cluster.kinds):
                if speeds[j, k] > 0 and gpus[j, k]:
                    had = self._had[job.job_id].get(kind, 0.0) / max(self._rounds[job.job_id], 1)
                    owed[j, k] = shares[j, k] / max(had, 1e-3)
        left, found = there.copy(), dict[int, tuple[str, int]]()
        # Of equal jobs those that keep their kind come first, then those on the faster kind.
        for j, k in sorted(owed, key=lambda at: (-owed[at], -speeds[at])):
            if jobs[j].job_id not in found and gpus[j, k] <= left[k]:
                found[jobs[j].job_id] = cluster.kinds[k], int(gpus[j, k])
                left[k] -= gpus[j, k]
        return found


def _speeds(cluster: ClusterView, jobs: Sequence[JobView]) -> tuple[Ints, Floats]:
    """Return two (J, K) arrays: each job's requested GPUs on each kind, and its goodput on them. Both are 0 if the kind
    has too few GPUs."""
    gpus = np.zeros((len(jobs), len(cluster.kinds)), dtype=np.int64)
    speeds = np.zeros(gpus.shape)
    for k, kind in enumerate(cluster.kinds):
        part = cluster.of_kind(kind)
        for j, view in enumerate(cluster.views_on(kind, jobs)):
            got = requested_allocation(part, view)
            if got is not None and got.shape.gpus <= part.gpus:
                nodes, count = np.array([got.shape.nodes]), np.array([got.shape.gpus])
                gpus[j, k] = got.shape.gpus
                speeds[j, k] = predict(view, nodes, count, np.array([[got.batch]]))[1][0, 0]
    return gpus, speeds


def allocate(gpus: Ints, speeds: Floats, there: Ints, objective: Objective) -> Floats:
    """Return X (J, K), the fraction of time that each job is to run on each kind.

    `gpus` and `speeds` (J, K) are the job's GPUs and goodput on the kind; `there` (K,) is the number of GPUs of the
    kind.
    """
    jobs, kinds = gpus.shape
    if not jobs or not kinds:
        return np.zeros((jobs, kinds))
    equal = np.maximum(speeds.sum(axis=1, keepdims=True) / kinds, 1e-300)
    relative = np.where(speeds.sum(axis=1, keepdims=True) > 0, speeds / equal, 0.0)
    size = jobs * kinds
    own = np.kron(np.eye(jobs), np.ones(kinds))
    of_kind = (np.eye(kinds)[None] * gpus[:, None, :]).transpose(1, 0, 2).reshape(kinds, size)
    limits, most = [np.column_stack([own, np.zeros(jobs)])], [np.ones(jobs)]
    limits.append(np.column_stack([of_kind, np.zeros(kinds)]))
    most.append(np.asarray(there, dtype=np.float64))
    weight = np.append(-relative.ravel(), 0.0)
    can = relative.max(axis=1) > 0
    if objective == "max_min" and can.any():
        rows = -np.kron(np.eye(jobs), np.ones(kinds)) * relative.ravel()
        limits.append(np.column_stack([rows, np.ones(jobs)])[can])
        most.append(np.zeros(int(can.sum())))
        weight = np.append(LEFT_OVER * weight[:-1] / size, -1.0)
    possible = [(0.0, 1.0 if speed > 0 else 0.0) for speed in speeds.ravel()]
    found = scipy.optimize.linprog(
        weight, np.concatenate(limits), np.concatenate(most), bounds=[*possible, (0.0, None)]
    )
    return found.x[:-1].reshape(jobs, kinds) if found.x is not None else np.zeros((jobs, kinds))

"""Jobs served in an order of precedence, each at the size it asked for, those that come too late interrupted.

What SRTF, SRSF and Tiresias share; they differ in the order alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_ones.decide.build import fits_nowhere
from slurm_ones.reasons import Reason, reason
from slurm_ones.schedule.fixed import pinned
from slurm_ones.schedule.policy import Allocation, ClusterView, Ints, JobView, Schedule
from slurm_ones.schedule.tables import asked
from slurm_ones.slurm.model import Shape


def serve(cluster: ClusterView, jobs: Sequence[JobView], order: Sequence[JobView], first: str) -> Schedule:
    """The schedule that gives GPUs in `order` (of all `jobs`, pinned ones are skipped) until none are left.

    A job that does not fit is passed over and later ones may start. A running job keeps its size, batch and nodes
    while its turn comes in time, else it is parked. Where only whole shapes can be placed, a job whose turn comes
    earlier may take the node of one whose turn comes later; no running job is moved for any other reason. `first` says
    which jobs go first. Allocations are in the order given.
    """
    stays = pinned(cluster, jobs)
    wanted = {job.job_id: _wanted(cluster, job) for job in order if job.job_id not in stays}
    queue = [job for job in order if wanted.get(job.job_id) is not None]
    floor = _Floor(cluster, [job for job in jobs if job.job_id in stays])
    in_time, late = _by_count(queue, wanted, floor.gpus)
    for job in in_time:
        floor.claim(job)
    given = []
    for group in (in_time, late):
        for job in group:
            got = wanted[job.job_id]
            assert got is not None
            if floor.take(job, got.shape):
                given.append(job.job_id)
    chosen = set(given)
    allocations = {j.job_id: Allocation(j.shape, j.batch) for j in jobs if j.job_id in stays and j.shape is not None}
    parked, reasons = set(), dict(stays)
    for job in order:
        if job.job_id in stays:
            continue
        got = wanted[job.job_id]
        if got is not None and job.job_id in chosen:
            allocations[job.job_id] = got
        else:
            parked.add(job.job_id)
        reasons[job.job_id] = _reason(job, got, job.job_id in chosen, first)
    return Schedule(allocations, reasons, parked=frozenset(parked))


def _wanted(cluster: ClusterView, job: JobView) -> Allocation | None:
    return asked(cluster, job) if job.shape is None else Allocation(job.shape, job.batch)


def _by_count(
    queue: Sequence[JobView], wanted: dict[int, Allocation | None], gpus: int
) -> tuple[list[JobView], list[JobView]]:
    """Those for whom there are GPUs when their turn comes, wherever these are, and the others."""
    in_time: list[JobView] = []
    late: list[JobView] = []
    for job in queue:
        got = wanted[job.job_id]
        assert got is not None
        fits = got.shape.gpus <= gpus
        gpus -= got.shape.gpus if fits else 0
        (in_time if fits else late).append(job)
    return in_time, late


def _reason(job: JobView, got: Allocation | None, runs: bool, first: str) -> Reason:
    if got is None:
        return fits_nowhere(job)
    if runs:
        return reason("turn", first=first)
    return reason("no_room", gpus=got.shape.gpus) if job.shape is None else reason("interrupted", first=first)


class _Floor:
    """Free GPUs node by node, and those that running jobs whose turn is still to come sit on."""

    def __init__(self, cluster: ClusterView, staying: Sequence[JobView]) -> None:
        self._at = {node.name: i for i, node in enumerate(cluster.nodes)}
        self._free: Ints = np.array([node.gpus for node in cluster.nodes], dtype=np.int64)
        self._uniform = cluster.uniform
        for job in staying:
            for name, gpus in job.nodes.items():
                if name in self._at:
                    self._free[self._at[name]] -= gpus
        self._free = np.maximum(self._free, 0)
        self._claimed: Ints = np.zeros_like(self._free)
        self.gpus = int(self._free.sum())
        """Free GPUs in all; where shapes may be spread, nothing else counts."""

    def claim(self, job: JobView) -> None:
        """Remember what a running job sits on."""
        for name, gpus in job.nodes.items():
            self._claimed[self._at[name]] += gpus

    def take(self, job: JobView, shape: Shape) -> bool:
        """GPUs for the job, its own where it runs; False where they are gone."""
        if not self._uniform:
            fits = shape.gpus <= self.gpus
            self.gpus -= shape.gpus if fits else 0
            return fits
        nodes = [self._at[name] for name in job.nodes] if job.shape is not None else self._find(shape)
        each = list(job.nodes.values()) if job.shape is not None else [shape.gpus_per_node] * len(nodes)
        if job.shape is not None:
            self._claimed[nodes] = np.maximum(self._claimed[nodes] - each, 0)
        if not nodes or (self._free[nodes] < each).any():
            return False
        self._free[nodes] -= each
        return True

    def _find(self, shape: Shape) -> list[int]:
        """Nodes where least is left over, those that nobody sits on first; empty where there are too few."""
        open_ = self._free - self._claimed
        gpus = shape.gpus_per_node
        enough = np.flatnonzero(self._free >= gpus)
        if len(enough) < shape.nodes:
            return []
        taken = np.maximum(gpus - open_[enough], 0)
        far = int(self._free.max()) + 1
        cost = taken * far + np.where(taken == 0, open_[enough], 0)
        return [int(i) for i in enough[np.argsort(cost, kind="stable")[: shape.nodes]]]

"""What one decision searches over, as arrays: jobs that may change, their sizes, and the GPUs left for them.

J jobs, N nodes, U sizes. A size is a GPU count with its one shape; column 0 of every table is size 0, waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.reasons import Reason
from slurm_ones.schedule.policy import Allocation, ClusterView, Floats, Ints, JobView
from slurm_ones.schedule.shapes import shape_of
from slurm_ones.schedule.tables import Bools, Tables, build_tables

LARGEST = 1e15
"""Samples that no job exceeds."""


@dataclass(frozen=True)
class Space:
    """The jobs that may change or start, first come first, and what each can be given."""

    cluster: ClusterView
    tables: Tables
    """Their sizes, batches (in proportion to the GPUs, ONES §3.3) and speeds."""
    pinned: Mapping[int, Reason]
    """Why each other job keeps its place or its wait, by job id."""
    waiting_pinned: int

    capacity: Ints
    """(N,) GPUs of each node that pinned jobs leave."""
    home: Floats
    """(J, N) GPUs that each job holds now, as floats for the products of matrices."""
    slots: Ints
    """(GPUs,) job that holds each GPU now, in node order; J where it is idle."""
    place: Ints
    """(GPUs,) how many GPUs that job holds before this one."""
    current: Ints
    """(J,) GPUs held now; 0 for a waiting job."""
    start: Ints
    """(J,) smallest size, the current one counted; 0 where no size of the job exists on this cluster."""
    below: Ints
    """(J, U) the job's largest size up to each size; 0 where it has none."""
    column: Ints
    """(GPUs + 1,) column of the largest size up to each count."""

    samples: Floats
    """(J,) samples used so far."""
    alpha: Floats
    beta: Floats
    """(J,) parameters of ρ."""

    @property
    def jobs(self) -> tuple[JobView, ...]:
        return self.tables.jobs

    @property
    def running(self) -> Bools:
        """(J,)"""
        return self.current > 0

    def largest(self, bound: Ints) -> Ints:
        """Each job's largest size up to `bound` (…, J); 0 where there is none."""
        found: Ints = self.below[np.arange(len(self.jobs)), self.column[np.minimum(bound, len(self.column) - 1)]]
        return found

    def speed(self, counts: Ints) -> Floats:
        """(…, J) samples/s at sizes (…, J); 0 at size 0."""
        found: Floats = self.tables.speed[np.arange(len(self.jobs)), self.column[counts]]
        return found

    def allocation(self, j: int, gpus: int) -> Allocation:
        """What job j gets at a size: the current size keeps the current shape."""
        job = self.jobs[j]
        kept = job.shape if gpus == self.current[j] else None
        shape = kept or shape_of(self.cluster, gpus)
        assert shape is not None, f"job {job.job_id}: {gpus} GPUs have no shape here"
        return Allocation(shape, int(self.tables.batch[j, self.column[gpus]]))


def build(cluster: ClusterView, jobs: Sequence[JobView], pinned: Mapping[int, Reason]) -> Space:
    """The space of one decision; jobs named in `pinned` take no part."""
    mobile = sorted((j for j in jobs if j.job_id not in pinned), key=lambda j: (j.submitted, j.job_id))
    staying = [job for job in jobs if job.job_id in pinned]
    tables = build_tables(cluster, mobile, "scaled")
    index = {node.name: n for n, node in enumerate(cluster.nodes)}
    capacity = np.array([node.gpus for node in cluster.nodes], dtype=np.int64)
    home = np.zeros((len(mobile), len(capacity)), dtype=np.int64)
    for job in staying:
        for name, gpus in job.nodes.items():
            if name in index:
                capacity[index[name]] -= gpus
    for j, job in enumerate(mobile):
        for name, gpus in job.nodes.items():
            home[j, index[name]] = gpus
    capacity = np.maximum(capacity, 0)
    current = home.sum(axis=1)
    slots = _slots(home, capacity)
    columns = np.arange(len(tables.sizes))
    best = np.maximum.accumulate(np.where(tables.allowed, columns, 0), axis=1)
    return Space(
        cluster=cluster,
        tables=tables,
        pinned=pinned,
        waiting_pinned=sum(job.shape is None for job in staying),
        capacity=capacity,
        home=home.astype(np.float64),
        slots=slots,
        place=_place(slots, len(mobile)),
        current=current,
        start=tables.sizes[tables.allowed.argmax(axis=1)],  # column 0, size 0, where there is none
        below=tables.sizes[best],
        column=np.searchsorted(tables.sizes, np.arange(int(tables.sizes[-1]) + 1), side="right") - 1,
        samples=np.array([_within(job.samples, 0.0, LARGEST) for job in mobile]),
        alpha=np.array([_within(job.progress.alpha, 0.01, LARGEST) for job in mobile]),
        beta=np.array([_within(job.progress.beta, 0.01, LARGEST) for job in mobile]),
    )


def _slots(home: Ints, capacity: Ints) -> Ints:
    """The job of each GPU: each node's in job order, idle ones last."""
    jobs, nodes = home.shape
    lengths = np.concatenate([home.T, (capacity - home.sum(axis=0))[:, None]], axis=1)
    return np.repeat(np.tile(np.arange(jobs + 1), nodes), lengths.ravel())


def _place(slots: Ints, jobs: int) -> Ints:
    """How often each GPU's job comes before it."""
    order = np.argsort(slots, kind="stable")
    first = np.cumsum(np.bincount(slots, minlength=jobs + 1)) - np.bincount(slots, minlength=jobs + 1)
    place = np.empty(len(slots), dtype=np.int64)
    place[order] = np.arange(len(slots)) - first[slots[order]]
    return place


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high) if value == value else low

"""What one decision searches over, as arrays: jobs that may change, their sizes, and the GPUs left for them.

J jobs, N nodes, U sizes. A size is a GPU count with its one shape; column 0 of every table is size 0,
waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurm_ones.decide.policy import Allocation, ClusterView, Floats, Ints, JobView
from slurm_ones.decide.shapes import nodes_of, scaled_batch, shape_of

Bools = npt.NDArray[np.bool_]

SLOWEST = 1e-6
"""Samples/s that any prediction is raised to, so that no score is infinite."""
FASTEST = 1e12
LARGEST = 1e15
"""Samples that no job exceeds."""


@dataclass(frozen=True)
class Space:
    """The jobs that may change or start, first come first, and what each can be given."""

    cluster: ClusterView
    jobs: tuple[JobView, ...]
    pinned: Mapping[int, str]
    """Why each other job keeps its place or its wait, by job id."""
    pinned_ends: Floats
    """Predicted seconds to the end of each running pinned job of which that can be said."""
    waiting_pinned: int

    capacity: Ints
    """(N,) GPUs of each node that pinned jobs leave."""
    home: Ints
    """(J, N) GPUs that each job holds now."""
    shelter: Ints
    """(J, N) the job's smallest size inside its home, where it always has a place; zeros if it does not
    fit."""
    current: Ints
    """(J,) GPUs held now; 0 for a waiting job."""
    floor: Ints
    """(J,) GPUs below which the job may not fall: its smallest size, 0 for a waiting job."""
    start: Ints
    """(J,) smallest size, the current one counted; 0 where no size of the job exists on this cluster."""

    sizes: Ints
    """(U,) every size of any job, ascending from 0."""
    column: Ints
    """(largest size + 1,) column of each size; only those in `sizes` mean anything."""
    allowed: Bools
    """(J, U) sizes a job may newly get: in its limits, with a shape and a batch. Its current size is not
    among them."""
    batch: Ints
    """(J, U) global batch at each allowed or current size, else 0."""
    speed: Floats
    """(J, U) predicted samples/s there, else 0."""
    goodput: Floats
    """(J, U) speed × statistical efficiency, at least `SLOWEST` where the job can run, else 0."""

    samples: Floats
    """(J,) samples used so far."""
    alpha: Floats
    beta: Floats
    """(J,) parameters of ρ."""
    to_come: Floats
    """(J,) samples expected to be still needed: with α the epochs done, β epochs are to come."""

    @property
    def running(self) -> Bools:
        """(J,)"""
        return self.current > 0

    def seconds(self, counts: Ints) -> Floats:
        """(…, J) predicted seconds to the end at these counts (…, J); infinite for a job that waits."""
        goodput = self.goodput[np.arange(len(self.jobs)), self.column[counts]]
        with np.errstate(divide="ignore"):
            return np.where(counts > 0, self.to_come / goodput, np.inf)

    def best_below(self, bound: Ints) -> Ints:
        """Largest allowed size up to `bound` for each job in the last axis (…, J); 0 where there is none."""
        fits = self.allowed & (self.sizes <= bound[..., None])
        result: Ints = (fits * self.sizes).max(axis=-1)
        return result

    def snap(self, wanted: Ints, limit: Ints) -> Ints:
        """Counts (K, J) brought down to sizes within `limit` (J,), those of running jobs up to their
        floor."""
        bound = np.minimum(wanted, limit)
        size = self.best_below(bound)
        kept = (self.current <= bound) & (self.current > size)
        return np.maximum(np.where(kept, self.current, size), self.floor)

    def allocation(self, j: int, gpus: int) -> Allocation:
        """What job j gets at a size: the current size keeps the current shape."""
        job = self.jobs[j]
        kept = job.shape if gpus == self.current[j] else None
        shape = kept or shape_of(self.cluster, gpus)
        assert shape is not None, f"job {job.job_id}: {gpus} GPUs have no shape here"
        return Allocation(shape, int(self.batch[j, self.column[gpus]]))


def build(cluster: ClusterView, jobs: Sequence[JobView], pinned: Mapping[int, str]) -> Space:
    """The space of one decision.

    Jobs named in `pinned` take no part, nor do running jobs whose nodes the cluster does not account for
    (drained nodes, a snapshot taken in mid-change): they keep what they have.
    """
    pinned = {**_unaccounted(cluster, jobs), **pinned}
    mobile = tuple(sorted((j for j in jobs if j.job_id not in pinned), key=lambda j: (j.submitted, j.job_id)))
    staying = [job for job in jobs if job.job_id in pinned]

    node_index = {node.name: n for n, node in enumerate(cluster.nodes)}
    capacity = np.array([node.gpus for node in cluster.nodes], dtype=np.int64)
    home = np.zeros((len(mobile), len(capacity)), dtype=np.int64)
    for job in staying:
        for name, gpus in job.nodes.items():
            if name in node_index:
                capacity[node_index[name]] -= gpus
    for j, job in enumerate(mobile):
        for name, gpus in job.nodes.items():
            home[j, node_index[name]] = gpus
    capacity = np.maximum(capacity, 0)

    batches = [_batches(cluster, job) for job in mobile]
    current = home.sum(axis=1)
    sizes = np.array(sorted({0, *current.tolist(), *(n for table in batches for n in table)}), dtype=np.int64)
    column = np.zeros(sizes[-1] + 1, dtype=np.int64)
    column[sizes] = np.arange(len(sizes))

    batch = np.zeros((len(mobile), len(sizes)), dtype=np.int64)
    speed = np.zeros(batch.shape)
    goodput = np.zeros(batch.shape)
    for j, job in enumerate(mobile):
        table = batches[j] if current[j] == 0 else {int(current[j]): max(job.batch, 1), **batches[j]}
        counts = np.array(list(table), dtype=np.int64)
        at = column[counts]
        batch[j, at] = list(table.values())
        speed[j, at], goodput[j, at] = _predict(cluster, job, counts, batch[j, at])
    allowed = (batch > 0) & (sizes != current[:, None])

    start = sizes[(batch > 0).argmax(axis=1)]  # column 0, size 0, where there is none
    floor = np.where(current > 0, start, 0)
    return Space(
        cluster=cluster,
        jobs=mobile,
        pinned=pinned,
        pinned_ends=np.array([_end(cluster, job) for job in staying if job.shape is not None and job.dataset > 0]),
        waiting_pinned=sum(job.shape is None for job in staying),
        capacity=capacity,
        home=home,
        shelter=_shelter(home, current, floor, cluster.gpus_per_node),
        current=current,
        floor=floor,
        start=start,
        sizes=sizes,
        column=column,
        allowed=allowed,
        batch=batch,
        speed=speed,
        goodput=goodput,
        samples=np.array([_within(job.samples, 0.0, LARGEST) for job in mobile]),
        alpha=np.array([_within(job.progress.alpha, 0.01, LARGEST) for job in mobile]),
        beta=np.array([_within(job.progress.beta, 0.01, LARGEST) for job in mobile]),
        to_come=np.array([_to_come(job) for job in mobile]),
    )


def _unaccounted(cluster: ClusterView, jobs: Sequence[JobView]) -> dict[int, str]:
    """Running jobs whose GPUs do not add up on the cluster's nodes."""
    held: dict[str, int] = {}
    for job in jobs:
        for name, gpus in job.nodes.items():
            held[name] = held.get(name, 0) + gpus
    sound = {node.name for node in cluster.nodes if held.get(node.name, 0) <= node.gpus}
    return {
        job.job_id: "some of its nodes are not available to others now"
        for job in jobs
        if (job.shape.gpus if job.shape else 0) != sum(job.nodes.values()) or not sound.issuperset(job.nodes)
    }


def _batches(cluster: ClusterView, job: JobView) -> dict[int, int]:
    """Global batch at each size that the job can have on this cluster."""
    counts = [n for n in sorted(set(job.limits.gpus)) if shape_of(cluster, n)]
    found = {n: scaled_batch(job.limits, job.base_batch, counts[0], n) for n in counts}
    return {n: batch for n, batch in found.items() if batch is not None}


def _predict(cluster: ClusterView, job: JobView, counts: Ints, batches: Ints) -> tuple[Floats, Floats]:
    """Samples/s and goodput, made finite and positive whatever the models say."""
    nodes = np.array([nodes_of(cluster, int(n)) for n in counts], dtype=np.int64)
    speed = np.asarray(job.model.throughput(nodes, counts, batches), dtype=np.float64)
    speed = np.clip(np.nan_to_num(speed, nan=0.0, posinf=0.0, neginf=0.0), SLOWEST, FASTEST)
    efficiency = np.asarray(job.efficiency.efficiency(batches), dtype=np.float64)
    efficiency = np.clip(np.nan_to_num(efficiency, nan=1.0, posinf=1.0, neginf=1.0), 1e-3, 1.0)
    return speed, np.maximum(speed * efficiency, SLOWEST)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high) if value == value else low


def _to_come(job: JobView) -> float:
    return max(job.dataset, 1) * _within(job.progress.beta, 0.01, LARGEST)


def _end(cluster: ClusterView, job: JobView) -> float:
    assert job.shape is not None
    gpus, batch = np.array([max(job.shape.gpus, 1)]), np.array([max(job.batch, 1)])
    return _to_come(job) / float(_predict(cluster, job, gpus, batch)[1][0])


def _shelter(home: Ints, current: Ints, floor: Ints, per_node: int) -> Ints:
    """Each running job's smallest size on nodes it already holds."""
    each = np.minimum(floor, per_node)[:, None]
    nodes = np.maximum(floor // max(per_node, 1), 1)[:, None]
    fits = (home >= each) & (each > 0)
    chosen = fits & (np.cumsum(fits, axis=1) <= nodes)
    inside = np.where(chosen & (fits.sum(axis=1, keepdims=True) >= nodes), each, 0)
    return np.where((floor == current)[:, None], home, inside)

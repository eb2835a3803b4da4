"""What each job could have, as arrays: its sizes, the batch at each, and the speed and goodput there.

Shared by all policies that weigh sizes. J jobs, U sizes; column 0 is size 0, waiting.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slurm_ones.schedule.policy import Allocation, Bools, ClusterView, Floats, Ints, JobView, Limits
from slurm_ones.schedule.shapes import bounds, least_and_most, nodes_of, quanta, scaled_batch, shape_of

BatchRule = Literal["requested", "scaled", "best"]
"""Global batch at a size: as its user submitted it; in proportion to the GPUs (ONES §3.3); of highest goodput."""

BATCHES = 14
"""Batches tried at each size for the best."""
STEPS: Floats = np.linspace(0.0, 1.0, BATCHES)
SLOWEST, FASTEST = 1e-6, 1e12
"""Samples/s between which any prediction is taken."""


@dataclass(frozen=True)
class Tables:
    """Sizes and predictions of the jobs that may change or start."""

    jobs: tuple[JobView, ...]
    sizes: Ints
    """(U,) every size of any job, ascending from 0."""
    nodes: Ints
    """(U,) nodes that each takes."""
    current: Ints
    """(J,) column of the size held now; 0 for a waiting job."""
    allowed: Bools
    """(J, U) sizes that the job may have, its current one included; 0 is not among them."""
    batch: Ints
    """(J, U) global batch there, else 0."""
    speed: Floats
    """(J, U) samples/s there, else 0."""
    goodput: Floats
    """(J, U) progress/s there in samples of the base batch, else 0."""
    uncertainty: Floats
    """(J, U) relative standard deviation of the speed."""


def build_tables(cluster: ClusterView, jobs: Sequence[JobView], rule: BatchRule = "best") -> Tables:
    """Tables of the given jobs on this cluster. A running job's current size is allowed whatever its limits say."""
    placeable = {n for n in set().union(*{job.limits.gpus for job in jobs}) if shape_of(cluster, n) is not None}
    # Jobs of one kind have the same choice.
    kinds = [(job.limits, job.shape.gpus if job.shape else 0) for job in jobs]
    choice = {kind: _counts(placeable, *kind) for kind in set(kinds)}
    counts = [choice[kind] for kind in kinds]
    sizes = np.array(sorted({0, *(n for found in counts for n in found)}), dtype=np.int64)
    column = {int(n): u for u, n in enumerate(sizes)}
    shape = (len(jobs), len(sizes))
    batch, speed, goodput = np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape)
    uncertainty = np.zeros(shape)
    alike: dict[tuple[Limits, int, int, int, int], tuple[Ints, Ints, Ints]] = {}
    for j, job in enumerate(jobs):
        if not counts[j]:
            continue
        kind = (*kinds[j], job.batch, job.base_batch, job.requested_batch)
        if kind not in alike:
            gpus = np.array(counts[j], dtype=np.int64)
            alike[kind] = gpus, np.array([column[n] for n in counts[j]]), batch_options(job, gpus, rule)
        gpus, at, options = alike[kind]
        nodes = _nodes(cluster, job, gpus)
        fast, good = predict(job, nodes, gpus, options)
        best = good.argmax(axis=1)
        rows = np.arange(len(gpus))
        chosen = options[rows, best]
        batch[j, at], speed[j, at], goodput[j, at] = chosen, fast[rows, best], good[rows, best]
        known = _finite(job.model.uncertainty(nodes, gpus, chosen), nan=1.0, infinite=1.0)
        uncertainty[j, at] = np.minimum(np.maximum(known, 0.0), 1.0)
    current = np.array([column[job.shape.gpus] if job.shape else 0 for job in jobs], dtype=np.int64)
    nodes_taken = np.array([nodes_of(cluster, int(n)) for n in sizes], dtype=np.int64)
    return Tables(tuple(jobs), sizes, nodes_taken, current, batch > 0, batch, speed, goodput, uncertainty)


def predict(job: JobView, nodes: Ints, gpus: Ints, batches: Ints) -> tuple[Floats, Floats]:
    """Samples/s and goodput (S, B) at sizes (S,) and batches (S, B); finite and positive whatever the models say."""
    wide = batches.shape
    args = (np.repeat(nodes, wide[1]), np.repeat(gpus, wide[1]), batches.ravel())
    speed = _finite(job.model.throughput(*args), nan=0.0, infinite=0.0).reshape(wide)
    speed = np.minimum(np.maximum(speed, SLOWEST), FASTEST)
    worth = _finite(job.efficiency.efficiency(args[2]), nan=1.0, infinite=1.0).reshape(wide)
    worth = np.minimum(np.maximum(worth, 1e-6), 1.0)
    return speed, np.maximum(speed * worth, SLOWEST)


def _finite(said: Floats, *, nan: float, infinite: float) -> Floats:
    """What a model said, with something in place of what is no number."""
    values = np.asarray(said, dtype=np.float64)
    if np.isfinite(values).all():
        return values
    return np.where(np.isfinite(values), values, np.where(np.isnan(values), nan, infinite))


def _counts(placeable: Set[int], limits: Limits, held: int) -> list[int]:
    """Sizes that a job can have here with some batch, ascending; what it holds among them."""
    sizes = np.array([n for n in limits.gpus if n in placeable], dtype=np.int64)
    least, most = bounds(limits, sizes)
    found = set(sizes[least <= most].tolist())
    return sorted(found | {held} if held else found)


def _nodes(cluster: ClusterView, job: JobView, gpus: Ints) -> Ints:
    """(S,) nodes that the job takes at sizes (S,)."""
    nodes = -(-gpus // max(cluster.gpus_per_node, 1))
    if job.shape is not None and cluster.uniform:
        nodes[gpus == job.shape.gpus] = job.shape.nodes
    return nodes


def batch_options(job: JobView, gpus: Ints, rule: BatchRule) -> Ints:
    """(S, B) global batches to choose from at sizes (S,)."""
    if rule == "requested":
        return _clamped(job, job.requested_batch, gpus)[:, None]
    if rule == "scaled":
        smallest = min(job.limits.gpus, default=1)
        scaled = [scaled_batch(job.limits, job.base_batch, smallest, int(n)) for n in gpus]
        return np.array([[batch or max(job.batch, 1)] for batch in scaled], dtype=np.int64)
    least, most = bounds(job.limits, gpus)
    low = np.where(least <= most, least, max(job.batch, 1)).astype(np.float64)
    high = np.where(least <= most, most, max(job.batch, 1)).astype(np.float64)
    grid = low[:, None] * (high / low)[:, None] ** STEPS
    # Multiples of the replicas, so that all have equally much to do.
    unit = quanta(job.limits, gpus, even=True)[:, None]
    even = np.maximum(np.round(grid / unit), 1) * unit
    even = np.where(even > high[:, None], np.floor(high[:, None] / unit) * unit, even)
    even = np.where(even < low[:, None], np.ceil(low[:, None] / unit) * unit, even)
    fits = (even >= low[:, None]) & (even <= high[:, None])
    result: Ints = np.where(fits, even, low[:, None]).astype(np.int64)
    return result


def asked(cluster: ClusterView, job: JobView) -> Allocation | None:
    """What its user asked for, as far as it can be had here: the nearest valid size below, or else the smallest.

    None where the job can have no size on this cluster.
    """
    below = sorted((n for n in job.limits.gpus if n <= job.requested), reverse=True)
    for gpus in [*below, *sorted(n for n in job.limits.gpus if n > job.requested)]:
        shape = shape_of(cluster, gpus)
        least, most = least_and_most(job.limits, gpus)
        if shape is not None and least <= most:
            return Allocation(shape, int(_clamped(job, job.requested_batch, np.array([gpus]))[0]))
    return None


def _clamped(job: JobView, batch: int, gpus: Ints) -> Ints:
    """(S,) the batch as near as the limits allow at sizes (S,); the job's own where they allow none."""
    least, most = bounds(job.limits, gpus)
    quantum = quanta(job.limits, gpus)
    near = np.minimum(np.maximum(np.round(batch / quantum).astype(np.int64) * quantum, least), most)
    return np.where(least <= most, near, max(job.batch, 1))

"""Tables of the sizes that jobs may have, and of the batch, throughput and goodput at each size.

A table has J rows for jobs and U columns for sizes. Column 0 is size 0: the job waits. If there are several kinds of
GPU, a column is a size on one kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ones_db.shape import Shape
from slurm_ones.policy.contract import (
    Allocation,
    Bools,
    ClusterView,
    EfficiencyModel,
    Floats,
    Ints,
    JobView,
    Limits,
    ThroughputModel,
)
from slurm_ones.policy.shapes import bounds, least_and_most, nodes_of, quanta, scaled_batch, shape_of

LONGEST = 1e12
"""Upper bound on a remaining time, in seconds."""


def to_come(job: JobView) -> float:
    """Return the expected remaining progress, in samples at the base batch; always positive and finite."""
    beta = job.progress.beta
    return min(max(beta, 1e-3), 1e9) * max(job.dataset, 1) if math.isfinite(beta) else 1e9 * max(job.dataset, 1)


def within(value: float, low: float, high: float) -> float:
    """Return the value clamped to the bounds; NaN becomes the lower bound."""
    return min(max(value, low), high) if value == value else low


def expected_gain(job: JobView | None, new: Shape, batch: int | None, kind: str = "") -> float | None:
    """Return the job's goodput at the new shape, divided by its present goodput; None if the job waits or the ratio is
    not finite. A `batch` of None means the present global batch, an empty `kind` the present kind of GPU."""
    if job is None or job.shape is None or not new.gpus:
        return None
    before = _useful(job, job.shape, job.batch)
    there = replace(job, model=job.on.get(kind, job.model))
    gain = _useful(there, new, job.batch if batch is None else batch) / before if before > 0 else math.nan
    return gain if math.isfinite(gain) and gain >= 0 else None


def _useful(job: JobView, shape: Shape, batch: int) -> float:
    # A GPU takes no more than this. The job itself lowers a larger batch.
    batches = np.array([min(batch, job.limits.at(shape.gpus).most or batch)])
    speed = job.model.throughput(np.array([shape.nodes]), np.array([shape.gpus]), batches)
    return float(speed[0] * job.efficiency.efficiency(batches)[0])


class History:
    """Largest GPU count and used GPU-seconds of each job, for policies that grow jobs step by step."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        self._service: dict[int, float] = {}
        self._seen: dict[int, tuple[float, int]] = {}
        """Run time in seconds and GPUs of each job at the last update, by job id."""

    def update(self, jobs: Sequence[JobView]) -> None:
        """Record the GPUs that the jobs hold, and forget jobs that are gone."""
        self._most = {job.job_id: max(self._most.get(job.job_id, 0), _gpus(job)) for job in jobs}
        service, seen = {}, {}
        for job in jobs:
            running = job.running_s if math.isfinite(job.running_s) else 0.0
            before, gpus = self._seen.get(job.job_id, (0.0, _gpus(job)))
            service[job.job_id] = self._service.get(job.job_id, 0.0) + max(running - before, 0.0) * gpus
            seen[job.job_id] = (running, _gpus(job))
        self._service, self._seen = service, seen

    def bound(self, job: JobView) -> int:
        """Return the largest GPU count that the job may have now: twice its largest so far, and 1 before it has run.

        Pollux (OSDI 2021 §4.1, prior-driven exploration) and Sia (SOSP 2023 §3.4) grow jobs this way.
        """
        return max(2 * self._most.get(job.job_id, 0), 1)

    def service(self, job: JobView) -> float:
        """Return the GPU-seconds that the job has used so far."""
        return self._service.get(job.job_id, 0.0)


def _gpus(job: JobView) -> int:
    return job.shape.gpus if job.shape else 0


def bounded(cluster: ClusterView, job: JobView, bound: int) -> tuple[int, ...]:
    """Return the job's sizes up to `bound` that have a shape, or else only the smallest with a shape."""
    sizes = sorted(job.limits.gpus)
    within = tuple(n for n in sizes if n <= bound and shape_of(cluster, n) is not None)
    return within or tuple(n for n in sizes if shape_of(cluster, n) is not None)[:1]


def restart_factor(job: JobView, now: float) -> float:
    """Return the factor (T - R·S) / (T + S) on the speed of a job that would be re-allocated (Pollux §4.2.2, Sia §3.4).
    T is the job's age in seconds, R the number of its re-allocations so far, S the seconds that each takes."""
    age = max(now - job.submitted, 0.0) if math.isfinite(now - job.submitted) else 0.0
    cost = max(job.resize_s, 0.0) if math.isfinite(job.resize_s) else 0.0
    return max(age - job.resizes * cost, 0.0) / (age + cost) if age + cost > 0 else 1.0


BatchRule = Literal["requested", "scaled", "best"]
"""Rule for the global batch at each size: the user's batch; in proportion to the GPUs (ONES §3.3); or the batch of best
goodput."""

BATCHES = 14
"""Number of global batches that are tried at each size for the best goodput."""
STEPS: Floats = np.linspace(0.0, 1.0, BATCHES)
SLOWEST, FASTEST = 1e-6, 1e12
"""Bounds on each predicted throughput, in samples/s. Predictions outside are set to the bound."""


@dataclass(frozen=True)
class Tables:
    """Sizes of the jobs that may change or start, with predictions for each."""

    jobs: tuple[JobView, ...]
    sizes: Ints
    """(U,) GPUs of each size that at least one job may have, ascending from 0."""
    nodes: Ints
    """(U,) number of nodes that each size takes."""
    current: Ints
    """(J,) column of each job's present size; 0 for a waiting job."""
    allowed: Bools
    """(J, U) True if the job may have the size. Its present size is always allowed, size 0 never."""
    batch: Ints
    """(J, U) global batch at an allowed size; 0 at other sizes."""
    speed: Floats
    """(J, U) throughput in samples/s at an allowed size; 0 at other sizes."""
    goodput: Floats
    """(J, U) goodput, in samples/s at the base batch, at an allowed size; 0 at other sizes."""
    uncertainty: Floats
    """(J, U) relative standard deviation of `speed`."""
    kind: Ints
    """(U,) index in `ClusterView.kinds` of each column's kind of GPU; -1 for column 0. Within a kind, `sizes`
    ascend."""


def build_tables(cluster: ClusterView, jobs: Sequence[JobView], rule: BatchRule = "best") -> Tables:
    """Build the tables of these jobs on this cluster. A running job's present size is always allowed."""
    placeable = {n for n in set().union(*{job.limits.gpus for job in jobs}) if shape_of(cluster, n) is not None}
    # Jobs with the same key have the same sizes.
    kinds = [(job.limits, job.shape.gpus if job.shape else 0) for job in jobs]
    choice = {kind: _counts(placeable, *kind) for kind in set(kinds)}
    counts = [choice[kind] for kind in kinds]
    sizes = np.array(sorted({0, *(n for found in counts for n in found)}), dtype=np.int64)
    column = {int(n): u for u, n in enumerate(sizes)}
    shape = (len(jobs), len(sizes))
    batch, speed, goodput = np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape)
    uncertainty = np.zeros(shape)
    alike: dict[tuple[Limits, int, int, int, int], tuple[Ints, Ints, Ints]] = {}
    asked: dict[tuple[type, int], list[tuple[int, Ints, Ints, Ints]]] = {}
    for j, job in enumerate(jobs):
        if not counts[j]:
            continue
        kind = (*kinds[j], job.batch, job.base_batch, job.requested_batch)
        if kind not in alike:
            gpus = np.array(counts[j], dtype=np.int64)
            alike[kind] = gpus, np.array([column[n] for n in counts[j]]), batch_options(job, gpus, rule)
        asked.setdefault((type(job.model), len(counts[j])), []).append((j, *alike[kind]))
    for group in asked.values():
        numbers, gpus, at, options = (np.stack(part) for part in zip(*group, strict=True))
        nodes = np.stack([_nodes(cluster, jobs[j], mine) for j, mine in zip(numbers, gpus, strict=True)])
        models = ask_together([jobs[j].model for j in numbers])
        fast, good = _predictions(models, [jobs[j].efficiency for j in numbers], nodes, gpus, options)
        best = good.argmax(axis=2)[..., None]
        chosen, fast, good = (np.take_along_axis(of, best, axis=2)[..., 0] for of in (options, fast, good))
        known = np.minimum(np.maximum(_finite(models.uncertainty(nodes, gpus, chosen), 1.0, 1.0), 0.0), 1.0)
        here = (numbers[:, None], at)
        batch[here], speed[here], goodput[here], uncertainty[here] = chosen, fast, good, known
    current = np.array([column[job.shape.gpus] if job.shape else 0 for job in jobs], dtype=np.int64)
    nodes_taken = np.array([nodes_of(cluster, int(n)) for n in sizes], dtype=np.int64)
    one_kind = np.minimum(sizes, 1) - 1
    return Tables(tuple(jobs), sizes, nodes_taken, current, batch > 0, batch, speed, goodput, uncertainty, one_kind)


def side_by_side(jobs: Sequence[JobView], parts: Sequence[Tables]) -> Tables:
    """Join the tables of several kinds of GPU into one, side by side. Each table has a row for each of `jobs`. A job
    runs in at most one table."""
    before = np.cumsum([0, *(len(part.sizes) - 1 for part in parts)])
    current = np.zeros(len(jobs), dtype=np.int64)
    for part, offset in zip(parts, before[:-1], strict=True):
        current = np.where(part.current > 0, part.current + offset, current)
    columns: dict[str, Any] = {}
    for name in ("sizes", "nodes", "allowed", "batch", "speed", "goodput", "uncertainty"):
        found = [getattr(part, name) for part in parts]
        columns[name] = np.concatenate([found[0][..., :1], *(one[..., 1:] for one in found)], axis=found[0].ndim - 1)
    kind = np.concatenate([[-1], *(np.full(len(part.sizes) - 1, k) for k, part in enumerate(parts))]).astype(np.int64)
    return Tables(jobs=tuple(jobs), current=current, kind=kind, **columns)


def predict(job: JobView, nodes: Ints, gpus: Ints, batches: Ints) -> tuple[Floats, Floats]:
    """Predict samples/s and goodput (S, B) of a job at sizes (S,) and batches (S, B). All results are finite and
    positive."""
    fast, good = _predictions(_OneByOne([job.model]), [job.efficiency], nodes[None], gpus[None], batches[None])
    return fast[0], good[0]


def predict_each(jobs: Sequence[JobView], nodes: Ints, gpus: Ints, batches: Ints) -> tuple[Floats, Floats]:
    """Predict samples/s and goodput (J,) of J jobs, each at one size and one batch."""
    speed, goodput = np.zeros(len(jobs)), np.zeros(len(jobs))
    kinds: dict[type, list[int]] = {}
    for j, job in enumerate(jobs):
        kinds.setdefault(type(job.model), []).append(j)
    for of in kinds.values():
        models, efficiencies = ask_together([jobs[j].model for j in of]), [jobs[j].efficiency for j in of]
        fast, good = _predictions(models, efficiencies, nodes[of, None], gpus[of, None], batches[of, None, None])
        speed[of], goodput[of] = fast[:, 0, 0], good[:, 0, 0]
    return speed, goodput


def speeds_of_one(jobs: Sequence[JobView], batches: Ints) -> Floats:
    """Predict samples/s (J, B) of each job on one GPU at batches (J, B)."""
    found = np.zeros(batches.shape)
    kinds: dict[type, list[int]] = {}
    for j, job in enumerate(jobs):
        kinds.setdefault(type(job.model), []).append(j)
    for of in kinds.values():
        one = np.ones_like(batches[of])
        said = ask_together([jobs[j].model for j in of]).throughput(one, one, batches[of])
        found[of] = np.minimum(np.maximum(_finite(said, 0.0, 0.0), SLOWEST), FASTEST)
    return found


def _predictions(
    models: ThroughputModel, efficiencies: Sequence[EfficiencyModel], nodes: Ints, gpus: Ints, batches: Ints
) -> tuple[Floats, Floats]:
    """Predict samples/s and goodput (J, S, B) of J jobs, each at its sizes (J, S) and batches (J, S, B)."""
    jobs, _, tried = wide = batches.shape
    flat = batches.reshape(jobs, -1)
    said = models.throughput(np.repeat(nodes, tried, axis=1), np.repeat(gpus, tried, axis=1), flat)
    speed = np.minimum(np.maximum(_finite(said, 0.0, 0.0).reshape(wide), SLOWEST), FASTEST)
    found = np.stack([efficiency.efficiency(row) for efficiency, row in zip(efficiencies, flat, strict=True)])
    worth = np.minimum(np.maximum(_finite(found, 1.0, 1.0).reshape(wide), 1e-6), 1.0)
    return speed, np.maximum(speed * worth, SLOWEST)


class _OneByOne:
    """Models of several jobs as one, for a class without `together`: each job's model computes that job's row."""

    def __init__(self, models: Sequence[ThroughputModel]) -> None:
        self._models = models

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return np.stack([m.throughput(*row) for m, *row in zip(self._models, nodes, gpus, batches, strict=True)])

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return np.stack([m.uncertainty(*row) for m, *row in zip(self._models, nodes, gpus, batches, strict=True)])


def ask_together(models: Sequence[ThroughputModel]) -> ThroughputModel:
    """Combine models of one class into one model."""
    together = getattr(type(models[0]), "together", None)
    found: ThroughputModel = together(models) if together is not None else _OneByOne(models)
    return found


def _finite(said: Floats, nan: float, infinite: float) -> Floats:
    values = np.asarray(said, dtype=np.float64)
    if np.isfinite(values).all():
        return values
    return np.where(np.isfinite(values), values, np.where(np.isnan(values), nan, infinite))


def _counts(placeable: Set[int], limits: Limits, held: int) -> list[int]:
    """Return the `placeable` sizes at which the limits allow some batch, and the size `held`, ascending."""
    sizes = np.array([n for n in limits.gpus if n in placeable], dtype=np.int64)
    least, most = bounds(limits, sizes)
    found = set(sizes[least <= most].tolist())
    return sorted(found | {held} if held else found)


def _nodes(cluster: ClusterView, job: JobView, gpus: Ints) -> Ints:
    nodes = -(-gpus // max(cluster.gpus_per_node, 1))
    if job.nodes_at is not None:
        known = [job.nodes_at.get(int(count), fewest) for count, fewest in zip(gpus, nodes, strict=True)]
        return np.array(known, dtype=np.int64)
    if job.shape is not None and cluster.uniform:
        nodes[gpus == job.shape.gpus] = job.shape.nodes
    return nodes


def batch_options(job: JobView, gpus: Ints, rule: BatchRule) -> Ints:
    """Return the global batches (S, B) that are considered for a job at each size (S,)."""
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
    # Batches are multiples of the number of replicas, so that all replicas have equally much to do.
    unit = quanta(job.limits, gpus, even=True)[:, None]
    even = np.maximum(np.round(grid / unit), 1) * unit
    even = np.where(even > high[:, None], np.floor(high[:, None] / unit) * unit, even)
    even = np.where(even < low[:, None], np.ceil(low[:, None] / unit) * unit, even)
    fits = (even >= low[:, None]) & (even <= high[:, None])
    return np.where(fits, even, low[:, None]).astype(np.int64)


def requested_allocation(cluster: ClusterView, job: JobView) -> Allocation | None:
    """Return an allocation for the user's request. If it is not valid, take the next smaller valid size, else the next
    larger. Return None if no size of the job is valid on this cluster."""
    below = sorted((n for n in job.limits.gpus if n <= job.requested), reverse=True)
    for gpus in [*below, *sorted(n for n in job.limits.gpus if n > job.requested)]:
        shape = shape_of(cluster, gpus)
        least, most = least_and_most(job.limits, gpus)
        if shape is not None and least <= most:
            return Allocation(shape, int(_clamped(job, job.requested_batch, np.array([gpus]))[0]))
    return None


def _clamped(job: JobView, batch: int, gpus: Ints) -> Ints:
    """Return the batch (S,) at each size, rounded and clamped to the limits; the present batch at a size without a
    valid one."""
    least, most = bounds(job.limits, gpus)
    quantum = quanta(job.limits, gpus)
    near = np.minimum(np.maximum(np.round(batch / quantum).astype(np.int64) * quantum, least), most)
    return np.where(least <= most, near, max(job.batch, 1))

"""Made-up clusters and jobs, and what every policy's schedule must hold on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slurm_ones.learn.efficiency import NoiseEfficiency
from slurm_ones.reasons import Reason
from slurm_ones.schedule.policy import (
    Allocation,
    ClusterView,
    Floats,
    Ints,
    JobView,
    Limits,
    NodeView,
    Progress,
    Schedule,
)
from slurm_ones.schedule.shapes import least_and_most
from slurm_ones.slurm.model import Shape

HELD = Reason("held")


@dataclass(frozen=True)
class Power:
    """Samples/s of n GPUs: per_gpu · n^exponent, `across` of that on several nodes, or exactly what `table` says."""

    per_gpu: float = 100.0
    exponent: float = 0.9
    table: Mapping[int, float] = field(default_factory=dict)
    across: float = 1.0
    doubt: float = 0.0
    """Relative standard deviation of all of it."""

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        flat = zip(np.ravel(nodes).tolist(), np.ravel(gpus).tolist(), strict=True)
        return np.array([self._speed(node, n) for node, n in flat]).reshape(np.shape(gpus))

    def _speed(self, nodes: int, gpus: int) -> float:
        said = self.table.get(gpus)
        if said is not None:
            return said
        return self.per_gpu * math.pow(gpus, self.exponent) * (self.across if nodes > 1 else 1.0)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return np.full(np.shape(gpus), self.doubt)


def cluster(
    nodes: int = 4, gpus: int = 4, *, whole: bool = False, free: Sequence[int] = (), uniform: bool = True
) -> ClusterView:
    """Nodes n1, n2, … of `gpus` GPUs each; `free` says how many of them are not rigid jobs'."""
    views = [NodeView(f"n{i + 1}", free[i] if i < len(free) else gpus) for i in range(nodes)]
    return ClusterView(tuple(views), whole, gpus, uniform)


def job(
    job_id: int,
    nodes: Mapping[str, int] | None = None,
    *,
    epochs: int = 0,
    to_come: float = 10.0,
    gpus: tuple[int, ...] = (1, 2, 4, 8, 16),
    **values: object,
) -> JobView:
    """A job that runs on `nodes`, or waits; `epochs` of 1000 samples done and `to_come` expected."""
    held = dict(nodes or {})
    made = JobView(
        job_id=job_id,
        submitted=float(job_id),
        requested=4,
        requested_batch=64,
        shape=_shape(held),
        nodes=held,
        batch=64 * max(sum(held.values()), 1),
        base_batch=64,
        limits=Limits(gpus, 64, 1024, 256),
        model=Power(),
        efficiency=NoiseEfficiency(64, math.inf),
        progress=Progress(max(epochs, 0.5), to_come),
        samples=1000.0 * epochs,
        dataset=1000,
        epochs=epochs,
        epochs_since_change=epochs,
        running_s=10.0 * epochs,
    )
    return replace(made, **values)  # type: ignore[arg-type]


def _shape(held: Mapping[str, int]) -> Shape | None:
    if not held:
        return None
    each = set(held.values())
    return Shape(len(held), each.pop()) if len(each) == 1 else Shape(1, sum(held.values()))


def check(view: ClusterView, jobs: Sequence[JobView], schedule: Schedule) -> None:
    """Raise AssertionError unless the schedule keeps the contract of `Policy`."""
    by_id = {j.job_id: j for j in jobs}
    assert schedule.allocations.keys() <= by_id.keys(), "a schedule names a job that does not exist"
    assert schedule.parked <= by_id.keys(), "a schedule parks a job that does not exist"
    assert not schedule.parked & schedule.allocations.keys(), "a job both runs and does not"
    assert schedule.reasons.keys() == by_id.keys(), "each job is told why"
    for job_id, why in schedule.reasons.items():
        assert isinstance(why, Reason) and str(why), f"job {job_id} is told {why!r}"
    for j in jobs:
        got = schedule.allocations.get(j.job_id)
        if j.shape is not None:
            assert got is not None or j.job_id in schedule.parked, f"running job {j.job_id} was forgotten"
        if j.fixed:
            assert schedule.reasons[j.job_id] == j.fixed, "a fixed job is told what fixes it"
            assert (got.shape, got.batch) == (j.shape, j.batch) if got and j.shape else got is None
            assert j.shape is None or j.job_id not in schedule.parked, f"fixed job {j.job_id} was parked"
        if got is None:
            continue
        if not unchanged(view, j, got) or got.batch != j.batch:
            least, most = least_and_most(j.limits, got.shape.gpus)
            assert least <= got.batch <= most, f"job {j.job_id} cannot take batch {got.batch}"
            assert got.batch % j.limits.quantum == 0 or j.limits.min_batch == j.limits.max_batch
        if unchanged(view, j, got):
            continue
        gpus, per_node = got.shape.gpus, view.gpus_per_node
        assert gpus in j.limits.gpus, f"job {j.job_id} cannot take {gpus} GPUs"
        assert got.shape.nodes == 1 or got.shape.gpus_per_node == per_node, "several nodes must be whole"
        assert got.shape.gpus_per_node <= per_node or not view.uniform, "no node has so many GPUs"
        assert got.shape.gpus_per_node == per_node or not view.whole_nodes, "nodes must be whole here"
    assert placeable(view, jobs, schedule), f"not placeable: {schedule.allocations}"


def unchanged(view: ClusterView, j: JobView, got: Allocation) -> bool:
    """Whether the job stays where it is. Where shapes may be spread, a size is all that there is to change."""
    if view.uniform or j.shape is None:
        return got.shape == j.shape
    return got.shape.gpus == j.shape.gpus


def placeable(view: ClusterView, jobs: Sequence[JobView], schedule: Schedule) -> bool:
    """Whether the schedule fits the nodes with unchanged jobs where they are; an exhaustive search."""
    free = {node.name: node.gpus for node in view.nodes}
    moving: list[Shape] = []
    for j in jobs:
        got = schedule.allocations.get(j.job_id)
        if got is not None and unchanged(view, j, got):
            for name, gpus in j.nodes.items():
                free[name] = free.get(name, gpus) - gpus
        elif got is not None:
            moving.append(got.shape)
    assert min(free.values(), default=0) >= 0
    if not view.uniform:
        return sum(shape.gpus for shape in moving) <= sum(free.values())
    parts = sorted((s.gpus_per_node for s in moving if s.nodes == 1), reverse=True)
    whole = [s for s in moving if s.nodes > 1]
    room = sorted(free.values())
    for shape in whole:  # whole nodes are all alike
        for _ in range(shape.nodes):
            if shape.gpus_per_node not in room:
                return False
            room.remove(shape.gpus_per_node)
    return _fits(tuple(sorted(room)), tuple(parts))


def _fits(room: tuple[int, ...], parts: tuple[int, ...]) -> bool:
    if not parts:
        return True
    if sum(parts) > sum(room):
        return False
    for gpus in sorted({g for g in room if g >= parts[0]}):
        left = list(room)
        left.remove(gpus)
        if _fits(tuple(sorted([*left, gpus - parts[0]])), parts[1:]):
            return True
    return False

"""Made-up clusters and jobs, in the form in which a policy gets them: simple ones, and random ones for hypothesis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from ones_db.reasons import Reason
from ones_db.shape import Shape
from slurm_ones.learn.histories import NoiseEfficiency
from slurm_ones.policy.contract import (
    ClusterView,
    Floats,
    Ints,
    JobView,
    Limits,
    NodeView,
    Progress,
    SizeRule,
)
from slurm_ones.policy.shapes import shape_of, strategy_counts, takes, valid_counts

HELD = Reason("held")


@dataclass(frozen=True)
class Power:
    """Throughput of `per_gpu` × n^`exponent` samples/s on n GPUs, times `across` on several nodes. `table` overrides it
    for some n."""

    per_gpu: float = 100.0
    exponent: float = 0.9
    table: Mapping[int, float] = field(default_factory=dict)
    across: float = 1.0
    doubt: float = 0.0
    """Relative standard deviation of the throughput."""

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
    """Return a cluster of nodes n1, n2, … with `gpus` GPUs each. `free` has the GPUs that rigid jobs leave free on the
    first nodes."""
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
    """Return a job that holds the GPUs `nodes`, or waits if there are none. It has done `epochs` epochs of 1000
    samples, and `to_come` epochs are expected to remain."""
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


Round = tuple[ClusterView, list[JobView]]

figures = st.sampled_from([0.0, 1e-9, 1.0, 90.0, 100.0, 1e300, math.nan, math.inf, -math.inf, -5.0])


across = st.sampled_from([1.0, 0.6])


@st.composite
def rounds(draw: st.DrawFn, max_jobs: int = 9, uniform: bool | None = None) -> Round:
    """Draw a cluster of at most 4 nodes, with rigid jobs on some GPUs and elastic jobs in any state.

    Some clusters allocate whole nodes only. With `uniform`, each node of a job gives it equally many GPUs; None draws
    this at random. Throughputs, losses and predictions may be absurd.
    """
    if uniform is None:
        uniform = draw(st.booleans())
    whole = uniform and draw(st.booleans())
    per_node = draw(st.sampled_from([1, 2, 3, 4, 8]))
    nodes = draw(st.integers(1, 4))
    free = [per_node if whole else draw(st.integers(0, per_node)) for _ in range(nodes)]
    view = cluster(nodes, per_node, whole=whole, free=free, uniform=uniform)
    left = {node.name: node.gpus for node in view.nodes}
    jobs = []
    for job_id in range(draw(st.integers(0, max_jobs))):
        low = draw(st.sampled_from([1, 1, 2, 4]))
        counts = valid_counts(view, low, draw(st.sampled_from([low, 4, 8, 64])))
        least = draw(st.sampled_from([1, 64, 100]))
        limits = Limits(counts, least, draw(st.sampled_from([least, 512, 4096])), 256, draw(st.sampled_from([1, 8])))
        runs = bool(counts) and draw(st.booleans())
        # It may run at a size that its strategy cannot use: what it can changed, or nobody knew.
        shape = shape_of(view, draw(st.sampled_from(counts))) if runs else None
        roomy = [] if shape is None else [name for name in left if left[name] >= shape.gpus_per_node]
        held: dict[str, int] = {}
        if shape is not None and shape.gpus_per_node > per_node:
            held = _spread(left, shape.gpus)
        elif shape is not None and len(roomy) >= shape.nodes:
            held = dict.fromkeys(draw(st.permutations(roomy))[: shape.nodes], shape.gpus_per_node)
        for name, gpus in held.items():
            left[name] -= gpus
        epochs = draw(st.integers(0, 9)) if held else draw(st.sampled_from([0, 0, 3]))
        if draw(st.booleans()):
            limits = with_strategy(view, limits, draw(strategies(view)))
            counts = limits.gpus
        model = Power(table={n: draw(figures) for n in counts}) if draw(st.booleans()) else Power(across=draw(across))
        jobs.append(
            job(
                job_id,
                held,
                shape=shape if held else None,
                epochs=epochs,
                limits=limits,
                model=model,
                requested=draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 64])),
                requested_batch=draw(st.sampled_from([0, 1, 64, 100, 512, 10**9])),
                true_remaining_s=draw(figures),
                running_s=draw(st.one_of(figures, st.just(10.0 * epochs))),
                losses=tuple((float(k), draw(figures)) for k in range(draw(st.sampled_from([0, 0, 3, 9])))),
                submitted=float(draw(st.integers(0, 3))),
                epochs_since_change=draw(st.integers(0, epochs)),
                progress=Progress(max(epochs, 0.5), draw(st.sampled_from([1.0, 20.0, math.nan, math.inf, 0.0]))),
                resize_s=draw(st.sampled_from([30.0, 0.0, math.nan])),
                shrink_s=draw(st.sampled_from([None, None, 0.03, math.inf, math.nan])),
                prepare_s=draw(st.sampled_from([0.0, 7.0, math.nan])),
                fixed=draw(st.sampled_from([None, None, None, None, None, HELD])),
                deadline=draw(st.sampled_from([None, None, None, 10.0, 900.0, 1e5, -1.0, math.nan, math.inf])),
                promised=draw(st.sampled_from([None, None, True, False])),
            )
        )
    return view, jobs


@st.composite
def strategies(draw: st.DrawFn, view: ClusterView) -> tuple[SizeRule, ...]:
    """Draw a training strategy's rule for each size: replicas, limits of the batch, and the GPUs of a group that shares
    a node."""
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    rules = []
    for gpus in sorted(draw(st.sets(st.integers(1, max(view.gpus, 1)), max_size=6))):
        parts = [part for part in (1, 2, 3, 4, 8) if gpus % part == 0]
        replicas = gpus // draw(st.sampled_from(parts)) if draw(st.booleans()) else gpus // math.gcd(gpus, size)
        most = draw(st.sampled_from([0, 1, 48, 256 * replicas, 10**6]))
        rules.append(SizeRule(gpus, replicas, most, draw(st.sampled_from([1, 2, 7, 64])), draw(st.sampled_from(parts))))
    return tuple(rules)


def with_strategy(view: ClusterView, limits: Limits, rules: tuple[SizeRule, ...]) -> Limits:
    """Return a job's limits with the rules of a training strategy added, as the companion adds them."""
    if not rules:
        return limits
    low, high = min(limits.gpus, default=1), max(limits.gpus, default=0)
    within = replace(limits, rules=rules, strategy="ring")
    return replace(within, gpus=tuple(n for n in strategy_counts(view, rules, low, high) if takes(within, n)))


def _spread(left: dict[str, int], gpus: int) -> dict[str, int]:
    held: dict[str, int] = {}
    for name, room in left.items():
        if taken := min(room, gpus - sum(held.values())):
            held[name] = taken
    return held if sum(held.values()) == gpus else {}

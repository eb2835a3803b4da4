"""Shapes and batches that a cluster and a job's limits allow, for every policy.

A job runs on n GPUs of one node, or on whole nodes. Other shapes would need a list of nodes: without one, Slurm gives
equally many GPUs on each node (`NumNodes=N-N` and GPUs per node).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, Ints, Limits, SizeRule

ANY_QUANTUM = 2**62
"""Upper bound of a quantum, larger than any batch: a job with this quantum has no valid batch."""
EVERY_COUNT = 16
"""Number of nodes up to which a job may have any number of whole nodes."""
GROWTH = 1.25
"""Ratio of successive sizes above `EVERY_COUNT` nodes."""


def shape_of(cluster: ClusterView, gpus: int) -> Shape | None:
    """Return the shape of `gpus` GPUs: a part of one node, or whole nodes; None if the count is neither.

    A shape of several nodes uses only nodes whose GPUs are all free. On a cluster that is not uniform, every count has
    a shape.
    """
    per_node = cluster.gpus_per_node
    if gpus < 1 or per_node < 1:
        return None
    if gpus % per_node == 0 and gpus // per_node <= len(cluster.nodes):
        return Shape(gpus // per_node, per_node)
    if gpus < per_node and not cluster.whole_nodes:
        return Shape(1, gpus)
    if not cluster.uniform and gpus <= cluster.gpus:
        return Shape(1, gpus)
    return None


def nodes_of(cluster: ClusterView, gpus: int) -> int:
    """Return the smallest number of nodes that `gpus` GPUs fit on."""
    return -(-gpus // max(cluster.gpus_per_node, 1))


def valid_counts(cluster: ClusterView, low: int = 1, high: int | None = None) -> tuple[int, ...]:
    """Return the GPU counts in [low, high] that a data-parallel job may have on this cluster, ascending.

    Up to a node these are powers of two, above it whole nodes. All numbers of nodes up to `EVERY_COUNT` are included,
    then numbers that grow by the factor `GROWTH`, and the number of all nodes. The counts do not depend on which nodes
    are free. A cluster that is not uniform has every count up to `EVERY_COUNT` nodes. With several kinds of GPU, the
    counts of all kinds are joined.
    """
    if len(cluster.kinds) > 1:
        each = [valid_counts(cluster.of_kind(kind), low, high) for kind in cluster.kinds]
        return tuple(sorted(set().union(*each)))
    per_node, nodes = cluster.gpus_per_node, len(cluster.nodes)
    if not cluster.uniform:
        counts = set(range(1, min(cluster.gpus, EVERY_COUNT * per_node) + 1))
    else:
        counts = {2**i for i in range(per_node.bit_length())}
    whole = 1
    while whole < nodes:
        counts.add(per_node * whole)
        whole = whole + 1 if whole < EVERY_COUNT else math.ceil(whole * GROWTH)
    counts.add(per_node * nodes)
    most = per_node * nodes if high is None else high
    return tuple(n for n in sorted(counts) if low <= n <= most and shape_of(cluster, n))


def strategy_counts(
    cluster: ClusterView, rules: Sequence[SizeRule], low: int = 1, high: int | None = None
) -> list[int]:
    """Return the GPU counts in [low, high], ascending, that a job with a training strategy may have on some kind of
    GPU. Each count has a rule, and a shape that keeps together the ranks that must share a node."""
    if len(cluster.kinds) > 1:
        each = [strategy_counts(cluster.of_kind(kind), rules, low, high) for kind in cluster.kinds]
        return sorted(set().union(*each))
    most = cluster.gpus if high is None else high
    return sorted(
        rule.gpus
        for rule in rules
        if low <= rule.gpus <= most
        and (shape := shape_of(cluster, rule.gpus)) is not None
        and rule.fits(shape)
        and (cluster.uniform or rule.together == 1 or rule.gpus <= cluster.gpus_per_node)
    )


def least_and_most(limits: Limits, gpus: int) -> tuple[int, int]:
    """Return the smallest and largest global batch on `gpus` GPUs, both multiples of the quantum. If no batch is
    allowed, the smallest exceeds the largest. A fixed batch must be a multiple of the strategy's quantum only."""
    rule = limits.at(gpus)
    most = min(limits.max_batch, rule.most)
    least = max(limits.min_batch, rule.replicas)
    if limits.batch_fixed:
        return (max(least, limits.max_batch), most) if limits.max_batch % rule.quantum == 0 else (1, 0)
    quantum = math.lcm(max(limits.quantum, 1), rule.quantum)
    return -(-least // quantum) * quantum, most // quantum * quantum


def takes(limits: Limits, gpus: int) -> bool:
    """Tell whether the limits allow some global batch on this number of GPUs."""
    least, most = least_and_most(limits, gpus)
    return least <= most


def bounds(limits: Limits, gpus: Ints) -> tuple[Ints, Ints]:
    """Return the smallest and the largest global batch at each size (S,), as `least_and_most` does for one size."""
    if limits.rules:
        found = [least_and_most(limits, int(n)) for n in gpus]
        low, high = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return low, high
    most = np.minimum(limits.max_batch, limits.max_local_batch * gpus)
    least = np.maximum(limits.min_batch, gpus)
    if limits.batch_fixed:
        return np.maximum(least, limits.max_batch), most
    quantum = max(limits.quantum, 1)
    return -(-least // quantum) * quantum, most // quantum * quantum


def quanta(limits: Limits, gpus: Ints, *, even: bool = False) -> Ints:
    """Return the quantum of the global batch at each size (S,). With `even` it is also a multiple of the number of
    replicas, so that all replicas get equally many samples in a step."""
    own = max(limits.quantum, 1)
    if not limits.rules:
        return np.lcm(gpus, own) if even else np.full(len(gpus), own, dtype=np.int64)
    rules = [limits.at(int(n)) for n in gpus]
    found = [math.lcm(own, rule.quantum, rule.replicas if even else 1) for rule in rules]
    return np.array([min(quantum, ANY_QUANTUM) for quantum in found], dtype=np.int64)


def scaled_batch(limits: Limits, base_batch: int, smallest: int, gpus: int) -> int | None:
    """Return the global batch on `gpus` GPUs, in proportion to the number of replicas (ONES §3.3). It is `base_batch`
    at the size `smallest`.

    The result is rounded to the quantum and clamped to the limits; a fixed batch stays. None if no batch is allowed at
    this size.
    """
    least, most = least_and_most(limits, gpus)
    if least > most:
        return None
    rule = limits.at(gpus)
    quantum = math.lcm(max(limits.quantum, 1), rule.quantum)
    wanted = round(base_batch * rule.replicas / max(limits.at(smallest).replicas, 1) / quantum) * quantum
    return min(max(wanted, least), most)

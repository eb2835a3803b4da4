"""Shapes and batches that a cluster and a job's limits allow, for every policy.

A job runs on n GPUs of one node, or on whole nodes: uniform shapes are all that Slurm can be asked for
without naming nodes (facts of the resize: `NumNodes=N-N` and GPUs per node).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, Ints, Limits, SizeRule

ANY_QUANTUM = 2**62
"""A quantum that no batch is a multiple of."""
EVERY_COUNT = 16
"""Up to this many nodes every number of whole nodes is offered."""
GROWTH = 1.25
"""Beyond, each number of nodes is this much larger than the last."""


def shape_of(cluster: ClusterView, gpus: int) -> Shape | None:
    """The shape of `gpus` GPUs: part of one node, or whole nodes; None if the count is neither.

    Nodes of the cluster that have fewer GPUs to give than its largest ones take only single-node shapes. Where
    shapes need not be uniform, every count has one.
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
    """Fewest nodes that `gpus` GPUs take."""
    return -(-gpus // max(cluster.gpus_per_node, 1))


def valid_counts(cluster: ClusterView, low: int = 1, high: int | None = None) -> tuple[int, ...]:
    """GPU counts in [low, high] that a data-parallel job can be offered here, ascending.

    Below a node the powers of two, then whole nodes: each number of them up to `EVERY_COUNT`, then by factors of
    `GROWTH`, and all of them. They follow from the nodes that exist and not from what is free, so that they do not
    change from tick to tick. Where shapes need not be uniform, every count up to `EVERY_COUNT` nodes. Where GPUs are
    of several kinds, what any of them allows.
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
    """GPU counts in [low, high] that a job with a training strategy can be offered here, ascending, on any kind of GPU.
    They are those that its strategy knows and that have a shape on which the ranks that must share a node do so."""
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
    """Smallest and largest global batch that `gpus` GPUs take, multiples of the quantum; the smallest is above the
    largest if there is none. A fixed batch need not be a multiple of the job's own quantum, which only binds a free
    choice. The strategy's demand at a size always holds."""
    rule = limits.at(gpus)
    most = min(limits.max_batch, rule.most)
    least = max(limits.min_batch, rule.replicas)
    if limits.batch_fixed:
        return (max(least, limits.max_batch), most) if limits.max_batch % rule.quantum == 0 else (1, 0)
    quantum = math.lcm(max(limits.quantum, 1), rule.quantum)
    return -(-least // quantum) * quantum, most // quantum * quantum


def takes(limits: Limits, gpus: int) -> bool:
    """Tell whether any global batch is allowed on this number of GPUs."""
    least, most = least_and_most(limits, gpus)
    return least <= most


def bounds(limits: Limits, gpus: Ints) -> tuple[Ints, Ints]:
    """`least_and_most` at many sizes (S,)."""
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
    """Return the quantum of global batches at each of the sizes: (S,). With `even`, replicas get equally many
    samples."""
    own = max(limits.quantum, 1)
    if not limits.rules:
        return np.lcm(gpus, own) if even else np.full(len(gpus), own, dtype=np.int64)
    rules = [limits.at(int(n)) for n in gpus]
    found = [math.lcm(own, rule.quantum, rule.replicas if even else 1) for rule in rules]
    return np.array([min(quantum, ANY_QUANTUM) for quantum in found], dtype=np.int64)


def scaled_batch(limits: Limits, base_batch: int, smallest: int, gpus: int) -> int | None:
    """Global batch on `gpus` GPUs, in proportion to their replicas (ONES §3.3): `base_batch` on the `smallest` size.

    The base batch rounded to the quantum and clamped to the limits. A batch that the limits fix stays. None if these
    GPUs cannot take any allowed batch: its samples do not fit, or there are fewer samples than replicas.
    """
    least, most = least_and_most(limits, gpus)
    if least > most:
        return None
    rule = limits.at(gpus)
    quantum = math.lcm(max(limits.quantum, 1), rule.quantum)
    wanted = round(base_batch * rule.replicas / max(limits.at(smallest).replicas, 1) / quantum) * quantum
    return min(max(wanted, least), most)

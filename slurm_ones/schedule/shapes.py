"""Shapes and batches that a cluster and a job's limits allow: the same for every policy.

A job runs on n GPUs of one node, or on whole nodes: uniform shapes are all that Slurm can be asked for
without naming nodes (facts of the resize: `NumNodes=N-N` and GPUs per node).
"""

from __future__ import annotations

import math

from slurm_ones.schedule.policy import ClusterView, Limits
from slurm_ones.slurm.model import Shape

EVERY_COUNT = 16
"""Up to this many nodes every number of whole nodes is offered."""
GROWTH = 1.25
"""Beyond, each number of nodes is this much larger than the last."""


def shape_of(cluster: ClusterView, gpus: int) -> Shape | None:
    """The shape of `gpus` GPUs: part of one node, or whole nodes; None where the count is neither.

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
    change from tick to tick. Where shapes need not be uniform, every count up to `EVERY_COUNT` nodes.
    """
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


def least_and_most(limits: Limits, gpus: int) -> tuple[int, int]:
    """Smallest and largest global batch that `gpus` GPUs take without accumulation, multiples of the quantum where
    the batch is not fixed; the smallest is above the largest where there is none."""
    most = min(limits.max_batch, limits.max_local_batch * gpus)
    least = max(limits.min_batch, gpus)
    if limits.min_batch == limits.max_batch:
        return max(least, limits.max_batch), most
    quantum = max(limits.quantum, 1)
    return -(-least // quantum) * quantum, most // quantum * quantum


def scaled_batch(limits: Limits, base_batch: int, smallest: int, gpus: int) -> int | None:
    """Global batch on `gpus` GPUs, in proportion to them (ONES §3.3): `base_batch` on the `smallest` size.

    Rounded to the quantum and clamped to the limits. A batch that the limits fix stays. None where these GPUs
    cannot take any allowed batch: its samples do not fit, or there are fewer samples than GPUs.
    """
    least, most = least_and_most(limits, gpus)
    if least > most:
        return None
    quantum = max(limits.quantum, 1)
    wanted = round(base_batch * gpus / max(smallest, 1) / quantum) * quantum
    return min(max(wanted, least), most)

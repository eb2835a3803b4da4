"""Shapes and batches that a cluster and a job's limits allow: the same for every policy.

A job runs on n GPUs of one node, or on whole nodes: uniform shapes are all that Slurm can be asked for
without naming nodes (facts of the resize: `NumNodes=N-N` and GPUs per node).
"""

from __future__ import annotations

from slurm_ones.decide.policy import ClusterView, Limits
from slurm_ones.slurm.model import Shape


def shape_of(cluster: ClusterView, gpus: int) -> Shape | None:
    """The shape of `gpus` GPUs: part of one node, or whole nodes; None where the count is neither.

    Nodes of the cluster that have fewer GPUs to give than its largest ones take only single-node shapes.
    """
    per_node = cluster.gpus_per_node
    if gpus < 1 or per_node < 1:
        return None
    if gpus % per_node == 0 and gpus // per_node <= len(cluster.nodes):
        return Shape(gpus // per_node, per_node)
    if gpus < per_node and not cluster.whole_nodes:
        return Shape(1, gpus)
    return None


def valid_counts(cluster: ClusterView, low: int = 1, high: int | None = None) -> tuple[int, ...]:
    """GPU counts in [low, high] that a data-parallel job can be offered here, ascending.

    Below a node the powers of two, then whole nodes: one, two, four, … and all of them. They follow from the
    nodes that exist and not from what is free, so that they do not change from tick to tick.
    """
    per_node, nodes = cluster.gpus_per_node, len(cluster.nodes)
    counts = {2**i for i in range(per_node.bit_length())}
    counts |= {per_node * min(2**i, nodes) for i in range(nodes.bit_length() + 1)}
    most = per_node * nodes if high is None else high
    return tuple(n for n in sorted(counts) if low <= n <= most and shape_of(cluster, n))


def scaled_batch(limits: Limits, base_batch: int, smallest: int, gpus: int) -> int | None:
    """Global batch on `gpus` GPUs, in proportion to them (ONES §3.3): `base_batch` on the `smallest` size.

    Rounded to the quantum and clamped to the limits. A batch that the limits fix stays. None where these GPUs
    cannot take any allowed batch: its samples do not fit, or there are fewer samples than GPUs.
    """
    most = min(limits.max_batch, limits.max_local_batch * gpus)
    least = max(limits.min_batch, gpus)
    if limits.min_batch == limits.max_batch:
        return limits.max_batch if least <= limits.max_batch <= most else None
    quantum = max(limits.quantum, 1)
    least = -(-least // quantum) * quantum
    most = most // quantum * quantum
    if least > most:
        return None
    wanted = round(base_batch * gpus / max(smallest, 1) / quantum) * quantum
    return min(max(wanted, least), most)

"""The ledger of free GPUs: what jobs leave on the nodes, and what finds room there.

Nodes are alike for what is not placed yet. So `Ledger` counts how many nodes have how many free GPUs, and each of its
operations costs as many steps as a node has GPUs, whatever the number of nodes. `count_nodes`, `parts_that_fit` and
`take_parts` do the same for K ledgers at once, as one array (K, P + 1) for nodes of P GPUs. Where it matters which
nodes they are, `free_by_node` and `pick_nodes` tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ones_db.shape import Shape
from slurm_ones.schedule.policy import Bools, ClusterView, Ints, JobView


def free_by_node(cluster: ClusterView, holders: Iterable[JobView] = ()) -> Ints:
    """(N,) GPUs of each node that the `holders` leave; 0 where they hold more than there are."""
    free = {node.name: node.gpus for node in cluster.nodes}
    for job in holders:
        for name, gpus in job.nodes.items():
            if name in free:
                free[name] -= gpus
    return np.maximum(np.array(list(free.values()), dtype=np.int64), 0)


def pick_nodes(free: Ints, claimed: Ints, shape: Shape) -> Ints:
    """The nodes for a shape, by their `free` GPUs (N,): where least is left over, and first where none of the GPUs that
    others have `claimed` (N,) are needed. Empty where too few nodes have room."""
    open_, gpus = free - claimed, shape.gpus_per_node
    enough = np.flatnonzero(free >= gpus)
    if len(enough) < shape.nodes:
        return enough[:0]
    needed = np.maximum(gpus - open_[enough], 0)
    cost = needed * (int(free.max()) + 1) + np.where(needed == 0, open_[enough], 0)
    chosen: Ints = enough[np.argsort(cost, kind="stable")[: shape.nodes]]
    return chosen


class Ledger:
    """How many nodes have how many free GPUs. A shape takes equally many GPUs of each of its nodes, of the fullest ones
    that have them; where the cluster is not `uniform`, it takes any."""

    def __init__(self, cluster: ClusterView, holders: Iterable[JobView] = ()) -> None:
        """All that the cluster offers but for what the `holders` have on their nodes."""
        free = free_by_node(cluster, holders)
        self._per_node = max(cluster.gpus_per_node, 0)
        self._uniform = cluster.uniform
        self.nodes: list[int] = np.bincount(free, minlength=self._per_node + 1).tolist()
        """Nodes by their free GPUs, from 0 on."""
        self.gpus = int(free.sum())
        """Free GPUs in all."""

    def copy(self) -> Ledger:
        """A second one to try things on."""
        other = object.__new__(Ledger)
        other._per_node, other._uniform, other.gpus = self._per_node, self._uniform, self.gpus
        other.nodes = list(self.nodes)
        return other

    def fits(self, shape: Shape) -> bool:
        """Whether `take` would find room."""
        if not self._uniform:
            return shape.gpus <= self.gpus
        return sum(self.nodes[shape.gpus_per_node :]) >= shape.nodes

    def take_any(self, gpus: int) -> bool:
        """Take so many GPUs wherever they are, the fullest nodes first; False, with nothing changed, where there are
        too few."""
        if gpus > self.gpus:
            return False
        self.gpus -= gpus
        for free in range(1, self._per_node + 1):
            full, rest = divmod(min(gpus, self.nodes[free] * free), free)
            self.nodes[free] -= full + (rest > 0)
            self.nodes[0] += full
            self.nodes[free - rest] += rest > 0
            gpus -= full * free + rest
        return True

    def take(self, shape: Shape) -> bool:
        """Take room for the shape where least is left over; False, with nothing changed, where there is none."""
        if not self.fits(shape):
            return False
        self.gpus -= shape.gpus
        if not self._uniform:
            return True
        left = shape.nodes
        for gpus in range(shape.gpus_per_node, self._per_node + 1):
            taken = min(left, self.nodes[gpus])
            self.nodes[gpus] -= taken
            self.nodes[gpus - shape.gpus_per_node] += taken
            left -= taken
        return True


def held_gpus(cluster: ClusterView, jobs: Sequence[JobView]) -> Ints:
    """(E, 3) job, node and GPUs of whatever these jobs hold, jobs and nodes by their places; their nodes must all be
    there (see `fixed_jobs` for those whose are not)."""
    index = {node.name: n for n, node in enumerate(cluster.nodes)}
    held = [(j, index[name], gpus) for j, job in enumerate(jobs) for name, gpus in job.nodes.items() if gpus]
    return np.array(held, dtype=np.int64).reshape(-1, 3)


def count_nodes(free: Ints, node: Ints, gpus: Ints, stays: Bools, per_node: int) -> Ints:
    """(K, P + 1) nodes with each number of free GPUs, in each of K candidates.

    `free` (N,) GPUs are for all jobs; of what they hold, so many `gpus` (E,) of each `node` (E,), that remains theirs
    which `stays` (K, E).
    """
    count, nodes = len(stays), len(free)
    at = (np.arange(count)[:, None] * nodes + node).ravel()
    used = np.bincount(at, weights=(stays * gpus).ravel(), minlength=count * nodes)
    left = np.maximum(free - used.reshape(count, nodes).astype(np.int64), 0)
    kinds = per_node + 1
    found: Ints = np.bincount((np.arange(count)[:, None] * kinds + left).ravel(), minlength=count * kinds)
    return found.reshape(count, kinds)


def parts_that_fit(nodes: Ints, size: int) -> Ints:
    """(K,) how many parts of `size` GPUs, each on one node, find room on the `nodes` (K, P + 1)."""
    found: Ints = nodes @ (np.arange(nodes.shape[1]) // size)
    return found


def take_parts(nodes: Ints, size: int, parts: Ints) -> Ints:
    """Take room for `parts` (K,) parts of `size` GPUs from the `nodes` (K, P + 1), where least is left over.

    (K,) the parts that find none. As many jobs of one node of that size take the same from a `Ledger`, one by one.
    """
    every, left = np.arange(len(nodes)), parts
    for free in range(size, nodes.shape[1]):
        most = free // size
        taken = np.minimum(left, nodes[:, free] * most)
        full, rest = np.divmod(taken, most)
        nodes[:, free] -= full + (rest > 0)
        nodes[:, free - most * size] += full
        nodes[every, free - rest * size] += rest > 0
        left = left - taken
    return left

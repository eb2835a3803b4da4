"""Ledger of free resources on nodes, and best-fit placement of shapes.

For a search that compares K candidate schedules at once, `count_nodes`, `parts_that_fit` and `take_parts` do the same
on arrays (K, P + 1): the number of nodes with 0 to P free GPUs in each schedule.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np

from ones_db.shape import Shape
from slurm_ones.policy.contract import Bools, ClusterView, Ints, JobView
from slurm_ones.slurm.model import Snapshot, partition_gpus


def free_by_node(cluster: ClusterView, holders: Iterable[JobView] = ()) -> Ints:
    """Return the GPUs (N,) that the jobs `holders` leave free on each node; 0 if they hold more than the node has."""
    free = {node.name: node.gpus for node in cluster.nodes}
    for job in holders:
        for name, gpus in job.nodes.items():
            if name in free:
                free[name] -= gpus
    return np.maximum(np.array(list(free.values()), dtype=np.int64), 0)


def free_of_kind(cluster: ClusterView, holders: Sequence[JobView]) -> Ints:
    """Return the GPUs (K,) that the jobs `holders` leave free, of each of the cluster's kinds."""
    free = free_by_node(cluster, holders)
    kind = np.array([cluster.kinds.index(node.kind) for node in cluster.nodes], dtype=np.int64)
    return np.bincount(kind, weights=free, minlength=len(cluster.kinds)).astype(np.int64)


def pick_nodes(free: Ints, claimed: Ints, shape: Shape) -> Ints:
    """Return the indices of the best-fit nodes for a shape; empty if too few nodes have room. `free` (N,) are the GPUs
    of each node that may be taken. `claimed` (N,) are the GPUs among them that other jobs want; they are taken last."""
    open_, gpus = free - claimed, shape.gpus_per_node
    enough = np.flatnonzero(free >= gpus)
    if len(enough) < shape.nodes:
        return enough[:0]
    needed = np.maximum(gpus - open_[enough], 0)
    cost = needed * (int(free.max()) + 1) + np.where(needed == 0, open_[enough], 0)
    return enough[np.argsort(cost, kind="stable")[: shape.nodes]]


class Resources(NamedTuple):
    """GPUs, CPUs and memory on a node: free ones, or what a job takes."""

    gpus: int
    cpus: int = 0
    memory_mb: int = 0

    def cover(self, need: Resources) -> bool:
        return self[0] >= need[0] and self[1] >= need[1] and self[2] >= need[2]

    def without(self, need: Resources) -> Resources:
        return Resources(self[0] - need[0], self[1] - need[1], self[2] - need[2])

    def plus(self, more: Resources) -> Resources:
        return Resources(self[0] + more[0], self[1] + more[1], self[2] + more[2])

    def at_most(self, other: Resources) -> Resources:
        return Resources(min(self[0], other[0]), min(self[1], other[1]), min(self[2], other[2]))


NOTHING = Resources(0)


class Ledger(Mapping[str, int]):
    """Free resources of each node. As a mapping, a ledger gives the number of free GPUs by node name.

    A shape takes equally many GPUs from each of its nodes. It takes the fullest nodes that have room, as Slurm does; of
    equally full nodes, the first. If the cluster is not `uniform`, a shape takes any GPUs.
    """

    def __init__(self, free: Mapping[str, int] | Mapping[str, Resources], *, uniform: bool = True) -> None:
        self._free = {name: _resources(one) for name, one in free.items()}
        self._place = {name: place for place, name in enumerate(self._free)}
        self._uniform = uniform
        self._shared = False
        self._by_free: dict[Resources, list[str]] | None = None
        """Names of the nodes with each amount of free resources, in the order of `free`; None until first used."""
        self.gpus = sum(one.gpus for one in self._free.values())
        """Total number of free GPUs."""

    @classmethod
    def of_cluster(cls, cluster: ClusterView, holders: Iterable[JobView] = ()) -> Ledger:
        """Return a ledger of the GPUs that the jobs `holders` leave free."""
        names = [node.name for node in cluster.nodes]
        free = zip(names, free_by_node(cluster, holders).tolist(), strict=True)
        return cls(dict(sorted(free)), uniform=cluster.uniform)

    @classmethod
    def of_partition(cls, snapshot: Snapshot, name: str, whole_node_gpus: Mapping[str, int]) -> Ledger:
        """Return a ledger of the GPUs that Slurm could allocate now on each node of a partition. A node that accepts no
        jobs has none."""
        partition = snapshot.partitions.get(name)
        if partition is None:
            return cls({})
        full, whole = partition_gpus(partition, snapshot, whole_node_gpus)
        free: dict[str, int] = {}
        for node in (snapshot.nodes[name] for name in partition.node_names if name in snapshot.nodes):
            gpus = (full if node.idle else 0) if whole else node.gpus - node.gpus_used
            free[node.name] = gpus if partition.up and node.usable else 0
        return cls(dict(sorted(free.items())))

    def __getitem__(self, name: str) -> int:
        return self._free[name].gpus

    def __iter__(self) -> Iterator[str]:
        return iter(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def trial(self) -> Ledger:
        """Return a copy for trial placements."""
        other = copy(self)
        other._by_free = None
        self._shared = other._shared = True
        return other

    def only(self, nodes: Collection[str] | None) -> Ledger:
        """Return a copy that has only these nodes. None means all nodes."""
        if nodes is None:
            return self.trial()
        return Ledger({name: free for name, free in self._free.items() if name in nodes}, uniform=self._uniform)

    def at_most(self, other: Ledger) -> Ledger:
        """Return a copy with the smaller amount of the two ledgers on each node; a node that `other` lacks keeps its
        amount."""
        least = other._free
        return Ledger({name: one.at_most(least[name]) if name in least else one for name, one in self._free.items()})

    def give(self, amounts: Mapping[str, int] | Mapping[str, Resources]) -> None:
        """Add these amounts to the free resources of the ledger's nodes; other nodes are ignored."""
        for name, more in amounts.items():
            if name in self._free:
                self._set(name, self._free[name].plus(_resources(more)))

    def spend(self, names: Iterable[str], need: Resources) -> None:
        """Subtract `need` from each of these nodes in the ledger, even if less is free."""
        for name in names:
            if name in self._free:
                self._set(name, self._free[name].without(need))

    def fits(self, shape: Shape) -> bool:
        """Tell whether `take` would find room for the shape."""
        return shape.gpus <= self.gpus if not self._uniform else self.nodes_for(shape) is not None

    def nodes_for(
        self, shape: Shape, own: Mapping[str, int] | None = None, only: Collection[str] | None = None
    ) -> list[str] | None:
        """Return the nodes that `take` would choose for the shape; None if too few have room."""
        found = self.nodes_with(Resources(shape.gpus_per_node), shape.nodes, own, only)
        return found if len(found) == shape.nodes else None

    def nodes_with(
        self, need: Resources, most: int, own: Mapping[str, int] | None = None, only: Collection[str] | None = None
    ) -> list[str]:
        """Return at most `most` nodes that have room for `need`, the fullest first."""
        found: list[str] = []
        if own or only is not None:
            own, last = own or {}, len(self._place)
            names = [name for name in {*self._free, *own} if only is None or name in only]
            rooms = sorted((self._room(name, own), self._place.get(name, last), name) for name in names)
            found = [name for room, _, name in rooms if room.cover(need)]
        else:
            for free in sorted(free for free in self._levels() if free.cover(need)):
                found += self._levels()[free][: most - len(found)]
        return found[:most]

    def take(self, shape: Shape, own: Mapping[str, int] | None = None, only: Collection[str] | None = None) -> bool:
        """Take the shape's GPUs from the ledger. Return False, with nothing changed, if there is no room.

        `own` are GPUs, by node, that the job itself holds and may take too. With `only`, the shape must lie on these
        nodes.
        """
        if not self._uniform:
            enough = shape.gpus <= self.gpus
            self.gpus -= shape.gpus * enough
            return enough
        nodes = self.nodes_for(shape, own, only)
        need = Resources(shape.gpus_per_node)
        for name in nodes or ():
            left = self._room(name, own).without(need) if own else self._free[name].without(need)
            self._set(name, left.at_most(self._free.get(name, NOTHING)) if own else left)
        return nodes is not None

    def take_any(self, gpus: int) -> bool:
        """Take GPUs from any nodes, the fullest first; return False, with nothing changed, if too few are free."""
        if gpus > self.gpus:
            return False
        for free in sorted(free for free in self._levels() if free.gpus):
            for name in self._levels()[free][: -(-gpus // free.gpus)]:
                taken = min(gpus, free.gpus)
                self._set(name, free.without(Resources(taken)))
                gpus -= taken
        return True

    def _room(self, name: str, own: Mapping[str, int]) -> Resources:
        free = self._free.get(name, NOTHING)
        return free._replace(gpus=free.gpus + own[name]) if name in own else free

    def _levels(self) -> dict[Resources, list[str]]:
        if self._by_free is None:
            self._by_free = {}
            for name in sorted(self._free, key=self._place.__getitem__):
                self._by_free.setdefault(self._free[name], []).append(name)
        return self._by_free

    def _set(self, name: str, free: Resources) -> None:
        if self._shared:
            self._free, self._shared = {**self._free}, False
        before = self._free.get(name)
        self._free[name] = free
        self._place.setdefault(name, len(self._place))
        self.gpus += free.gpus - (before or NOTHING).gpus
        if self._by_free is not None:
            place = self._place.__getitem__
            if before is not None:
                level = self._by_free[before]
                del level[bisect_left(level, place(name), key=place)]
            insort(self._by_free.setdefault(free, []), name, key=place)


def _resources(amount: int | Resources) -> Resources:
    return amount if isinstance(amount, Resources) else Resources(amount)


def held_gpus(cluster: ClusterView, jobs: Sequence[JobView]) -> Ints:
    """Return an array (E, 3) with a row (job index, node index, GPUs) for each node of each job. Every node must be in
    the cluster."""
    index = {node.name: n for n, node in enumerate(cluster.nodes)}
    held = [(j, index[name], gpus) for j, job in enumerate(jobs) for name, gpus in job.nodes.items() if gpus]
    return np.array(held, dtype=np.int64).reshape(-1, 3)


def count_nodes(free: Ints, node: Ints, gpus: Ints, stays: Bools, per_node: int) -> Ints:
    """Return the number of nodes with 0 to P free GPUs in each of K candidate schedules: (K, P + 1).

    `free` (N,) are the GPUs of each node without the jobs. If `stays[k, e]`, schedule k takes `gpus[e]` GPUs of the
    node `node[e]`.
    """
    count, nodes = len(stays), len(free)
    at = (np.arange(count)[:, None] * nodes + node).ravel()
    used = np.bincount(at, weights=(stays * gpus).ravel(), minlength=count * nodes)
    left = np.maximum(free - used.reshape(count, nodes).astype(np.int64), 0)
    kinds = per_node + 1
    found: Ints = np.bincount((np.arange(count)[:, None] * kinds + left).ravel(), minlength=count * kinds)
    return found.reshape(count, kinds)


def parts_that_fit(nodes: Ints, size: int) -> Ints:
    """Return how many times (K,) `size` free GPUs on one node are found in the counts `nodes` (K, P + 1)."""
    return nodes @ (np.arange(nodes.shape[1]) // size)


def take_parts(nodes: Ints, size: int, parts: Ints) -> Ints:
    """Take `size` GPUs on one node, `parts` (K,) times, from the counts `nodes` (K, P + 1) by best fit. Return how many
    of these parts (K,) fitted on no node."""
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

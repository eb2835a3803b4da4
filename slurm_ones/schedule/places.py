"""Which nodes: one leaf switch before several, the links that the fewest jobs use, fast nodes before slow ones.

What is chosen for a job is what makes its step shortest. Of a step a `share` is gradient exchange. On several leaf
switches that takes `taper` times longer, and that many times longer again as jobs across leaf switches meet on the most
used link of its own: the contention of Wang et al. (arXiv 2002.10105), in whose AdaDUAL a job that would meet others
there waits if that is shorter; here it goes where it meets the fewest. The rest of the step takes as long as on the
slowest of its nodes (PAL, SC 2024: variability of nodes in placement). Of equal places that one is taken where the job
moves least, which is what Tesserae's matching minimises, and where least is left over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ones_db.shape import Shape
from slurm_ones.schedule.ledger import free_by_node
from slurm_ones.schedule.policy import Allocation, Bools, ClusterView, Ints, JobView

SPEEDS = 4
"""Most speeds of nodes that are told apart as places are weighed."""


class Place(NamedTuple):
    """Where a job could be."""

    nodes: Ints
    """Indices of its nodes, in the order in which they are filled."""
    gpus: Ints
    """GPUs on each."""
    step: float
    """How many times longer its step takes than below one leaf switch, on nodes of speed 1."""


class Places:
    """The free GPUs of each node, the jobs across leaf switches on each link, and the best place for another job."""

    def __init__(self, cluster: ClusterView, holders: Sequence[JobView]) -> None:
        """All that the cluster offers but for what the `holders` have on their nodes."""
        self._cluster = cluster
        self.names = [node.name for node in cluster.nodes]
        self._index = {name: n for n, name in enumerate(self.names)}
        self.free = free_by_node(cluster, holders)
        leaves = {leaf: i for i, leaf in enumerate(dict.fromkeys(node.leaf for node in cluster.nodes))}
        self._leaf = np.array([leaves[node.leaf] for node in cluster.nodes], dtype=np.int64)
        self._leaves = len(leaves)
        self._speed = np.array([node.speed for node in cluster.nodes], dtype=np.float64)
        self.load = np.zeros(len(leaves), dtype=np.int64)
        """Jobs across leaf switches on the link of each."""
        for job in holders:
            self.count(self.held(job), 1)

    def held(self, job: JobView) -> Ints:
        """Indices of the nodes that the job holds."""
        return np.array([self._index[name] for name, gpus in job.nodes.items() if gpus and name in self._index], int)

    def count(self, nodes: Ints, jobs: int) -> None:
        """So many `jobs` more use the links of these nodes, where they are below several leaf switches."""
        leaves = np.unique(self._leaf[nodes])
        if len(leaves) > 1:
            self.load[leaves] += jobs

    def put(self, job: JobView, there: bool) -> None:
        """The job holds its GPUs, or leaves them."""
        nodes = self.held(job)
        gpus = np.array([job.nodes[self.names[n]] for n in nodes], dtype=np.int64)
        self.free[nodes] += -gpus if there else gpus
        self.count(nodes, 1 if there else -1)

    def take(self, place: Place) -> None:
        """Set the place's GPUs aside."""
        self.free[place.nodes] -= place.gpus
        self.count(place.nodes, 1)

    def step(self, nodes: Ints, share: float) -> float:
        """How many times longer a step takes there of which a `share` is exchange; the job itself is not counted yet on
        the links."""
        leaves = np.unique(self._leaf[nodes])
        far = self._cluster.taper * float(self.load[leaves].max() + 1) if len(leaves) > 1 else 1.0
        return (1.0 - share) / float(self._speed[nodes].min()) + share * far

    def _meets(self, nodes: Ints) -> tuple[float, float]:
        """Leaf switches that nodes are below, and about how many jobs across leaf switches are met on their links, each
        of which has two ends at least; none where it is one."""
        leaves = np.unique(self._leaf[nodes])
        return float(len(leaves)), float(self.load[leaves].sum()) / 2 if len(leaves) > 1 else 0.0

    def best(self, shape: Shape, share: float, own: Ints) -> Place | None:
        """The best place for a shape, for a job that has had its `own` nodes; None where there is no room."""
        whole = self._cluster.gpus_per_node
        least = shape.nodes if self._cluster.uniform else -(-shape.gpus // max(whole, 1))
        mine = np.zeros(len(self.free), dtype=np.bool_)
        mine[own] = True
        found: tuple[tuple[float, ...], Place] | None = None
        for among in self._regions(shape):
            for first in (mine, np.zeros_like(mine)) if len(own) else (mine,):
                filled = self._filled(shape, among, first)
                if filled is None:
                    continue
                nodes, gpus = filled
                place = Place(nodes, gpus, self.step(nodes, share))
                more = float(len(nodes) - least)
                # Nodes are filled before leaf switches: who finds no node whole is slower than who spans two switches.
                on_nodes = float(self.free[nodes].sum() - gpus.sum())
                on_leaf = float(self.free[self._leaf == self._leaf[nodes[0]]].sum())
                strange = float(gpus[~mine[nodes]].sum())
                far, met = self._meets(nodes)
                # What it costs those whom it meets counts as well: each waits for one more on its links.
                cost = place.step + share * self._cluster.taper * met
                key = (more if least == 1 else 0.0, round(cost, 9), far, more, on_nodes, strange, on_leaf)
                if found is None or key < found[0]:
                    found = key, place
        return None if found is None else found[1]

    def _regions(self, shape: Shape) -> Iterator[Bools]:
        """(N,) nodes to look among: below each leaf switch, then below several, each also without the slower nodes."""
        fits = self.free >= (shape.gpus_per_node if self._cluster.uniform else 1)
        speeds = np.unique(self._speed[fits])[-SPEEDS:] if fits.any() else np.zeros(0)
        for slowest in speeds[::-1]:
            among = fits & (self._speed >= slowest)
            room = np.bincount(self._leaf[among], self._room(shape)[among], self._leaves)
            enough = np.flatnonzero(room >= shape.gpus)
            for leaf in enough:
                yield among & (self._leaf == leaf)
            if len(enough) or room.sum() < shape.gpus:
                continue
            for order in (np.lexsort((-room, self.load)), np.argsort(-room, kind="stable")):
                needed = int(np.searchsorted(np.cumsum(room[order]), shape.gpus)) + 1
                yield among & np.isin(self._leaf, order[:needed])

    def _room(self, shape: Shape) -> Ints:
        """(N,) GPUs that a shape can have of each node."""
        if not self._cluster.uniform:
            return self.free
        return np.where(self.free >= shape.gpus_per_node, shape.gpus_per_node, 0)

    def _filled(self, shape: Shape, among: Bools, first: Bools) -> tuple[Ints, Ints] | None:
        """Nodes for the shape `among` those given, those that come `first` first, and the GPUs on each."""
        nodes = np.flatnonzero(among)
        if self._cluster.uniform:
            order = nodes[np.lexsort((self.free[nodes], ~first[nodes]))][: shape.nodes]
            return (order, np.full(shape.nodes, shape.gpus_per_node)) if len(order) == shape.nodes else None
        left, found, gpus = shape.gpus, list[int](), list[int]()
        order = nodes[np.lexsort((-self.free[nodes], ~first[nodes]))]
        while left and len(order):
            enough = order[(self.free[order] >= left) & (first[order] == first[order].any())]
            # The last of them is where least is left over.
            node = int(enough[np.argmin(self.free[enough])] if len(enough) else order[0])
            found.append(node)
            gpus.append(int(min(left, self.free[node])))
            left -= gpus[-1]
            order = order[order != node]
        return None if left else (np.array(found), np.array(gpus))


def matters(cluster: ClusterView) -> bool:
    """Whether it is known of the nodes that they are not alike."""
    apart = cluster.taper > 1 and len({node.leaf for node in cluster.nodes}) > 1
    return apart or len({node.speed for node in cluster.nodes}) > 1


class Move(NamedTuple):
    """What moving a job costs it, and for how long it gains."""

    pause_s: float
    lasts_s: float


def choose_nodes(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    fixed: Collection[int],
    allocations: Mapping[int, Allocation],
    shares: Mapping[int, float],
    moves: Mapping[int, Move],
) -> dict[int, tuple[str, ...]]:
    """Nodes for each job that the allocations start or change, and for those that had better move, by job id.

    `shares` says what part of a job's step is exchange, at its new shape. Jobs in `moves` may be moved where they keep
    their shape: if that makes their steps so much shorter that the pause repays while it lasts. Those for which no
    place is found are left out: whoever places them chooses.
    """
    known = {node.name for node in cluster.nodes}
    stay, change = list[JobView](), list[JobView]()
    for job in jobs:
        got = allocations.get(job.job_id)
        if job.shape is not None and (job.job_id in fixed or (got is not None and got.shape.gpus == job.shape.gpus)):
            stay.append(job)
        elif got is not None:
            change.append(job)
    places = Places(cluster, stay)
    found: dict[int, tuple[str, ...]] = {}
    for job in sorted(change, key=lambda job: -allocations[job.job_id].shape.gpus):
        place = places.best(allocations[job.job_id].shape, shares.get(job.job_id, 0.0), places.held(job))
        if place is not None:
            places.take(place)
            found[job.job_id] = tuple(places.names[n] for n in place.nodes)
    for job in stay:
        if job.job_id in moves and job.job_id not in fixed and job.shape is not None and known.issuperset(job.nodes):
            share, move = shares.get(job.job_id, 0.0), moves[job.job_id]
            places.put(job, there=False)
            now = places.step(places.held(job), share)
            place = places.best(job.shape, share, places.held(job)) if now > 1.0 else None
            if place is not None and (1.0 - place.step / now) * move.lasts_s > move.pause_s:
                places.take(place)
                found[job.job_id] = tuple(places.names[n] for n in place.nodes)
            else:
                places.put(job, there=True)
    return found

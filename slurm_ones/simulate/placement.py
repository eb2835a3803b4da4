"""Nodes for jobs that are placed without Slurm: packed, or spread over the emptiest nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, NodeView

Nodes = Mapping[str, int]
"""GPUs of each node."""


def place(shape: Shape, free: Nodes, cluster: ClusterView, *, spread: bool = False, kind: str = "") -> dict[str, int]:
    """GPUs on nodes for the shape, of one `kind`; empty if there is no room.

    If the kind is left open, of the kind with the least room that has enough, and of several only if none has. On slow
    nodes only if the others have no room.
    """
    kinds: dict[str, list[NodeView]] = {}
    for node in cluster.nodes:
        kinds.setdefault(node.kind, []).append(node)
    tries = [kinds.get(kind, [])] if kind else sorted(kinds.values(), key=lambda nodes: _room(nodes, free))
    if not kind and len(kinds) > 1:
        tries.append(list(cluster.nodes))
    for nodes in tries:
        for some in ([node for node in nodes if node.speed >= 1], nodes):
            if found := _below_few(shape, free, some, cluster.uniform, spread):
                return found
    return {}


def place_near(
    shape: Shape, free: Nodes, cluster: ClusterView, own: Nodes, *, spread: bool = False, kind: str = ""
) -> dict[str, int]:
    """As `place`, on the job's `own` nodes if these make as few and leave as little over."""
    found = place(shape, free, cluster, spread=spread, kind=kind)
    if not (found and own) or spread or cluster.uniform or len(cluster.kinds) > 1:
        return found
    near = {name: gpus for name, gpus in free.items() if name in own and gpus > 0}
    left = shape.gpus - sum(near.values())
    if left > 0:
        near |= place(Shape(1, left), {name: gpus for name, gpus in free.items() if name not in own}, cluster)
    else:
        near = place(shape, near, cluster)

    def cost(nodes: Nodes) -> tuple[int, int]:
        return len(nodes), sum(free[name] - gpus for name, gpus in nodes.items())

    return near if cost(near) <= cost(found) else found


def _room(nodes: Iterable[NodeView], free: Nodes) -> int:
    return sum(free.get(node.name, 0) for node in nodes)


def _below_few(shape: Shape, free: Nodes, nodes: Sequence[NodeView], uniform: bool, spread: bool) -> dict[str, int]:
    """GPUs below the leaf switch with the least room that has enough, else of the roomiest and of what has enough for
    the rest, as Slurm places a job on a tree."""
    leaves: dict[str, dict[str, int]] = {}
    for node in nodes:
        if node.name in free:
            leaves.setdefault(node.leaf, {})[node.name] = free[node.name]
    rising, chosen = sorted(leaves.values(), key=lambda room: sum(room.values())), dict[str, int]()
    while rising:
        for room in rising:
            if found := _filled(shape, chosen | room, uniform, spread):
                return found
        chosen |= rising.pop()
    return {}


def _filled(shape: Shape, free: Nodes, uniform: bool, spread: bool) -> dict[str, int]:
    """GPUs on the nodes that are left with the fewest, or on the emptiest."""
    if uniform:
        fitting = sorted((gpus, name) for name, gpus in free.items() if gpus >= shape.gpus_per_node)
        return {name: shape.gpus_per_node for _, name in fitting[: shape.nodes]} if len(fitting) >= shape.nodes else {}
    found: dict[str, int] = {}
    left = shape.gpus
    while left > 0 and (room := {name: gpus for name, gpus in free.items() if gpus > 0 and name not in found}):
        enough = {name: gpus for name, gpus in room.items() if gpus >= left and not spread}
        name = min(enough, key=enough.__getitem__) if enough else max(room, key=room.__getitem__)
        found[name] = min(left, free[name])
        left -= found[name]
    return {} if left else found


class GpuChange(NamedTuple):
    """A running job that is to have other GPUs."""

    job_id: int
    shape: Shape
    own: Nodes
    kind: str = ""
    optional: bool = False
    """It keeps its size, and moves only to be on fewer nodes."""


class GpuPlan(NamedTuple):
    """How a job comes to its GPUs."""

    nodes: dict[str, int]
    keeps: dict[str, int]
    """GPUs of its own that it holds until the new ones are ready."""


def plan_changes(
    cluster: ClusterView, free: Nodes, changes: Sequence[GpuChange], *, spread: bool
) -> dict[int, GpuPlan]:
    """How running jobs come to their new GPUs; those that find no room are left out.

    Each is placed, the largest first unless `spread`, as if all of them had left theirs. It keeps its old GPUs until
    the new ones are ready unless another job needs them: then it leaves at once those that it will not have.
    """
    changes = list(changes) if spread else sorted(changes, key=lambda one: -one.shape.gpus)
    while True:
        room, targets, stays = Counter(free), dict[int, dict[str, int]](), set[int]()
        for one in changes:
            room.update(one.own)
        for one in changes:
            own = {} if spread else one.own
            target = place_near(one.shape, room, cluster, own, spread=spread, kind=one.kind)
            if not target or (one.optional and len(target) >= len(one.own)):
                stays.add(one.job_id)
            targets[one.job_id] = target
            room.subtract(target)
        if not stays:
            break
        changes = [one for one in changes if one.job_id not in stays]
    plans = {}
    for one in changes:
        target = targets[one.job_id]
        leaves = Counter(one.own) - Counter(target)
        kept = all(room[name] >= gpus for name, gpus in leaves.items()) and bool(Counter(target) - Counter(one.own))
        if kept:
            room.subtract(leaves)
        plans[one.job_id] = GpuPlan(target, dict(one.own if kept else Counter(one.own) & Counter(target)))
    return plans

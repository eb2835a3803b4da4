"""Where the jobs of the idealized engine go, and, where GPUs join and leave running jobs, when they can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ones_db.shape import Shape
from slurm_ones.schedule.policy import ClusterView

Nodes = Mapping[str, int]
"""GPUs of each node."""


def place_freely(
    shape: Shape, free: dict[str, int], cluster: ClusterView, spread: bool, kind: str = ""
) -> dict[str, int]:
    """GPUs on nodes for the shape, taken from `free`. Of one `kind`, or where that is left open of the kind with the
    least room that has enough, of several only where none has. On slow nodes only where the others have no room."""
    if len(cluster.kinds) > 1:
        return _place_on_kind(shape, free, cluster, spread, kind)
    slow = {node.name for node in cluster.nodes if node.speed < 1}
    fast = {name: gpus for name, gpus in free.items() if name not in slow}
    found = _below_few(shape, fast, cluster, spread) or _below_few(shape, free, cluster, spread)
    if not found:
        raise ValueError(f"the schedule cannot be placed: {shape} does not fit")
    for name, gpus in found.items():
        free[name] -= gpus
    return found


def _below_few(shape: Shape, free: Nodes, cluster: ClusterView, spread: bool) -> dict[str, int]:
    """GPUs on nodes below the leaf switch with the least room that has enough, else of the roomiest and what has enough
    for the rest, as Slurm places a job on a tree; none where there is no room."""
    leaves: dict[str, dict[str, int]] = {}
    for node in cluster.nodes:
        if node.name in free:
            leaves.setdefault(node.leaf, {})[node.name] = free[node.name]
    rising, chosen = sorted(leaves.values(), key=lambda room: sum(room.values())), dict[str, int]()
    while rising:
        for room in rising:
            if found := _filled(shape, chosen | room, cluster, spread):
                return found
        chosen |= rising.pop()
    return {}


def _filled(shape: Shape, free: Nodes, cluster: ClusterView, spread: bool) -> dict[str, int]:
    """GPUs on the nodes where least is left over, or on the emptiest; none where there is no room."""
    found: dict[str, int] = {}
    if cluster.uniform:
        fitting = sorted((gpus, name) for name, gpus in free.items() if gpus >= shape.gpus_per_node)
        found = {name: shape.gpus_per_node for _, name in fitting[: shape.nodes]}
    else:
        left = shape.gpus
        while left > 0 and (room := {name: gpus for name, gpus in free.items() if gpus > 0 and name not in found}):
            enough = {name: gpus for name, gpus in room.items() if gpus >= left and not spread}
            name = min(enough, key=enough.__getitem__) if enough else max(room, key=room.__getitem__)
            found[name] = min(left, free[name])
            left -= found[name]
    return found if sum(found.values()) >= shape.gpus else {}


def _place_on_kind(shape: Shape, free: dict[str, int], cluster: ClusterView, spread: bool, kind: str) -> dict[str, int]:
    rooms = []
    for one in [kind] if kind else cluster.kinds:
        part = cluster.of_kind(one)
        room = {node.name: free.get(node.name, 0) for node in part.nodes}
        rooms.append((sum(room.values()), part, room))
    for _, part, room in sorted(rooms, key=lambda each: each[0]):
        try:
            found = place_freely(shape, room, part, spread)
        except ValueError:
            continue
        for name, gpus in found.items():
            free[name] -= gpus
        return found
    if kind:
        raise ValueError(f"the schedule cannot be placed: {shape} of {kind} does not fit")
    alike = replace(cluster, nodes=tuple(replace(node, kind="") for node in cluster.nodes))
    return place_freely(shape, free, alike, spread)


class Holding(NamedTuple):
    """What a job holds, and what is under way."""

    nodes: Nodes
    """GPUs held now."""
    becomes: Nodes | None = None
    """GPUs held in the end, where that is under way."""
    begins_s: float = 0.0
    """Seconds until it holds those too."""
    left_s: float = 0.0
    """Seconds from then on until it gives up all others."""


class Asked(NamedTuple):
    """A job that is to start or grow."""

    job_id: int
    shape: Shape
    own: Nodes
    """GPUs that it holds."""
    prepare_s: float
    """Seconds that it holds the old and the new GPUs."""
    kind: str = ""
    """Of the GPUs that it is to get; empty for any."""


class _Use:
    """How many GPUs of each node are held from when on, as far as it is known."""

    def __init__(self, cluster: ClusterView, holding: Sequence[Holding]) -> None:
        self._free = {node.name: node.gpus for node in cluster.nodes}
        self._events: list[tuple[float, str, int]] = []
        """(seconds from now, node, GPUs that become free; taken where negative)."""
        for held in holding:
            self._take(held.nodes)
            if held.becomes is not None:
                self.add(held.nodes, held.becomes, held.begins_s, held.begins_s + held.left_s)

    def _take(self, nodes: Nodes) -> None:
        for name, gpus in nodes.items():
            self._free[name] -= gpus

    def add(self, own: Nodes, becomes: Nodes, begins_s: float, ends_s: float) -> None:
        """A job that holds its `own` GPUs holds others too from `begins_s` on, and those alone from `ends_s` on."""
        for name in {*own, *becomes}:
            before, after = own.get(name, 0), becomes.get(name, 0)
            if after > before:
                self._events.append((begins_s, name, before - after))
            elif before > after:
                self._events.append((ends_s, name, before - after))

    def free(self, from_s: float) -> dict[str, int]:
        """GPUs of each node that nobody holds at any time from then on."""
        now = dict(self._free)
        later: list[tuple[float, str, int]] = []
        for event in sorted(self._events):
            if event[0] <= from_s:
                now[event[1]] += event[2]
            else:
                later.append(event)
        least = dict(now)
        for _, name, gpus in later:
            now[name] += gpus
            least[name] = min(least[name], now[name])
        return least

    def times(self) -> list[float]:
        """When something changes, from now on."""
        return sorted({0.0, *(at for at, _, gpus in self._events if gpus > 0)})


class Plan(NamedTuple):
    """How a job comes to what it is to get."""

    nodes: dict[str, int]
    """GPUs that it has in the end."""
    keeps: dict[str, int]
    """GPUs of its own that it holds until then; what it keeps in the end, or all."""
    wait_s: float = 0.0
    """Until the others are free."""


def plan_hot(
    cluster: ClusterView,
    holding: Sequence[Holding],
    asked: Sequence[Asked],
    spread: bool = False,
    scattered: Sequence[Asked] = (),
) -> dict[int, Plan]:
    """How each job that is asked for, in this order, comes to its GPUs; those that cannot now are left out.

    Jobs that are `scattered` keep their size, and move where that takes fewer nodes of them.

    Each goes where least is left over, as if all who are asked for had left their GPUs. It keeps its own until the new
    ones are ready where those are free. Else it first leaves those of its own that it does not keep, so that others can
    have them, or, where it keeps none, waits until what it needs is free. Where two wait for each other, one takes what
    is free instead, or stays as it is, less what it left.
    """
    use = _Use(cluster, holding)
    movers = {job.job_id: job for job in scattered}
    while True:
        everybody = sorted([*asked, *movers.values()], key=lambda job: -job.shape.gpus) if movers else list(asked)
        targets = _targets(cluster, use.free(float("inf")), everybody, spread)
        stays = [i for i, job in movers.items() if i not in targets or len(targets[i]) >= len(job.own)]
        if not stays:
            break
        for job_id in stays:
            del movers[job_id]
    found: dict[int, Plan] = {}
    left = [job for job in everybody if job.job_id in targets]
    left = _settled(use, found, targets, left, at_once=True)
    for job in left:
        kept = {name: min(gpus, job.own.get(name, 0)) for name, gpus in targets[job.job_id].items()}
        kept = {name: gpus for name, gpus in kept.items() if gpus}
        if kept and kept != job.own:
            use.add(job.own, kept, 0.0, 0.0)
            found[job.job_id] = Plan(targets[job.job_id], kept)
    left = [job._replace(own=found[job.job_id].keeps) if job.job_id in found else job for job in left]
    while left := _settled(use, found, targets, left):
        job = left.pop(0)
        added = _added(job, use.free(0.0), cluster)
        if added is not None:
            _settle(use, found, job, added, 0.0)
        elif job.job_id in found:
            # What it left may be another's by now.
            found[job.job_id] = Plan(dict(job.own), dict(job.own))
    return found


def _targets(cluster: ClusterView, free: Nodes, asked: Sequence[Asked], spread: bool) -> dict[int, dict[str, int]]:
    """Nodes for each job, in this order, as if all had left theirs."""
    room = Counter(free)
    for job in asked:
        room.update(job.own)
    found: dict[int, dict[str, int]] = {}
    for job in asked:
        target = _placed(job.shape, room, cluster, {} if spread else job.own, spread, job.kind)
        if target is not None:
            found[job.job_id] = target
            room.subtract(target)
    return found


def _settled(
    use: _Use, found: dict[int, Plan], targets: Mapping[int, dict[str, int]], left: list[Asked], at_once: bool = False
) -> list[Asked]:
    """Those of the jobs `left` whose GPUs are not known to become free; the others are settled."""
    progress = True
    while progress:
        progress = False
        for job in list(left):
            at = _begins(use, job, targets[job.job_id])
            if at is not None and not (at_once and at):
                _settle(use, found, job, targets[job.job_id], at)
                left.remove(job)
                progress = True
    return left


def _begins(use: _Use, job: Asked, target: Nodes) -> float | None:
    """In how many seconds the GPUs of the target that the job has not are free for good; None where that is unknown."""
    more = {name: gpus - job.own.get(name, 0) for name, gpus in target.items()}
    for at in use.times():
        free = use.free(at)
        if all(free[name] >= gpus for name, gpus in more.items()):
            return at
    return None


def _settle(use: _Use, found: dict[int, Plan], job: Asked, nodes: dict[str, int], at: float) -> None:
    found[job.job_id] = Plan(nodes, dict(job.own), at)
    shrinks = all(job.own.get(name, 0) >= gpus for name, gpus in nodes.items())
    use.add(job.own, nodes, at, at if shrinks else at + job.prepare_s)


def _added(job: Asked, free: Nodes, cluster: ClusterView) -> dict[str, int] | None:
    """The job's own GPUs and as many of the free ones as it is to get; None where there are too few."""
    missing = job.shape.gpus - sum(job.own.values())
    if cluster.uniform and job.own:
        room = {name: gpus + job.own.get(name, 0) for name, gpus in free.items()}
        return _placed(job.shape, room, cluster, job.own, kind=job.kind)
    if missing <= 0:
        return None
    more = _placed(Shape(1, missing) if job.own else job.shape, free, cluster, job.own, kind=job.kind)
    return None if more is None else dict(Counter(job.own) + Counter(more))


def _placed(
    shape: Shape, room: Nodes, cluster: ClusterView, own: Nodes, spread: bool = False, kind: str = ""
) -> dict[str, int] | None:
    """As `place_freely`, on the job's `own` nodes where these make as few and leave as little over; None where there is
    no room."""
    try:
        found = place_freely(shape, dict(room), cluster, spread, kind)
    except ValueError:
        return None
    if not own or cluster.uniform or len(cluster.kinds) > 1:
        return found
    near = {name: gpus for name, gpus in room.items() if name in own and gpus > 0}
    left = shape.gpus - sum(near.values())
    if left > 0:
        chosen = near | place_freely(Shape(1, left), {n: g for n, g in room.items() if n not in own}, cluster, spread)
    else:
        chosen = place_freely(shape, near, cluster, spread)

    def cost(nodes: Nodes) -> tuple[int, int]:
        return len(nodes), sum(room[name] - gpus for name, gpus in nodes.items())

    return chosen if cost(chosen) <= cost(found) else found

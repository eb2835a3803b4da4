"""The nodes of a simulated cluster, and which waiting jobs Slurm starts on them: in order, then EASY backfill.

Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995: a job may overtake the first one that finds no room if that
starts no later for it. Ends are taken from time limits, as Slurm does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_ones.slurm.model import Node, Partition


@dataclass(frozen=True)
class PartitionSpec:
    """Equal nodes under one name."""

    name: str
    nodes: tuple[str, ...]
    gpus_per_node: int
    whole_nodes: bool = False
    """Slurm hands out whole nodes, and knows of no GPUs."""
    max_time_s: float = 0.0
    default: bool = True

    def to_model(self) -> Partition:
        """As Slurm shows it."""
        return Partition(self.name, True, self.nodes, self.max_time_s, 0, self.whole_nodes, self.default)


@dataclass
class NodeState:
    """One node."""

    name: str
    partition: PartitionSpec
    down: bool = False
    drained: bool = False
    held: dict[int, int] = field(default_factory=dict)
    """GPUs that each job holds."""

    @property
    def usable(self) -> bool:
        return not (self.down or self.drained)

    @property
    def free(self) -> int:
        """GPUs that Slurm could hand out now."""
        if not self.usable or (self.partition.whole_nodes and self.held):
            return 0
        return self.partition.gpus_per_node - sum(self.held.values())

    def to_model(self) -> Node:
        """As Slurm shows it."""
        used = sum(self.held.values())
        state = "ALLOCATED" if used == self.partition.gpus_per_node else "MIXED" if used else "IDLE"
        if self.down:
            state = "DOWN"
        elif self.drained:
            state = "DRAIN"
        whole = self.partition.whole_nodes
        return Node(
            name=self.name,
            state=state,
            usable=self.usable,
            gpus=0 if whole else self.partition.gpus_per_node,
            gpus_used=0 if whole else used,
            partitions=(self.partition.name,),
            idle=not self.held,
        )


class Nodes:
    """All nodes, in the cluster's order."""

    def __init__(self, partitions: Sequence[PartitionSpec]) -> None:
        self.partitions = {partition.name: partition for partition in partitions}
        self._states = {name: NodeState(name, p) for p in partitions for name in p.nodes}
        self._seen: dict[str, Node] = {}

    def __getitem__(self, name: str) -> NodeState:
        """A node that is about to change."""
        self._seen.pop(name, None)
        return self._states[name]

    def names(self) -> tuple[str, ...]:
        """Of all nodes."""
        return tuple(self._states)

    def free(self, partition: str) -> dict[str, int]:
        """GPUs that each usable node of a partition could give now."""
        states = (self._states[name] for name in self.partitions[partition].nodes)
        return {state.name: state.free for state in states if state.usable}

    def whole(self, partition: str) -> dict[str, int]:
        """GPUs of each node of a partition when nothing runs on it."""
        spec = self.partitions[partition]
        return dict.fromkeys(spec.nodes, spec.gpus_per_node)

    def take(self, job_id: int, gpus: Mapping[str, int]) -> None:
        """The job holds these GPUs; raises ValueError where they are not free."""
        for name, count in gpus.items():
            if count > self[name].free:
                raise ValueError(f"{name}: {count} GPUs for job {job_id}, {self[name].free} are free")
            self[name].held[job_id] = count

    def give_back(self, job_id: int, names: Iterable[str]) -> None:
        """The job holds nothing of these nodes any more."""
        for name in names:
            self[name].held.pop(job_id, None)

    def to_model(self) -> dict[str, Node]:
        """As Slurm shows them."""
        for name, state in self._states.items():
            if name not in self._seen:
                self._seen[name] = state.to_model()
        return {name: self._seen[name] for name in self._states}


UNLIMITED_S = 365 * 86400.0
"""What Slurm plans with for a job without a time limit."""


@dataclass(frozen=True)
class QueuedJob:
    """A job that could start, were there room."""

    job_id: int
    least_nodes: int
    most_nodes: int
    gpus: int
    """GPUs on each node."""
    limit_s: float
    """How long it may run; 0 for no limit."""


@dataclass(frozen=True)
class RunningJob:
    """What a running job gives back, and when at the latest."""

    ends: float
    gpus: Mapping[str, int]


def place(job: QueuedJob, free: Mapping[str, int]) -> tuple[str, ...] | None:
    """Nodes for the job, where least is left over, else in the cluster's order; None where it finds no room.

    `free` has the GPUs that each node could give now, in the cluster's order.
    """
    may = ((gpus, i, name) for i, (name, gpus) in enumerate(free.items()))
    fitting = [one for one in may if one[0] >= job.gpus]
    if len(fitting) < job.least_nodes:
        return None
    chosen = sorted(fitting)[: job.most_nodes]
    return tuple(name for _, _, name in sorted(chosen, key=lambda one: one[1]))


def starts(
    queue: Sequence[QueuedJob], free: Mapping[str, int], whole: Mapping[str, int]
) -> tuple[list[tuple[int, tuple[str, ...]]], list[int]]:
    """The jobs that start now with their nodes: the main scheduler's round; and the jobs that must wait, in order.

    `queue` is in order of priority; `whole` has the GPUs of each node when nothing runs on it: a job that would not
    fit even then holds nobody up.
    """
    left = dict(free)
    chosen: list[tuple[int, tuple[str, ...]]] = []
    for i, job in enumerate(queue):
        nodes = place(job, left)
        if nodes is not None:
            _take(left, nodes, job.gpus)
            chosen.append((job.job_id, nodes))
        elif place(job, whole) is not None:
            return chosen, [other.job_id for other in queue[i:]]
    return chosen, []


def backfill(
    queue: Sequence[QueuedJob],
    free: Mapping[str, int],
    whole: Mapping[str, int],
    running: Iterable[RunningJob],
    now: float,
) -> list[tuple[int, tuple[str, ...]]]:
    """The jobs that start now with their nodes, those included that overtake the first that finds no room."""
    left, held = dict(free), list(running)
    chosen: list[tuple[int, tuple[str, ...]]] = []
    then: dict[str, int] | None = None
    begins = math.inf
    for job in queue:
        ends = now + (job.limit_s or UNLIMITED_S)
        # One that ends in time may use what is kept for the first.
        room = left if then is None or ends <= begins else {name: min(left[name], then[name]) for name in left}
        nodes = place(job, room)
        if nodes is not None:
            _take(left, nodes, job.gpus)
            if then is not None and ends > begins:
                _take(then, nodes, job.gpus)
            held.append(RunningJob(ends, dict.fromkeys(nodes, job.gpus)))
            chosen.append((job.job_id, nodes))
        elif then is None and place(job, whole) is not None:
            begins, then = _reserve(job, left, held)
    return chosen


def _take(free: dict[str, int], nodes: Iterable[str], gpus: int) -> None:
    for name in nodes:
        free[name] -= gpus


def _reserve(job: QueuedJob, free: Mapping[str, int], held: Iterable[RunningJob]) -> tuple[float, dict[str, int]]:
    """When the job will start at the latest, and what is free then beside it."""
    then = dict(free)
    begins = math.inf
    for running in sorted(held, key=lambda h: h.ends):
        for name, gpus in running.gpus.items():
            if name in then:
                then[name] += gpus
        if (nodes := place(job, then)) is not None:
            begins = running.ends
            _take(then, nodes, job.gpus)
            break
    return begins, then

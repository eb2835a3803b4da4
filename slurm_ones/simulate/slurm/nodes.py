"""The nodes of a simulated cluster, and which job holds what of them."""

from __future__ import annotations

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

    def seen(self) -> Partition:
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

    def seen(self) -> Node:
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

    def seen(self) -> dict[str, Node]:
        """As Slurm shows them."""
        for name, state in self._states.items():
            if name not in self._seen:
                self._seen[name] = state.seen()
        return {name: self._seen[name] for name in self._states}

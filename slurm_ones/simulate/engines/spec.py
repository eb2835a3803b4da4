"""A simulated cluster: its nodes, their GPUs, and the network between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, NodeView
from slurm_ones.simulate.slurm.scheduler import PartitionSpec
from slurm_ones.simulate.training.network import Network, slow_speeds

PARTITION = "gpu"


class Part(NamedTuple):
    """Equal nodes of a cluster."""

    nodes: int
    gpus_per_node: int
    kind: str = ""


@dataclass(frozen=True)
class ClusterSpec:
    """Equal nodes in one partition, or `parts` with GPUs of a kind each. Raises ValueError for what cannot be."""

    nodes: int = 0
    gpus_per_node: int = 0
    whole_nodes: bool = False
    """Slurm hands out whole nodes, and knows of no GPUs."""
    slow_nodes: tuple[float, ...] = ()
    """Speeds of the nodes that are slower than others."""
    network: Network | None = None
    """None for a network that jobs do not notice."""
    parts: tuple[Part, ...] = ()
    any_shape: bool = True
    """Without a companion, a job's GPUs may be spread over nodes in any way."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", sum(part.nodes for part in self.all_parts))
        object.__setattr__(self, "gpus_per_node", max(part.gpus_per_node for part in self.all_parts))
        slow_speeds(self.names, self.slow_nodes)
        if self.network is not None and self.network.leaves * self.network.nodes != self.nodes:
            below = self.network.leaves * self.network.nodes
            raise ValueError(f"network {self.network}: {below} nodes, and the cluster has {self.nodes}")

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Its parts, or itself as the only one."""
        return self.parts or (Part(self.nodes, self.gpus_per_node),)

    @property
    def gpus(self) -> int:
        return sum(part.nodes * part.gpus_per_node for part in self.all_parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(f"n{i}" for i in range(1, self.nodes + 1))

    @property
    def speeds(self) -> dict[str, float]:
        """Speeds of the slow nodes."""
        return slow_speeds(self.names, self.slow_nodes)

    def partitions(self) -> Iterator[PartitionSpec]:
        """One for each part, the first the default."""
        names = iter(self.names)
        for i, part in enumerate(self.all_parts):
            own = tuple(next(names) for _ in range(part.nodes))
            name = f"{PARTITION}{i}" if i else PARTITION
            yield PartitionSpec(name, own, part.gpus_per_node, self.whole_nodes, default=not i)

    @cached_property
    def view(self) -> ClusterView:
        """The whole of it, as a policy is shown it."""
        speeds, network = self.speeds, self.network
        each = [part for part in self.all_parts for _ in range(part.nodes)]
        views = tuple(
            NodeView(
                name,
                part.gpus_per_node,
                kind=part.kind,
                speed=speeds.get(name, 1.0),
                leaf="" if network is None else f"leaf{i // network.nodes + 1}",
            )
            for i, (name, part) in enumerate(zip(self.names, each, strict=True))
        )
        full = {part.kind: part.gpus_per_node for part in self.parts} if len(self.parts) > 1 else {}
        return ClusterView(
            views,
            node_gpus=self.gpus_per_node,
            uniform=not self.any_shape,
            gpus_of_kind=full,
            taper=1.0 if network is None else network.taper,
        )


def asked_shape(gpus: int, spec: ClusterSpec) -> Shape:
    """The smallest uniform shape of `gpus` GPUs at least, on the fewest nodes; no more than the cluster has."""
    gpus = min(gpus, spec.gpus)
    nodes = -(-gpus // spec.gpus_per_node)
    return Shape(nodes, spec.gpus_per_node if spec.whole_nodes else -(-gpus // nodes))

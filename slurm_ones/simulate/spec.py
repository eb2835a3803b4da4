"""Description of a simulated cluster: its nodes, their GPUs, and the network between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, NodeView
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.slurm.nodes import PartitionSpec

PARTITION = "gpu"


class Part(NamedTuple):
    """Part of a cluster: equal nodes with one kind of GPU."""

    nodes: int
    gpus_per_node: int
    kind: str = ""


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of equal nodes in one partition, or of `parts` with one partition each. Raises `BadInput` if
    there are more slow nodes than nodes, or if the numbers of nodes of `network` and of the cluster differ."""

    nodes: int = 0
    gpus_per_node: int = 0
    whole_nodes: bool = False
    """True if Slurm allocates only whole nodes and has no GPUs configured."""
    slow_nodes: tuple[float, ...] = ()
    """Speeds of the slow nodes, relative to the other nodes."""
    network: Network | None = None
    """Network between nodes; None if jobs do not slow down each other's traffic."""
    parts: tuple[Part, ...] = ()
    cpus_per_gpu: int = 0
    """CPUs per GPU, of nodes and in job requests; 0 if Slurm does not count CPUs."""
    any_shape: bool = True
    """True if a job may have different numbers of GPUs on its nodes. Only an oracle can run such jobs."""
    charged: bool = False
    """True if each job names an account, which is charged for its GPU-hours."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", sum(part.nodes for part in self.all_parts))
        object.__setattr__(self, "gpus_per_node", max(part.gpus_per_node for part in self.all_parts))
        slow_speeds(self.names, self.slow_nodes)
        if self.network is not None and self.network.leaves * self.network.nodes != self.nodes:
            below = self.network.leaves * self.network.nodes
            raise BadInput(f"network {self.network}: {below} nodes, and the cluster has {self.nodes}")

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Parts of the cluster. A cluster of equal nodes has one part."""
        return self.parts or (Part(self.nodes, self.gpus_per_node),)

    def __str__(self) -> str:
        """Return the cluster in the format of `--cluster`: 16x4, or 8x4:a100+8x4:v100."""
        return "+".join(f"{n}x{g}" + (f":{kind}" if kind else "") for n, g, kind in self.all_parts)

    @property
    def least_node(self) -> int:
        """Number of GPUs of the smallest node."""
        return min(part.gpus_per_node for part in self.all_parts)

    @property
    def gpus(self) -> int:
        return sum(part.nodes * part.gpus_per_node for part in self.all_parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(f"n{i}" for i in range(1, self.nodes + 1))

    @property
    def speeds(self) -> dict[str, float]:
        """Relative speed of each slow node, by name."""
        return slow_speeds(self.names, self.slow_nodes)

    def partitions(self) -> Iterator[PartitionSpec]:
        """Yield a partition for each part; the first is the default partition."""
        names = iter(self.names)
        for i, part in enumerate(self.all_parts):
            own = tuple(next(names) for _ in range(part.nodes))
            name = f"{PARTITION}{i}" if i else PARTITION
            cpus = self.cpus_per_gpu * part.gpus_per_node
            yield PartitionSpec(name, own, part.gpus_per_node, self.whole_nodes, default=not i, cpus_per_node=cpus)

    @cached_property
    def view(self) -> ClusterView:
        """Cluster as policies see it, with all GPUs free."""
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
    """Return the shape in which `gpus` GPUs are requested: the fewest nodes, with equally many GPUs on each.

    The number of GPUs is rounded up if needed, and limited to the whole cluster.
    """
    gpus = min(gpus, spec.gpus)
    nodes = -(-gpus // spec.gpus_per_node)
    return Shape(nodes, spec.gpus_per_node if spec.whole_nodes else -(-gpus // nodes))


def rounded(gpus: int, per_node: int) -> int:
    """Return `gpus`, rounded up so that the fewest possible nodes have equally many GPUs each."""
    nodes = -(-gpus // per_node)
    return -(-gpus // nodes) * nodes


Nodes = Mapping[str, int]
"""Number of GPUs on each node, by node name."""


class Slowdown(NamedTuple):
    """Factors on the compute time and on the exchange time of a job's steps."""

    compute: float = 1.0
    exchange: float = 1.0


NONE = Slowdown()


@dataclass(frozen=True)
class Network:
    """Network of leaf switches with equally many nodes each, in the order of the nodes.

    Jobs below one leaf switch exchange gradients at full speed. The exchange of a job across several leaf switches
    takes `taper` × n times as long. n is the number of such jobs on the most crowded link that it uses. Jobs share a
    link evenly (contention as in Wang et al., arXiv 2002.10105).
    """

    leaves: int
    nodes: int
    """Number of nodes below each leaf switch."""
    taper: float = 1.0
    """Bandwidth below a leaf switch, divided by the bandwidth of its uplink to the other leaf switches."""

    def __post_init__(self) -> None:
        if self.leaves < 1 or self.nodes < 1 or not self.taper >= 1:
            raise ValueError(f"network {self}: leaf switches, nodes below each and taper must be at least 1")

    def __str__(self) -> str:
        return f"{self.leaves}x{self.nodes}:{self.taper:g}"


def slow_speeds(names: Sequence[str], slow: Sequence[float]) -> dict[str, float]:
    """Return the relative speed of each slow node, by name. Slow nodes are spread evenly over `names`.

    Raises `BadInput` if there are more slow nodes than names.
    """
    if len(slow) > len(names):
        raise BadInput(f"{len(slow)} slow nodes are more than the cluster's {len(names)}")
    return {names[i * len(names) // len(slow)]: speed for i, speed in enumerate(slow)}


def slowdowns(cluster: ClusterView, placed: Sequence[Nodes]) -> list[Slowdown]:
    """Return the slowdown of each job, from the GPUs `placed` of all jobs. A job computes at the speed of its slowest
    node."""
    leaf = {node.name: node.leaf for node in cluster.nodes}
    speed = {node.name: node.speed for node in cluster.nodes}
    below = [{leaf[name] for name, gpus in nodes.items() if gpus and name in leaf} for nodes in placed]
    load = Counter(name for leaves in below if len(leaves) > 1 for name in leaves)
    found = []
    for nodes, leaves in zip(placed, below, strict=True):
        slowest = min((speed.get(name, 1.0) for name, gpus in nodes.items() if gpus), default=1.0)
        exchange = cluster.taper * max(load[name] for name in leaves) if len(leaves) > 1 else 1.0
        found.append(Slowdown(1.0 / slowest, exchange))
    return found

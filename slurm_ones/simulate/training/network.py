"""A network of leaf switches whose links to each other are tapered, and nodes that are slower than others.

The model: jobs that stay below one leaf switch exchange gradients at full speed. A job on several of them exchanges
`taper` times slower, and that many times slower again as there are jobs across leaf switches on the most used link of
its own: links are shared evenly (contention as in Wang et al., arXiv 2002.10105). Ranks wait for each other, so a job
computes as fast as its slowest node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurm_ones.policy.contract import ClusterView

Nodes = Mapping[str, int]
"""GPUs of each node."""


class Slowdown(NamedTuple):
    """How many times longer the parts of a job's step take."""

    compute: float = 1.0
    exchange: float = 1.0


NONE = Slowdown()


@dataclass(frozen=True)
class Network:
    """Leaf switches with equally many nodes each, in the nodes' order."""

    leaves: int
    nodes: int
    """Nodes below each leaf switch."""
    taper: float = 1.0
    """The bandwidth below a leaf switch over that of its link to the others."""

    def __post_init__(self) -> None:
        if self.leaves < 1 or self.nodes < 1 or not self.taper >= 1:
            raise ValueError(f"network {self}: leaf switches and nodes below each are at least 1, and so is the taper")

    def __str__(self) -> str:
        return f"{self.leaves}x{self.nodes}:{self.taper:g}"


def slow_speeds(names: Sequence[str], slow: Sequence[float]) -> dict[str, float]:
    """The speeds of the nodes that are slow: spread evenly over all of them. Raises ValueError where there are more."""
    if len(slow) > len(names):
        raise ValueError(f"{len(slow)} slow nodes are more than the cluster's {len(names)}")
    return {names[i * len(names) // len(slow)]: speed for i, speed in enumerate(slow)}


def wired(cluster: ClusterView, network: Network | None, slow: Sequence[float] = ()) -> ClusterView:
    """The cluster with its nodes below leaf switches, some of them `slow`. Raises ValueError where the network is of
    another number of nodes."""
    speeds = slow_speeds([node.name for node in cluster.nodes], slow)
    nodes = [replace(node, speed=speeds.get(node.name, node.speed)) for node in cluster.nodes]
    if network is None:
        return replace(cluster, nodes=tuple(nodes))
    if network.leaves * network.nodes != len(nodes):
        raise ValueError(f"network {network}: {network.leaves * network.nodes} nodes, and the cluster has {len(nodes)}")
    leaf = [f"leaf{i // network.nodes + 1}" for i in range(len(nodes))]
    below = tuple(replace(node, leaf=name) for node, name in zip(nodes, leaf, strict=True))
    return replace(cluster, nodes=below, taper=network.taper)


def slowdowns(cluster: ClusterView, placed: Sequence[Nodes]) -> list[Slowdown]:
    """How much slower each job is for where all of them are."""
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

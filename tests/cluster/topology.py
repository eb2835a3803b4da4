"""Leaf switches for a cluster that runs: n1 and n2 below one, n3 and n4 below another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .cluster import Cluster

TREE = """SwitchName=s1 Nodes=n[1-2]
SwitchName=s2 Nodes=n[3-4]
SwitchName=w Nodes=w[1-4]
SwitchName=top Switches=s[1-2],w
"""


@contextmanager
def leaf_switches(cluster: Cluster) -> Iterator[None]:
    """The cluster with them, as long as the block lasts. Slurm 22.05 would have to be started again."""
    etc = cluster.root / "etc/slurm"
    before = (etc / "slurm.conf").read_text()
    (etc / "topology.conf").write_text(TREE)
    (etc / "slurm.conf").write_text(before + "TopologyPlugin=topology/tree\n")
    try:
        cluster.run(["scontrol", "reconfigure"], user="root")
        yield
    finally:
        (etc / "slurm.conf").write_text(before)
        (etc / "topology.conf").unlink()
        cluster.run(["scontrol", "reconfigure"], user="root")

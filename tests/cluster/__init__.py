"""A real Slurm on one machine, for tests and for trying things out.

    with Cluster("gres") as cluster:
        cluster.run(["sbatch", "--wrap", "hostname"], user="alice")

or, from a shell at the top of the repository, `python -m tests.cluster --help`.

How it is put together, from below: `linux` (system calls) → `inside` and `keeper` (the processes
that are a running box) → `box` (a Debian root in namespaces of its own, and commands in it) →
`root` and `pyslurm_build` (what boxes are made of) → `cluster` (Slurm in a box) → `cli`.
"""

from . import host
from .cluster import Cluster
from .errors import ClusterError
from .sites import SITES, Partition, Site

__all__ = ["SITES", "Cluster", "ClusterError", "Partition", "Site", "unavailable"]


def unavailable() -> str | None:
    """Why no cluster can be started on this machine, for a test to skip with; None if one can."""
    try:
        host.check()
    except ClusterError as why:
        return str(why)
    return None

"""What leaf switches cost the search: sizes that need several are slower, and slower still where jobs meet on links.

The share of a step that is gradient exchange follows from a job's model: its step on several nodes, less that of one
GPU with the same local batch. Where a size needs more than one leaf switch, that share takes `taper` times longer. How
many jobs meet on a link is not known before they are placed; a candidate whose jobs across leaf switches use E ends of
links, of L leaf switches, has about E / L of them on each (`Contention`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from slurm_ones.schedule.policy import ClusterView, Floats, Ints
from slurm_ones.schedule.tables import SLOWEST, Tables, speeds_of_one


def exchange_shares(tables: Tables) -> Floats:
    """(J, U) part of a step that is gradient exchange, at sizes of several nodes; 0 at others."""
    several = tables.allowed & (tables.nodes > 1)
    columns = np.flatnonzero(several.any(axis=0))
    shares = np.zeros(tables.speed.shape)
    if not len(columns):
        return shares
    batch, gpus = tables.batch[:, columns], tables.sizes[columns]
    local = np.maximum(batch // gpus, 1)
    alone = local / speeds_of_one(tables.jobs, local)
    step = batch / np.maximum(tables.speed[:, columns], SLOWEST)
    shares[:, columns] = np.clip(1.0 - alone / np.maximum(step, 1e-12), 0.0, 1.0)
    return np.where(several, shares, 0.0)


def leaves_needed(cluster: ClusterView, sizes: Ints) -> Ints:
    """(U,) fewest leaf switches that so many GPUs are below."""
    below: Counter[str] = Counter()
    for node in cluster.nodes:
        below[node.leaf] += node.gpus
    most = np.cumsum(sorted(below.values(), reverse=True))
    found: Ints = np.searchsorted(most, sizes) + 1
    return np.minimum(found, len(most))


def slower_across(cluster: ClusterView, tables: Tables, shares: Floats) -> Tables:
    """The tables with speeds and goodputs as they are where a size needs several leaf switches, alone on the links."""
    far = leaves_needed(cluster, tables.sizes) > 1
    factor = np.where(far, 1.0 / (1.0 + shares * (cluster.taper - 1.0)), 1.0)
    return replace(tables, speed=tables.speed * factor, goodput=tables.goodput * factor)


@dataclass(frozen=True)
class Contention:
    """What jobs across leaf switches cost each other in a candidate."""

    ends: Floats
    """(U,) ends of links that a job of each size uses, over the leaf switches there are; 0 below one."""
    lost: Floats
    """(J, U) part of a job's worth that each further job on its links costs, as long as it is small."""

    @classmethod
    def of(cls, cluster: ClusterView, tables: Tables, shares: Floats) -> Contention:
        """Of this cluster's leaf switches."""
        needed = leaves_needed(cluster, tables.sizes)
        count = len({node.leaf for node in cluster.nodes})
        ends = np.where(needed > 1, needed / count, 0.0)
        more = shares * cluster.taper
        return cls(ends, np.where(needed > 1, more / (1.0 - shares + more), 0.0))

    def penalty(self, worth: Floats, candidates: Ints) -> Floats:
        """(K,) what meeting costs the jobs of each candidate (K, J), of the worth (J, U) of their sizes."""
        meets = np.maximum(self.ends[candidates].sum(axis=1) - 1.0, 0.0)
        if not meets.any():
            return np.zeros(len(candidates))
        rows = np.arange(candidates.shape[1])
        value = np.maximum(worth[rows, candidates], 0.0) * (self.ends[candidates] > 0)
        each = self.lost[rows, candidates] * meets[:, None]
        found: Floats = (value * each / (1.0 + each)).sum(axis=1)
        return found

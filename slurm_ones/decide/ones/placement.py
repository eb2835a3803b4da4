"""Whether candidates find room on the nodes, for a whole population at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_ones.schedule.policy import ClusterView, Floats, Ints, JobView
from slurm_ones.schedule.shapes import shape_of


class Nodes:
    """Nodes as counts by free GPUs: those of one kind are alike for what is not placed yet.

    Jobs that keep their size stay where they are; the others are placed by best fit, the largest first.
    """

    def __init__(self, cluster: ClusterView, jobs: Sequence[JobView], taken: Sequence[JobView], sizes: Ints) -> None:
        """`jobs` (J) may change, `taken` may not; `sizes` (U,) are those that candidates give."""
        index = {node.name: n for n, node in enumerate(cluster.nodes)}
        free = np.array([node.gpus for node in cluster.nodes], dtype=np.int64)
        for job in taken:
            for name, gpus in job.nodes.items():
                if name in index:
                    free[index[name]] -= gpus
        self._free = np.maximum(free, 0)
        held = [(j, index[name], gpus) for j, job in enumerate(jobs) for name, gpus in job.nodes.items()]
        self._held = np.array(held, dtype=np.int64).reshape(-1, 3)
        self._per_node = cluster.gpus_per_node
        shapes = [shape_of(cluster, int(n)) if n else None for n in sizes]
        self._takes = np.zeros((len(sizes), self._per_node + 1), dtype=np.int64)
        for u, shape in enumerate(shapes):
            if shape is not None and shape.gpus_per_node <= self._per_node:
                self._takes[u, shape.gpus_per_node] = shape.nodes
        self._uniform = cluster.uniform

    @property
    def gpus(self) -> int:
        """GPUs that the jobs which may change can share."""
        return int(self._free.sum())

    def unplaced(self, candidates: Ints, current: Ints) -> Floats:
        """(K,) GPUs of each candidate (K, J) that find no room beside the jobs which keep their `current` column."""
        if not self._uniform or not candidates.size:
            return np.zeros(len(candidates))
        stays = (candidates == current) & (current > 0)
        count, nodes = len(candidates), len(self._free)
        job, node, gpus = self._held.T
        flat = (np.arange(count)[:, None] * nodes + node).ravel()
        used = np.bincount(flat, weights=(stays[:, job] * gpus).ravel(), minlength=count * nodes)
        left = np.maximum(self._free - used.reshape(count, nodes).astype(np.int64), 0)
        kinds = self._per_node + 1
        room = np.bincount((np.arange(count)[:, None] * kinds + left).ravel(), minlength=count * kinds)
        room = room.reshape(count, kinds)
        columns = len(self._takes)
        moving = (np.arange(count)[:, None] * columns + np.where(stays, 0, candidates)).ravel()
        wanted = np.bincount(moving, minlength=count * columns).reshape(count, columns) @ self._takes
        missing, every = np.zeros(count), np.arange(count)
        for each in range(self._per_node, 0, -1):
            shapes = wanted[:, each]
            for kind in range(each, kinds):
                most = kind // each
                taken = np.minimum(shapes, room[:, kind] * most)
                full, rest = np.divmod(taken, most)
                room[:, kind] -= full + (rest > 0)
                room[:, kind - most * each] += full
                room[every, kind - rest * each] += rest > 0
                shapes = shapes - taken
            missing += shapes * each
        return missing

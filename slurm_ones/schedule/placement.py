"""Room on the nodes for shapes that are to be placed: which jobs fit beside those that stay where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slurm_ones.schedule.policy import ClusterView, JobView
from slurm_ones.schedule.shapes import shape_of
from slurm_ones.slurm.model import Shape


class Room:
    """How many nodes have how many free GPUs. Nodes are alike for what is not placed yet, so counting is enough.

    Every operation costs as many steps as a node has GPUs, whatever the number of nodes.
    """

    def __init__(self, cluster: ClusterView, staying: Iterable[JobView] = ()) -> None:
        """All that the cluster offers but for the GPUs that `staying` jobs hold on their nodes."""
        free = {node.name: node.gpus for node in cluster.nodes}
        for job in staying:
            for name, gpus in job.nodes.items():
                if name in free:
                    free[name] -= gpus
        self._per_node = cluster.gpus_per_node
        self._uniform = cluster.uniform
        self._nodes = [0] * (self._per_node + 1)
        for gpus in free.values():
            self._nodes[max(gpus, 0)] += 1
        self.gpus = sum(max(gpus, 0) for gpus in free.values())
        """Free GPUs in all."""

    def copy(self) -> Room:
        """A second one to try things on."""
        other = object.__new__(Room)
        other._per_node, other._uniform, other.gpus = self._per_node, self._uniform, self.gpus
        other._nodes = list(self._nodes)
        return other

    def fits(self, shape: Shape) -> bool:
        """Whether `take` would find room."""
        if not self._uniform:
            return shape.gpus <= self.gpus
        return sum(self._nodes[shape.gpus_per_node :]) >= shape.nodes

    def take(self, shape: Shape) -> bool:
        """Take room for the shape where least is left over; False, with nothing changed, where there is none."""
        if not self.fits(shape):
            return False
        self.gpus -= shape.gpus
        if not self._uniform:
            return True
        left = shape.nodes
        for gpus in range(shape.gpus_per_node, self._per_node + 1):
            taken = min(left, self._nodes[gpus])
            self._nodes[gpus] -= taken
            self._nodes[gpus - shape.gpus_per_node] += taken
            left -= taken
        return True


def settle(
    cluster: ClusterView, jobs: Sequence[JobView], wanted: Mapping[int, int], *, shrink: bool = True
) -> dict[int, Shape]:
    """Shapes for the GPU counts that a policy wants, made placeable; `jobs` in order of precedence.

    Jobs that want what they have stay where they are, fixed ones too. Of the others, in order, each gets what it wants
    or else, with `shrink`, the largest of its sizes below that finds room. A job that finds none is left out.
    """
    by_id = {job.job_id: job for job in jobs}
    staying = [
        job for job in jobs if job.shape is not None and (job.fixed or wanted.get(job.job_id, 0) == job.shape.gpus)
    ]
    room = Room(cluster, staying)
    found = {job.job_id: job.shape for job in staying if job.shape is not None}
    moving = [job for job in jobs if job.job_id not in found and not job.fixed and wanted.get(job.job_id, 0) > 0]
    admitted: list[tuple[int, int]] = []
    budget = room.gpus
    for job in moving:
        gpus = wanted[job.job_id]
        if gpus <= budget:
            admitted.append((job.job_id, gpus))
            budget -= gpus
    # Large shapes first: small ones fill what they leave.
    for job_id, gpus in sorted(admitted, key=lambda pair: -pair[1]):
        sizes = [gpus]
        if shrink:
            held = by_id[job_id].shape  # its own GPUs were not kept for it: at its old size it would not move
            old = held.gpus if held is not None else 0
            sizes += [n for n in sorted(by_id[job_id].limits.gpus, reverse=True) if n < gpus and n != old]
        for size in sizes:
            shape = shape_of(cluster, size)
            if shape is not None and room.take(shape):
                found[job_id] = shape
                break
    return found

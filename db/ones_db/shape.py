"""The shape of a job: nodes × GPUs per node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Shape:
    """Nodes × GPUs per node of one job. The job has the same number of GPUs on each node."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Number of GPUs. It is the world size too, since each GPU has one rank."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape in a text such as 2x4, which `str` gives. Raises ValueError."""
        nodes, _, gpus = text.partition("x")
        return cls(int(nodes), int(gpus))


PARKED = Shape(0, 0)
"""Shape of a job that a resize stops: no GPUs. The job then waits in the queue, where Slurm keeps its old shape."""

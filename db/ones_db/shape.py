"""The shape of a job: nodes × GPUs per node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Shape:
    """Nodes × GPUs per node of one job; every node gives the job the same number of GPUs."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Number of GPUs, which is the world size: one rank a GPU."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape that `str` gave as this text, such as 2x4; raises ValueError."""
        nodes, _, gpus = text.partition("x")
        return cls(int(nodes), int(gpus))


PARKED = Shape(0, 0)
"""Target of a resize to zero GPUs, which parks the job: the job waits in the queue. Slurm keeps the job's old shape."""

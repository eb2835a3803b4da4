"""The shape of a job: nodes × GPUs per node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Shape:
    """Nodes × GPUs per node of one job; every node of it gives the same number of GPUs."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """World size: one rank a GPU."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The inverse of `str`; raises ValueError."""
        nodes, _, gpus = text.partition("x")
        return cls(int(nodes), int(gpus))


PARKED = Shape(0, 0)
"""Shape of a job that is resized to zero GPUs: it waits, at the shape that Slurm has of it."""

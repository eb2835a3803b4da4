"""Limits of a fused training for the companion: any number of GPUs, with memory and traffic of all members."""

from __future__ import annotations

from dataclasses import dataclass

from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits, rows_within
from ones_wrapper.strategy import Strategy

COPIES = 4
"""Copies of each parameter in memory: parameter, gradient and two moments."""


@dataclass(frozen=True)
class Fused(Strategy):
    """B members in one job, in data parallel: each GPU is a replica, and trains all members on its local batch. Raises
    ValueError for invalid numbers."""

    members: int
    parameter_bytes: int = 0
    """Bytes of one member's parameters; 0 if unknown."""
    sample_bytes: int = 0
    """Bytes of one member's activations for each sample of a GPU's local batch; 0 if unknown."""

    name = "fused"

    def __post_init__(self) -> None:
        if self.members < 1 or self.parameter_bytes < 0 or self.sample_bytes < 0:
            raise ValueError(
                f"fused: members={self.members}, parameter_bytes={self.parameter_bytes}, sample_bytes="
                f"{self.sample_bytes}: give 1 member or more, and no negative bytes"
            )

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        """Return a row for each number of GPUs if bytes are known; else no row, which allows any number."""
        if not (self.parameter_bytes or self.sample_bytes):
            return StrategyLimits(self.name)
        return StrategyLimits(self.name, rows_within(map(self._row, range(1, most_gpus + 1)), any_number=True))

    def _row(self, gpus: int) -> SizeLimits:
        weights = self.members * self.parameter_bytes
        return SizeLimits(
            gpus,
            gpus,
            fixed_bytes=COPIES * weights,
            sample_bytes=self.members * self.sample_bytes,
            data_bytes=2 * (gpus - 1) * weights // gpus,
        )

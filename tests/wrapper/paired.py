"""The smallest strategy with replicas: two ranks share a local batch, each computes half of its loss."""

from __future__ import annotations

from ones_wrapper.group import Group
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from ones_wrapper.strategy import Strategy


class Paired(Strategy):
    """One rank alone, or replicas of two. `quantum` is what each replica's share is a multiple of."""

    name = "paired"
    losses_add_up = True

    def __init__(self, quantum: int = 1, sample_bytes: int = 0) -> None:
        self.quantum, self.sample_bytes = quantum, sample_bytes
        self.half, self.halves = 0, 1
        """Which part of a local batch is this rank's, of how many."""

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        sizes = (1, *range(2, min(most_gpus, 64) + 1, 2))
        return StrategyLimits(self.name, tuple(self._row(gpus) for gpus in sizes), carries=("nothing more",))

    def _row(self, gpus: int) -> SizeLimits:
        replicas = self.replicas(gpus)
        each = gpus // replicas
        return SizeLimits(gpus, replicas, self.quantum * replicas, each, sample_bytes=self.sample_bytes // each)

    def replicas(self, world: int) -> int:
        if world > 1 and world % 2:
            raise self.refuse(world, [1, *range(2, world + 2, 2)])
        return max(1, world // 2)

    def bind(self, group: Group) -> None:
        self.halves = min(2, group.world)
        self.half = group.rank % self.halves

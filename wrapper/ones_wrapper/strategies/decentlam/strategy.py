"""DecentLaM: ranks train models of their own and mix them with their neighbours'.

    job = ones.init(batch=32, ..., strategy=ones.strategies.DecentLam(topology="ring"))

`job.ddp` then brings the exchange. What the job evaluates, saves and publishes is the mean. The gradient noise scale is
not measured: it compares gradients of several ranks at one and the same point.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ones_wrapper.gradients.apart import check_group, trained_bytes
from ones_wrapper.group import Group
from ones_wrapper.protocol.limits import Limits, SizeLimits, rows_within
from ones_wrapper.strategies.decentlam.exchange import DecentLamExchange
from ones_wrapper.strategies.decentlam.topologies import Topology, check_name, degree, mixing, neighbours
from ones_wrapper.strategy import Strategy

if TYPE_CHECKING:
    import torch

    from ones_wrapper.gradients.noise import NoiseScale
    from ones_wrapper.protocol import Spec


@dataclass
class DecentLam(Strategy):
    """DecentLaM. Each step a rank exchanges its parameters only with its neighbours.

    `topology` is ring, grid, exponential or complete, or a function that gives the weights W [ranks, ranks] for a
    number of ranks: symmetric, doubly stochastic and connected. The optimizer is `torch.optim.SGD` with `momentum`.
    Raises ValueError for a topology that is directed or varies, with the momentum up to which it would be stable.
    """

    topology: Topology = "ring"
    momentum: float = 0.9
    model_bytes: int = field(default=0, init=False)
    """Bytes of what is trained, once `job.ddp` was given it."""

    name = "decentlam"
    hot = True
    measures_noise = False

    def __post_init__(self) -> None:
        if isinstance(self.topology, str):
            check_name(self.topology)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"decentlam: momentum={self.momentum} must be from 0 to less than 1; 0.9 is the default")

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> Limits:
        degrees = {n: self._degree(n) for n in range(1, most_gpus + 1)} if self._given or self.model_bytes else {}
        sizes = (SizeLimits(n, n, data_bytes=d * self.model_bytes) for n, d in degrees.items() if d is not None)
        return Limits(
            self.name,
            rows_within(sizes, any_number=not self._given),
            exact=False,
            carries=("the mean over the ranks of parameters, buffers and momentum",),
            resets=("the ranks' distance from their mean",),
            min_steps=round(1 / (1 - self.momentum)),
        )

    def replicas(self, world: int) -> int:
        if self._given:
            mixing(self.topology, world)
        return world

    @property
    def _given(self) -> bool:
        """True if the topology is a function of the script's, which may fit only some numbers of ranks."""
        return not isinstance(self.topology, str)

    def _degree(self, world: int) -> int | None:
        """Messages that a rank sends in a step, at most; None if the topology does not fit."""
        if isinstance(self.topology, str):
            return degree(self.topology, world)
        try:
            weights = mixing(self.topology, world)
        except ValueError:
            return None
        return max(len(neighbours(weights, rank)) for rank in range(world))

    def wrapped(self, model: torch.nn.Module) -> None:
        self.model_bytes += trained_bytes(model)

    def exchange(self, group: Group, noise: NoiseScale | None) -> DecentLamExchange:
        check_group(self.name, group)
        return DecentLamExchange(group, topology=self.topology, momentum=self.momentum)

"""Strategies whose ranks train models of their own and keep together by messages: leader SGD and DecentLaM.

    job = ones.init(batch=32, ..., strategy=ones.Lsgd(period=16))
    job = ones.init(batch=32, ..., strategy=ones.DecentLam(topology="ring"))

`job.ddp` then brings the exchange. What the job evaluates, saves and publishes is the leader, or the mean. The gradient
noise scale is not measured: it compares gradients of several ranks at one and the same point.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ones_wrapper.gradients.decentlam import DecentLamExchange
from ones_wrapper.gradients.lsgd import LsgdExchange, options_checked
from ones_wrapper.gradients.topologies import Topology, check_name, degree, mixing, neighbours
from ones_wrapper.group import Group, TorchGroup
from ones_wrapper.limits import Limits, SizeLimits, rows_within
from ones_wrapper.strategy import Strategy

if TYPE_CHECKING:
    import torch

    from ones_wrapper.gradients.noise import NoiseScale
    from ones_wrapper.protocol import Spec


@dataclass
class Lsgd(Strategy):
    """Leader SGD. Each rank trains by itself; every `period` steps all are pulled to the one with the lowest loss.

    On several nodes of several ranks each, the ranks of a node are pulled to the best of them every `local_period`
    steps (default: a quarter of `period`), which sends nothing between nodes. `pull` is how far a round moves a rank
    towards a leader, and how far the steps up to the next one do. The script calls `job.loss(loss)` after each
    backward: leaders are chosen by it. The learning rate belongs to the local batch. Raises ValueError for numbers
    that cannot be.
    """

    period: int = 16
    local_period: int | None = None
    pull: float = 0.1
    model_bytes: int = field(default=0, init=False)
    """Of what is trained, once `job.ddp` was given it."""

    name = "lsgd"
    hot = True
    measures_noise = False
    local_rate = True

    def __post_init__(self) -> None:
        self._options = options_checked(self.period, self.local_period, self.pull)

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> Limits:
        sizes = (SizeLimits(n, n, data_bytes=self._sent(n, ranks_per_node)) for n in range(1, most_gpus + 1))
        return Limits(
            self.name,
            rows_within(sizes, any_number=True) if self.model_bytes else (),
            exact=False,
            carries=("the leader's parameters, buffers and optimizer state",),
            resets=("the other ranks' parameters", "cached leaders and the steps to the next round"),
            min_steps=self.period,
        )

    def _sent(self, ranks: int, per_node: int) -> int:
        """Bytes a step that a rank sends, in the mean over ranks and steps: the leader's tree has N − 1 messages."""
        local = self._options["local_period"]
        messages = ranks - 1
        if 1 < per_node < ranks and local < self.period:
            messages += (ranks - -(-ranks // per_node)) * (self.period // local)
        return messages * self.model_bytes // (ranks * self.period)

    def wrapped(self, model: torch.nn.Module) -> None:
        self.model_bytes += trained_bytes(model)

    def exchange(self, group: Group, noise: NoiseScale | None) -> LsgdExchange:
        check_group(self.name, group)
        return LsgdExchange(group, **self._options)


@dataclass
class DecentLam(Strategy):
    """DecentLaM. Each step a rank exchanges its parameters with its neighbours alone.

    `topology` is ring, grid, exponential or complete, or a function that gives the weights W [ranks, ranks] for a
    number of ranks: symmetric, doubly stochastic and connected. The optimizer is `torch.optim.SGD` with `momentum`.
    Raises ValueError for a topology that is directed or varies, with the momentum up to which it would be stable.
    """

    topology: Topology = "ring"
    momentum: float = 0.9
    model_bytes: int = field(default=0, init=False)
    """Of what is trained, once `job.ddp` was given it."""

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
        """Whether the topology is a function of the script's, which may fit some numbers of ranks alone."""
        return not isinstance(self.topology, str)

    def _degree(self, world: int) -> int | None:
        """Messages that a rank sends in a step, at most; None where the topology does not fit."""
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


def trained_bytes(model: torch.nn.Module) -> int:
    """Of the parameters that are trained: what one message of all of them holds."""
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def check_group(name: str, group: Group) -> None:
    """Raises ValueError for ranks that these exchanges cannot reach."""
    if not isinstance(group, TorchGroup):
        raise ValueError(f"{name}: its messages go over torch.distributed; leave out backend='mpi'")

"""DecentLaM (Yuan et al. 2021, arXiv 2104.11981): momentum SGD in which ranks average only with neighbours.

    job = ones.init(batch=32, ..., strategy=ones.strategies.DecentLam(topology="ring"))

`job.ddp` then returns a model with this exchange. The job evaluates and saves the mean over the ranks.

In each step rank i sends y_i = x_i − γ g_i to its neighbours in a fixed graph, and makes a momentum step on

    g̃_i = (x_i − Σ_j w_ij y_j) / γ,    m_i ← β m_i + g̃_i,    x_i ← x_i − γ m_i.

This is heavy ball on the step of decentralised SGD, and so converges to the same point as without momentum. The plain
way (DmSGD: m_i ← β m_i + g_i, x ← W (x − γ m)) converges as decentralised SGD with the step γ/(1 − β). If data differs
between ranks, that point's squared distance from the optimum is about 1/(1 − β)² times as large.

The momentum is that of `torch.optim.SGD`, which gets g̃ as its gradient. Since 1ᵀ(I − W) = 0, the means over the ranks
obey m̄ ← β m̄ + ḡ and x̄ ← x̄ − γ m̄: plain momentum SGD. So a resize keeps (x̄, m̄), and the job evaluates and saves
x̄. Rank i's gradient is weighted by n_i N / n (its samples × ranks / all samples). So ḡ is the mean over all samples
even if ranks differ by one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ones_wrapper.gradients.apart import ApartExchange
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group, check_torch
from ones_wrapper.group.flat import flattened, together, unflatten
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits, rows_within
from ones_wrapper.strategies.decentlam.topologies import Topology, check_name, degree, mixing, neighbours
from ones_wrapper.strategy import ApartStrategy

if TYPE_CHECKING:
    from ones_wrapper.protocol import Spec


class DecentLamExchange(ApartExchange):
    """The exchange of DecentLaM. It turns gradients into g̃ just before the optimizer's step. For each bucket a rank
    sends one message to each neighbour, and receives one."""

    name = "decentlam"

    def __init__(self, group: Group, topology: Topology, momentum: float) -> None:
        """`topology` is a name or a function, as in `DecentLam`."""
        super().__init__(group)
        self._topology, self._momentum = topology, momentum
        self._find_neighbours()

    def _find_neighbours(self) -> None:
        weights = mixing(self._topology, self._group.world)
        self._own = float(weights[self._group.rank, self._group.rank])
        self._neighbours = neighbours(weights, self._group.rank)

    def _check(self, model: torch.nn.Module) -> None:
        super()._check(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                raise ValueError(
                    f"decentlam: parameter {name} is {parameter.dtype}, in which differences between neighbours are "
                    "lost; keep parameters in float32, and use torch.autocast"
                )

    def trained_by(self, optimizers: Sequence[torch.optim.Optimizer], scaled: bool = False) -> None:
        super().trained_by(optimizers)
        if scaled:
            raise ValueError(
                "decentlam: a gradient scaler lets a single rank leave out a step, and its neighbours wait for "
                "it. Train in bfloat16 by torch.autocast, which needs none"
            )
        wanted = f"torch.optim.SGD(model.parameters(), lr=..., momentum={self._momentum})"
        if len(optimizers) != 1:
            raise ValueError(f"decentlam: {len(optimizers)} optimizers train the model; give it one, {wanted}")
        (optimizer,) = optimizers
        if not isinstance(optimizer, torch.optim.SGD):
            raise ValueError(
                f"decentlam: it is a momentum SGD, and the optimizer is a {type(optimizer).__name__}; take {wanted}"
            )
        for group in optimizer.param_groups:
            needed = {"momentum": self._momentum, "dampening": 0, "nesterov": False, "maximize": False}
            for key, value in needed.items():
                if group[key] != value:
                    raise ValueError(f"decentlam: the optimizer has {key}={group[key]}; take {wanted}")

    def ranks_changed(self) -> None:
        super().ranks_changed()
        self._find_neighbours()

    def _publish(self, tensors: list[torch.Tensor]) -> None:
        self._mean(tensors)

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        part, world = self._part, self._group.world
        if part is None or not part.last or world == 1:
            return
        weight = part.share.samples * world / part.share.total
        for group, some in self._buckets():
            for parameter in some:
                if parameter.grad is None:  # no sample of this rank used it, but neighbours' samples may have
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in some if parameter.grad is not None]
            torch._foreach_mul_(gradients, weight)
            rate = float(group["lr"])
            if rate:
                self._correct(some, gradients, rate, float(group["weight_decay"]))

    def _correct(
        self, parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor], rate: float, decay: float
    ) -> None:
        """Turn gradients g into g̃, in place. The exchanged values include weight decay. It is removed from g̃, since
        the optimizer adds it."""
        at, gradient = flattened(parameters), flattened(gradients)
        gradient.add_(at, alpha=decay)
        sent = at.add(gradient, alpha=-rate)
        # Differences first: the difference of close numbers is exact.
        found = gradient.mul_(rate * self._own)
        for weight, theirs in self._exchanged(sent):
            found.add_(at - theirs, alpha=weight)
        found.div_(rate).sub_(at, alpha=decay)
        unflatten(found, gradients)

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list[torch.nn.Parameter]]]:
        """Yield the trained parameters in buckets, each with its parameter group, in the same order on all ranks."""
        trained = set(self._trained())
        for group in self._optimizers[0].param_groups:
            for some in together([p for p in group["params"] if p in trained], self._bucket):
                yield group, some

    def _exchanged(self, mine: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
        """Exchange a vector with all neighbours; return (weight in this rank's average, vector) of each neighbour."""
        received = [(other, weight, torch.empty_like(mine)) for other, weight in self._neighbours]
        operations = [dist.P2POp(dist.isend, mine, other) for other, _, _ in received]
        operations += [dist.P2POp(dist.irecv, theirs, other) for other, _, theirs in received]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [(weight, theirs) for _, weight, theirs in received]


@dataclass
class DecentLam(ApartStrategy):
    """DecentLaM: in each step a rank exchanges its parameters only with its neighbours.

    `topology` is `ring`, `grid`, `exponential`, `complete`, or a function from a number of ranks to the weights W
    [ranks, ranks]. W must be symmetric, doubly stochastic and connected. The optimizer must be `torch.optim.SGD` with
    this `momentum`. Raises ValueError for a topology that is directed or changes from step to step. The message names
    the largest momentum with which training would be stable.
    """

    topology: Topology = "ring"
    momentum: float = 0.9

    name = "decentlam"

    def __post_init__(self) -> None:
        if isinstance(self.topology, str):
            check_name(self.topology)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"decentlam: momentum={self.momentum} must be from 0 to less than 1; 0.9 is the default")

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        degrees = {n: self._degree(n) for n in range(1, most_gpus + 1)} if self._given or self.model_bytes else {}
        sizes = (SizeLimits(n, n, data_bytes=d * self.model_bytes) for n, d in degrees.items() if d is not None)
        return StrategyLimits(
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
        return not isinstance(self.topology, str)

    def _degree(self, world: int) -> int | None:
        """Return the largest number of messages that a rank sends in a step; None if the topology cannot have this
        number of ranks."""
        if isinstance(self.topology, str):
            return degree(self.topology, world)
        try:
            weights = mixing(self.topology, world)
        except ValueError:
            return None
        return max(len(neighbours(weights, rank)) for rank in range(world))

    def exchange(self, group: Group, noise: NoiseScale | None) -> DecentLamExchange:
        check_torch(self.name, group)
        return DecentLamExchange(group, self.topology, self.momentum)

"""DecentLaM (Yuan et al. 2021, arXiv 2104.11981): momentum SGD without a centre, by averaging with neighbours.

Each step rank i sends y_i = x_i − γ g_i to its neighbours in a fixed graph, and steps with momentum on

    g̃_i = (x_i − Σ_j w_ij y_j) / γ,    m_i ← β m_i + g̃_i,    x_i ← x_i − γ m_i,

which is heavy ball on what decentralised SGD without momentum would do, and so ends where that ends. The plain way
(DmSGD: m_i ← β m_i + g_i, x ← W (x − γ m)) ends where decentralised SGD with the step γ/(1 − β) does: with
data that differs between ranks its squared distance from the optimum is about 1/(1 − β)² as large.

The momentum is the optimizer's own (`torch.optim.SGD`), which is given g̃ as gradient. Since 1ᵀ(I − W) = 0, the means
over the ranks obey m̄ ← β m̄ + ḡ and x̄ ← x̄ − γ m̄: plain momentum SGD. So (x̄, m̄) is what a resize carries, and what is
evaluated and saved is x̄. Local gradients are weighed with n_i N / n, so that ḡ is the mean over all samples though
ranks may differ by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ones_wrapper.gradients.apart import ApartExchange, flattened, pieces, together, unflatten
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group
from ones_wrapper.strategies.decentlam.topologies import Topology, mixing, neighbours


class DecentLamExchange(ApartExchange):
    """Gradients become g̃ as the optimizer's step begins: one message to each neighbour and back, for each bucket."""

    name = "decentlam"

    def __init__(
        self,
        group: Group,
        noise: NoiseScale | None = None,
        *,
        topology: Topology = "ring",
        momentum: float = 0.9,
        corrected: bool = True,
    ) -> None:
        """`topology` as in `topologies.mixing`; without `corrected` it is DmSGD, to compare with."""
        super().__init__(group, noise)
        self._topology, self._momentum, self._corrected = topology, momentum, corrected
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
                if parameter.grad is None:  # no sample of this rank used it, and its neighbours' may have
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in some if parameter.grad is not None]
            torch._foreach_mul_(gradients, weight)
            rate = float(group["lr"])
            if self._corrected and rate:
                self._correct(some, gradients, rate, float(group["weight_decay"]))

    def _correct(
        self, parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor], rate: float, decay: float
    ) -> None:
        """Correct g to g̃, without the decay, which the optimizer adds."""
        at, gradient = flattened(parameters), flattened(gradients)
        gradient.add_(at, alpha=decay)
        sent = at.add(gradient, alpha=-rate)
        # Differences first: those of numbers that are close are exact.
        found = gradient.mul_(rate * self._own)
        for weight, theirs in self._exchanged(sent):
            found.add_(at - theirs, alpha=weight)
        found.div_(rate).sub_(at, alpha=decay)
        unflatten(found, gradients)

    @torch.no_grad()
    def _step_made(self) -> None:
        if self._corrected:
            return
        for _, some in self._buckets():
            mine = flattened(some)
            mixed = self._own * mine
            for weight, theirs in self._exchanged(mine):
                mixed.add_(theirs, alpha=weight)
            for parameter, piece in zip(some, pieces(mixed, some), strict=True):
                parameter.copy_(piece)

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list[torch.nn.Parameter]]]:
        """The trained parameters, in the same buckets on all ranks, each of one parameter group."""
        trained = set(self._trained())
        for group in self._optimizers[0].param_groups:
            for some in together([p for p in group["params"] if p in trained], self._bucket):
                yield group, some  # type: ignore[misc]  # they are parameters as they came

    def _exchanged(self, mine: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
        """Each neighbour's vector and the weight that it gets here."""
        received = [(other, weight, torch.empty_like(mine)) for other, weight in self._neighbours]
        operations = [dist.P2POp(dist.isend, mine, other) for other, _, _ in received]
        operations += [dist.P2POp(dist.irecv, theirs, other) for other, _, theirs in received]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [(weight, theirs) for _, weight, theirs in received]

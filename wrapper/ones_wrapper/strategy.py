"""Strategies: ways to train other than plain data parallel. A script chooses one at `init`.

    job = ones.init(batch=64, ..., strategy=Ring(length=4096, causal=True))

The script then uses the strategy through this object. This module imports no torch at its top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from ones_wrapper.protocol.limits import StrategyLimits, refusal

if TYPE_CHECKING:
    import torch

    from ones_wrapper.gradients.exchange import Exchange
    from ones_wrapper.gradients.noise import NoiseScale
    from ones_wrapper.group import Group
    from ones_wrapper.protocol import Spec


class Strategy(ABC):
    """One way to train. A replica is the consecutive ranks that share a local batch; all replicas have equally many.

    All ranks of a replica get the same samples from `job.loader` and `job.evaluate`. `job.ddp` sums gradients over all
    ranks, each weighed with its replica's share of the step's samples. So the losses of a replica's ranks must be parts
    that add up to the mean over its local batch. Else the strategy needs an exchange of its own.
    """

    name: str
    """Short name of the strategy, for reasons and logs."""

    hot = False
    """True if ranks may change while it trains: `bind` is then called again, with the new ranks. In that call `bind`
    must not wait for other ranks, since a lost rank never comes."""

    losses_add_up = False
    """True if the local losses of a replica's ranks add up to the replica's loss; False if each is the whole loss."""

    same_numbers = False
    """True if the generators of a replica's ranks are seeded alike before each step."""

    measures_noise = True
    """True if the gradient noise scale can be measured when each rank is a replica."""

    local_rate = False
    """True if the learning rate belongs to a replica's local batch. Then `init(batch=...)` is a local batch, too."""

    @abstractmethod
    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        """Return the sizes that the strategy can use, up to `most_gpus` GPUs, `ranks_per_node` a node. All ranks return
        the same.

        `init` calls this, and the run calls this again when training begins and models are known (`wrapped`).
        `StrategyLimits.memory_bytes` may be left 0: `init` sets it to the device's. Raises ValueError, with sizes that
        would fit, for a strategy that can use none.
        """

    def replicas(self, world: int) -> int:
        """Return the number of replicas over which the samples of a step are split. Raises ValueError for a world size
        that the strategy cannot use, with sizes that would fit (`refuse`)."""
        return world

    def refuse(self, world: int, fitting: list[int]) -> ValueError:
        """Return the error to raise for an unusable world size; `fitting` are some usable sizes, ascending."""
        return ValueError(refusal(self.name, world, fitting))

    def bind(self, group: Group) -> None:  # noqa: B027, since many need no process groups
        """Make process groups: the ranks are known. Collective; `init` calls it before the model is made."""

    def batch_fixed(self) -> bool:
        """Return True if the global batch must not change now. Called at step boundaries, with one answer on all ranks.
        Not collective."""
        return False

    def limits_now(self, limits: StrategyLimits) -> StrategyLimits:
        """Return `limits` as they are at this step boundary; the same object if nothing changed. Not collective."""
        fixed = self.batch_fixed()
        return limits if fixed == limits.batch_fixed else replace(limits, batch_fixed=fixed)

    def batch_in_force(self, batch: int) -> str:
        """Begin steps of this global batch, or go on with them; return a note for people, empty for none. Collective.
        Raises RuntimeError if the script left out something that the strategy needs."""
        return ""

    def exchange(self, group: Group, noise: NoiseScale | None) -> Exchange | None:
        """Return the gradient exchange that `job.ddp` uses for a model; None for torch's DistributedDataParallel."""
        return None

    def wrapped(self, model: torch.nn.Module) -> None:  # noqa: B027
        """Note a model that `job.ddp` returned. Not collective."""


class ApartStrategy(Strategy):
    """A strategy whose ranks train models of their own (`gradients.apart`)."""

    hot = True
    measures_noise = False
    model_bytes = 0
    """Bytes of the trained parameters, once `job.ddp` was given the model."""

    def wrapped(self, model: torch.nn.Module) -> None:
        self.model_bytes += sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)

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
    """A way to train other than plain data parallel. A replica is a group of consecutive ranks that share a local
    batch; all replicas have equally many ranks.

    All ranks of a replica get the same samples from `job.loader` and `job.evaluate`. `job.ddp` sums gradients over all
    ranks, each multiplied by the fraction of the step's samples that its replica has. So the losses of a replica's
    ranks must add up to the mean over the local batch. A strategy with other losses needs a gradient exchange of its
    own (`exchange`).
    """

    name: str
    """Short name of the strategy in reasons and logs."""

    hot = False
    """True if the job's ranks may change during training. `bind` is then called again with the new ranks, and must not
    wait for other ranks, since a rank may have been lost."""

    losses_add_up = False
    """True if the losses of a replica's ranks add up to the replica's loss; False if each rank has the whole loss."""

    same_numbers = False
    """True if all ranks of a replica draw the same random numbers in a step."""

    measures_noise = True
    """True if the gradient noise scale can be measured with this strategy, provided that each rank is a replica."""

    local_rate = False
    """True if the script's learning rate is for one replica's batch; then `init(batch=...)` is for one replica, too."""

    @abstractmethod
    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        """Return the limits at each world size that the strategy can use, up to `most_gpus`, on nodes of
        `ranks_per_node` ranks. The result must be equal on all ranks.

        Called by `init`, and again when training begins, after `wrapped` was called with the models.
        `StrategyLimits.memory_bytes` may be left 0: `init` then sets it to the device's memory. Raises ValueError, with
        sizes that would fit, if no size can be used.
        """

    def replicas(self, world: int) -> int:
        """Return the number of replicas over which the samples of a step are split. Raises ValueError (by `refuse`,
        with sizes that would fit) for a world size that the strategy cannot use."""
        return world

    def refuse(self, world: int, fitting: list[int]) -> ValueError:
        """Return the error for a world size that the strategy cannot use. `fitting` are some usable world sizes,
        ascending."""
        return ValueError(refusal(self.name, world, fitting))

    def bind(self, group: Group) -> None:  # noqa: B027, since many need no process groups
        """Make the process groups of the strategy, once the ranks are known. Collective; `init` calls it before the
        model is made."""

    def batch_fixed(self) -> bool:
        """Return True if the global batch must not change now; equal on all ranks. Called at step boundaries. Not
        collective."""
        return False

    def limits_now(self, limits: StrategyLimits) -> StrategyLimits:
        """Return the `limits` for the steps from now on; the same object if nothing changed. Not collective."""
        fixed = self.batch_fixed()
        return limits if fixed == limits.batch_fixed else replace(limits, batch_fixed=fixed)

    def batch_in_force(self, batch: int) -> str:
        """Begin or continue with steps of this global batch; return a note for the log, or ''. Collective. Raises
        RuntimeError if the script left out a call that the strategy needs."""
        return ""

    def exchange(self, group: Group, noise: NoiseScale | None) -> Exchange | None:
        """Return the gradient exchange that `job.ddp` uses for a model; None for torch's DistributedDataParallel."""
        return None

    def wrapped(self, model: torch.nn.Module) -> None:  # noqa: B027
        """Record a model that `job.ddp` returned. Not collective."""


class ApartStrategy(Strategy):
    """A strategy whose ranks train different models (`gradients.apart`)."""

    hot = True
    measures_noise = False
    model_bytes = 0
    """Bytes of the trained parameters; 0 before `job.ddp` gets the model."""

    def wrapped(self, model: torch.nn.Module) -> None:
        self.model_bytes += sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)

"""How a job trains, where that is not plain data parallel: a script chooses one strategy, at `init`.

    job = ones.init(batch=64, ..., strategy=Ring(length=4096, causal=True))

The object is then the script's door to what the strategy does. This module imports no torch at its top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from ones_wrapper.protocol.limits import Limits, refusal

if TYPE_CHECKING:
    import torch

    from ones_wrapper.gradients.exchange import Exchange
    from ones_wrapper.gradients.noise import NoiseScale
    from ones_wrapper.group import Group
    from ones_wrapper.protocol import Spec


class Strategy(ABC):
    """One way to train. A replica is the ranks that share a local batch: consecutive ones, equally many in each.

    All ranks of a replica get the same samples from `job.loader` and `job.evaluate`. `job.ddp` sums gradients over all
    ranks, each weighed with its replica's share of the step's samples: so the losses of a replica's ranks must be parts
    that add up to the mean over its local batch, or the strategy brings an exchange of its own.
    """

    name: str
    """Short, for reasons and logs."""

    hot = False
    """Whether ranks may change while it trains: then `bind` is called again, with the ranks that there are then. There
    it must not wait for others: where one was lost, not all may come."""

    losses_add_up = False
    """Whether the local losses of a replica's ranks are parts of the replica's, rather than each the whole."""

    same_numbers = False
    """Whether the generators of a replica's ranks are seeded alike before each step."""

    measures_noise = True
    """Whether the gradient noise scale can be measured where each rank is a replica."""

    local_rate = False
    """Whether the learning rate belongs to a replica's local batch. Then `init(batch=...)` is one, too."""

    @abstractmethod
    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> Limits:
        """What it can do with up to `most_gpus` GPUs, `ranks_per_node` a node, the same on all ranks. Asked by `init`,
        and again when training begins: then models are known (`wrapped`).

        `Limits.memory_bytes` may be left 0: `init` sets it to the device's. Raises ValueError, with what would fit,
        for a strategy that can do nothing.
        """

    def replicas(self, world: int) -> int:
        """Over how many replicas the samples of a step are split. Raises ValueError for a world size that it cannot
        use, with what would fit (`refuse`).
        """
        return world

    def refuse(self, world: int, fitting: list[int]) -> ValueError:
        """To be raised for a world size that it cannot use; `fitting` are some that it can, ascending."""
        return ValueError(refusal(self.name, world, fitting))

    def bind(self, group: Group) -> None:  # noqa: B027, since many need no process groups
        """The ranks are known: make process groups. Collective; by `init`, before the model is made."""

    def batch_fixed(self) -> bool:
        """Whether the global batch must not change now; asked at step boundaries. Not collective, and the same on all
        ranks.
        """
        return False

    def limits_now(self, limits: Limits) -> Limits:
        """`limits` as they are at this step boundary; the same object where nothing changed. Not collective."""
        fixed = self.batch_fixed()
        return limits if fixed == limits.batch_fixed else replace(limits, batch_fixed=fixed)

    def batch_in_force(self, batch: int) -> str:
        """Steps of this global batch begin, as before or anew; what people should know, empty for nothing. Collective.

        Raises RuntimeError where the script left out something that the strategy needs.
        """
        return ""

    def exchange(self, group: Group, noise: NoiseScale | None) -> Exchange | None:
        """The gradient exchange that `job.ddp` uses for a model; None: torch's DistributedDataParallel."""
        return None

    def wrapped(self, model: torch.nn.Module) -> None:  # noqa: B027
        """`job.ddp` returned this model. Not collective."""

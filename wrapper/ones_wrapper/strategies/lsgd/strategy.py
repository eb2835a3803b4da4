"""Leader SGD: ranks train models of their own and are pulled to the best.

    job = ones.init(batch=32, ..., strategy=ones.strategies.Lsgd(period=16))

`job.ddp` then brings the exchange. What the job evaluates, saves and publishes is the leader. The gradient noise scale
is not measured: it compares gradients of several ranks at one and the same point.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ones_wrapper.gradients.apart import check_group, trained_bytes
from ones_wrapper.group import Group
from ones_wrapper.protocol.limits import Limits, SizeLimits, rows_within
from ones_wrapper.strategies.lsgd.exchange import LsgdExchange, options_checked
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
    """Bytes of what is trained, once `job.ddp` was given it."""

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

"""Leader SGD (Teng et al. 2019, arXiv 1905.10395): each rank trains its own model, and is pulled towards the best
rank's.

    job = ones.init(batch=32, ..., strategy=ones.strategies.Lsgd(period=16))

`job.ddp` then returns a model with this exchange. Each rank trains on its own samples. A leader is the rank with the
lowest mean training loss: on a node, or of all ranks. In synchronous rounds, ranks get their leaders' parameters: the
node's every `local_period` steps, and the best rank's every `period` steps. Each step then pulls a rank a little
towards them. A leader has reached its parameters by training, while an average may have a high loss between ranks in
different minima.

The job evaluates and saves the leader of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ones_wrapper.gradients.apart import ApartExchange
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group, check_torch
from ones_wrapper.group.flat import flattened, pieces, together
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits, rows_within
from ones_wrapper.strategy import ApartStrategy

if TYPE_CHECKING:
    from ones_wrapper.protocol import Spec

NO_LOSS = (
    "lsgd: no rank reported a training loss in {steps} steps, and leaders are chosen by it; call job.loss(loss) after "
    "each backward"
)


class LsgdExchange(ApartExchange):
    """The exchange of Leader SGD: synchronous rounds at fixed steps. Between rounds each rank keeps a copy of its
    leaders."""

    name = "lsgd"

    def __init__(self, group: Group, *, period: int, local_period: int, pull: float) -> None:
        """`local_period` is the number of steps between two rounds of a node's ranks. `period`, a multiple of it, is
        the number of steps between two rounds of all ranks. A round moves a rank by the fraction `pull` of the way to a
        leader. The steps until the next round together move it about as far again."""
        super().__init__(group)
        self._period, self._local_period, self._pull = period, local_period, pull
        self._pulled: list[torch.nn.Parameter] = []
        """Parameters that were trainable in `wrap`. They are pulled even if the script freezes some later."""
        self._begin()

    def wrap(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        model = super().wrap(model, **options)
        self._pulled = self._trained()
        return model

    def loss(self, loss: torch.Tensor | float) -> None:
        samples = self._part.samples if self._part is not None else 0
        if samples:
            self._losses.append((loss.detach().clone() if isinstance(loss, torch.Tensor) else loss, samples))

    def ranks_changed(self) -> None:
        super().ranks_changed()
        self._begin()

    def settle(self) -> None:
        super().settle()
        self._begin()

    def _begin(self) -> None:
        """Restart the count of steps, because all ranks have the leader's parameters now."""
        self._losses: list[tuple[torch.Tensor | float, int]] = []
        self._since = self.leader = 0
        """Steps since the last round of all ranks. `leader` is the best rank in that round: the job saves its model."""
        self._local: list[torch.Tensor] = []
        self._global: list[torch.Tensor] = []
        """One vector for each bucket: parameters of the best rank, and in `_local` of the node's leader. Empty before
        the first round."""

    def _publish(self, tensors: list[torch.Tensor]) -> None:
        self._from(self.leader, tensors)

    @property
    def _nodes(self) -> bool:
        size = self._group.gpus_per_node
        return 1 < size < self._group.world and self._local_period < self._period

    @torch.no_grad()
    def _step_made(self) -> None:
        self._since += 1
        buckets = list(together(self._pulled, self._bucket))
        pull(buckets, self._global, self._pull / self._period)
        pull(buckets, self._local, self._pull / self._local_period)
        everyone = self._since == self._period
        if not everyone and not (self._nodes and self._since % self._local_period == 0):
            return
        losses = self._mean_losses()
        if self._nodes:
            first = self._group.rank - self._group.rank % self._group.gpus_per_node
            mates = range(first, min(first + self._group.gpus_per_node, self._group.world))
            source = min(mates, key=lambda rank: losses[rank])
            self._local = [self._sent(some, mates, source) for some in buckets]
            pull(buckets, self._local, self._pull)
        if everyone:
            self._since, self.leader = 0, min(range(self._group.world), key=lambda rank: losses[rank])
            self._global = [self._sent(some, range(self._group.world), self.leader) for some in buckets]
            pull(buckets, self._global, self._pull)

    def _mean_losses(self) -> list[float]:
        """Return the mean training loss of each rank since the last round; infinity for a rank without a finite loss.
        Collective."""
        world, rank = self._group.world, self._group.rank
        total = sum(float(loss) * samples for loss, samples in self._losses)
        seen = sum(samples for _, samples in self._losses)
        self._losses = []
        mine = [0.0] * (3 * world)
        finite = bool(seen) and math.isfinite(total)
        mine[3 * rank : 3 * rank + 3] = [total if finite else 0.0, float(seen), float(finite)]
        found = self._group.total(mine)
        if not any(found[1::3]):
            raise RuntimeError(NO_LOSS.format(steps=self._local_period if self._nodes else self._period))
        return [found[3 * r] / found[3 * r + 1] if found[3 * r + 2] else math.inf for r in range(world)]

    def _sent(self, tensors: list[torch.nn.Parameter], ranks: range, source: int) -> torch.Tensor:
        """Broadcast `tensors` from rank `source` to `ranks`, and return them as one vector. Collective over `ranks`."""
        flat = flattened(tensors)
        if len(ranks) == self._group.world:
            dist.broadcast(flat, source)
        else:
            spread(flat, ranks, self._group.rank, source)
        return flat


def pull(buckets: list[list[torch.nn.Parameter]], leader: list[torch.Tensor], weight: float) -> None:
    """Move parameters by the fraction `weight` of the way to a leader's. Does nothing before the first leader is
    known."""
    for flat, some in zip(leader, buckets, strict=bool(leader)):
        torch._foreach_lerp_(tuple(some), pieces(flat, some), weight)


def spread(flat: torch.Tensor, ranks: range, rank: int, source: int) -> None:
    """Broadcast from `source` to `ranks` by messages between pairs, in a binomial tree. So no process group must be
    made again whenever the ranks change."""
    size = len(ranks)
    place = (rank - source) % size
    step = 1
    while step < size and not place & step:
        step <<= 1
    if place:
        dist.recv(flat, _at(ranks, source, place - step))
    step >>= 1
    while step:
        if place + step < size:
            dist.send(flat, _at(ranks, source, place + step))
        step >>= 1


def _at(ranks: range, source: int, place: int) -> int:
    return ranks[(source - ranks[0] + place) % len(ranks)]


@dataclass
class Lsgd(ApartStrategy):
    """Leader SGD: each rank trains its own model, and every `period` steps all ranks are pulled towards the best one.

    On several nodes with several ranks each, the ranks of a node are also pulled towards their best rank every
    `local_period` steps (default: a quarter of `period`). That sends nothing between nodes. A round moves a rank by the
    fraction `pull` of the way to a leader. The steps until the next round together move it about as far again. The
    script must call `job.loss(loss)` after each backward, since losses select the leaders. The learning rate is for the
    local batch. Raises ValueError for invalid numbers.
    """

    period: int = 16
    local_period: int | None = None
    pull: float = 0.1

    name = "lsgd"
    local_rate = True

    def __post_init__(self) -> None:
        period, local, pull = self.period, self.local_period or max(1, self.period // 4), self.pull
        if period < 1 or local < 1 or period % local:
            raise ValueError(
                f"lsgd: period={period} must be a positive multiple of local_period={local}; take local_period="
                f"{period}, or leave it out with a period that 4 divides"
            )
        if not 0 < pull <= 1:
            raise ValueError(f"lsgd: pull={pull} must be more than 0 and at most 1; 0.1 is the default")
        self._options: dict[str, Any] = {"period": period, "local_period": local, "pull": pull}

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        sizes = (SizeLimits(n, n, data_bytes=self._sent(n, ranks_per_node)) for n in range(1, most_gpus + 1))
        return StrategyLimits(
            self.name,
            rows_within(sizes, any_number=True) if self.model_bytes else (),
            exact=False,
            carries=("the leader's parameters, buffers and optimizer state",),
            resets=("the other ranks' parameters", "cached leaders and the steps to the next round"),
            min_steps=self.period,
        )

    def _sent(self, ranks: int, per_node: int) -> int:
        """Return the bytes that a rank sends in a step, as a mean over ranks and steps. A broadcast to N ranks sends N
        − 1 messages."""
        local = self._options["local_period"]
        messages = ranks - 1
        if 1 < per_node < ranks and local < self.period:
            messages += (ranks - -(-ranks // per_node)) * (self.period // local)
        return messages * self.model_bytes // (ranks * self.period)

    def exchange(self, group: Group, noise: NoiseScale | None) -> LsgdExchange:
        check_torch(self.name, group)
        return LsgdExchange(group, **self._options)

"""1-bit LAMB as a strategy: optimizer, gradient exchange, and the limits in its two phases for the companion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ones_wrapper.gradients.exchange import DdpExchange, known, scale
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group, check_torch
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import MOST_GPUS, SizeLimits, StrategyLimits, rows_within
from ones_wrapper.strategies.onebit_lamb.onebit import OneBitMean, sent_bytes
from ones_wrapper.strategies.onebit_lamb.optimizer import CompressedLamb
from ones_wrapper.strategy import Strategy


class OneBitExchange(DdpExchange):
    """Exchange that averages gradients over samples, as DDP does, until the optimizer exchanges momentum. Later each
    rank keeps its own gradient, scaled so that its mean over the ranks is the mean over the step's samples."""

    def __init__(self, group: Group, noise: NoiseScale | None, made: Callable[[], CompressedLamb | None]) -> None:
        """`made` returns the optimizer; None before the script has made it."""
        super().__init__(group, noise)
        self._made = made

    def trained_by(self, optimizers: Sequence[torch.optim.Optimizer], scaled: bool = False) -> None:
        made = self._made()
        if len(optimizers) != 1 or optimizers[0] is not made:
            kinds = " and ".join(sorted(type(one).__name__ for one in optimizers)) or "none"
            raise ValueError(
                f"onebit_lamb: the model's optimizer is {kinds}; make one, of all its parameters, with "
                "OneBitLamb.optimizer(model.parameters(), lr=...)"
            )

    @contextmanager
    def published(self) -> Iterator[None]:
        self.settle()
        yield

    def settle(self) -> None:
        if (made := self._made()) is not None:
            made.settle()

    def _reduce(self, bucket: int, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        world, made = self._group.world, self._made()
        if world == 1 or made is None or not made.frozen:
            return super()._reduce(bucket, gradient)
        part = self._now()
        if not part.last:
            return known(gradient)
        if self._noise is not None:
            self._noise.skip()  # no rank has the mean gradient
        scale(gradient, self._unit * world, part.share.total)
        return known(gradient)


class OneBitLamb(Strategy):
    """Data parallelism that sends about one bit for each parameter in a step, after a warm-up with plain LAMB:

        lamb = OneBitLamb(warmup_steps=200)
        job = ones.init(batch=64, strategy=lamb)
        model = job.ddp(model)
        optimizer = lamb.optimizer(model.parameters(), lr=0.005, weight_decay=0.01)

    After the warm-up the global batch must not change, and `.grad` is this rank's own part of the gradient. If the
    batch does change, by a requeue or because fewer GPUs hold fewer samples, a new warm-up begins.
    """

    name = "onebit_lamb"
    hot = True

    def __init__(self, warmup_steps: int) -> None:
        """`warmup_steps` is the number of warm-up steps; 15 to 25 % of all steps are usual. Raises ValueError below
        1."""
        if warmup_steps < 1:
            raise ValueError(f"onebit_lamb: warmup_steps={warmup_steps} must be 1 or more; 15 to 25 % of all steps fit")
        self._warmup_steps = warmup_steps
        self._mean = OneBitMean()
        self._group: Group | None = None
        self._made: CompressedLamb | None = None
        self._told: bool | None = None
        """True if the last reported limits were those after the warm-up, False if those of the warm-up; None before the
        first."""

    def optimizer(self, params: Any, **options: Any) -> CompressedLamb:
        """Return the optimizer of all parameters that the job trains. `options` are `lr`, `betas`, `eps` and
        `weight_decay`. Call this once."""
        if self._made is not None:
            raise ValueError("onebit_lamb: a job has one optimizer; give it the parameters of all models as groups")
        self._made = CompressedLamb(params, self._mean, warmup_steps=self._warmup_steps, **options)
        return self._made

    def bind(self, group: Group) -> None:
        self._group = group
        self._mean.ranks_changed()

    def exchange(self, group: Group, noise: NoiseScale | None) -> OneBitExchange:
        check_torch(self.name, group)
        return OneBitExchange(group, noise, lambda: self._made)

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        return StrategyLimits(
            self.name,
            self._sizes(most_gpus),
            exact=False,
            batch_fixed=self.batch_fixed(),
            carries=("what ranks kept back of the momentum, as one vector",),
        )

    def _sizes(self, most_gpus: int) -> tuple[SizeLimits, ...]:
        sizes = range(1, most_gpus + 1) if self._made is not None else ()
        rows = (SizeLimits(gpus, gpus, data_bytes=self.sent_bytes(gpus)) for gpus in sizes)
        return rows_within(rows, any_number=True)

    def sent_bytes(self, world: int) -> int:
        """Return the bytes that a rank sends in a step of the present phase: gradients in 32 bits, or momentum in one
        bit."""
        elements = self._made.elements if self._made is not None else 0
        return sent_bytes(elements, world) if self.batch_fixed() else 2 * (world - 1) * 4 * elements // world

    def batch_fixed(self) -> bool:
        return self._made is not None and self._made.frozen

    def limits_now(self, limits: StrategyLimits) -> StrategyLimits:
        made, group = self._made, self._group
        if made is None or self._told == made.frozen:
            return limits
        self._told = made.frozen
        if made.frozen and group is not None:
            group.say(f"{self.name}: from now on one bit for each of {made.elements} parameters is exchanged at a step")
        most = max(MOST_GPUS, group.world if group is not None else 1)
        return replace(limits, sizes=self._sizes(most), batch_fixed=made.frozen)

    def batch_in_force(self, batch: int) -> str:
        made = self._made
        if made is None:
            raise RuntimeError(
                "onebit_lamb: training starts without its optimizer; make it with OneBitLamb.optimizer(...)"
            )
        before = made.batch
        if before == batch:
            return ""
        made.restart(batch)
        if not before:
            return ""
        return (
            f"{self.name}: the global batch was {before} and is {batch}, so the warm-up of {self._warmup_steps} steps "
            "begins again"
        )

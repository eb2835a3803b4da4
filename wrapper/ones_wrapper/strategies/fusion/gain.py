"""Measure whether fusing is faster on this device, and for how many members.

Fused layers are larger operations. They are faster if a single model leaves the device idle, or if starting operations
takes most of the time. If one model fills the device, they may even be slower. So a few steps are first measured both
ways (as in HFTA, §4).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ones_wrapper.devices.streams import wait
from ones_wrapper.group import Group
from ones_wrapper.strategies.fusion.model import Loss, arguments
from ones_wrapper.strategies.fusion.optimizer import FusedOptimizer

LEAST = 1.2
"""Smallest speedup for which fusing is chosen; a smaller one may be an error of the short measurement."""


@dataclass(frozen=True)
class Gain:
    """Times of separate and fused steps, measured on one device."""

    members: int
    alone_s: float
    """Seconds in which all members make one separate step each, one after another. Processor time on a CPU, elapsed
    time on a GPU."""
    fused_s: float

    @property
    def speedup(self) -> float:
        """Time of the separate steps divided by the time of a fused step."""
        return self.alone_s / self.fused_s

    @property
    def pays(self) -> bool:
        return self.members > 1 and self.speedup >= LEAST

    def of_all(self, group: Group) -> Gain:
        """Return the gain computed from the times averaged over all ranks. Collective."""
        alone_s, fused_s = (total / group.world for total in group.total([self.alone_s, self.fused_s]))
        return Gain(self.members, alone_s, fused_s)

    def __str__(self) -> str:
        verdict = "pays" if self.pays else f"does not pay (that begins at {LEAST})"
        return (
            f"{self.members} members fused take {self.fused_s * 1000:.2f} ms a step and {self.alone_s * 1000:.2f} ms "
            f"in turn: {self.speedup:.2f} times as fast, which {verdict}"
        )


class NoGainError(ValueError):
    """Error: fusing is refused, because it is not faster here. `gain` is the measurement."""

    def __init__(self, gain: Gain) -> None:
        super().__init__(f"fuse: {gain}; train each member by itself, or more of them at once")
        self.gain = gain


def measure(
    together: tuple[torch.nn.Module, FusedOptimizer],
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    losses: Sequence[Callable[[Any], torch.Tensor]],
    batch: Sequence[Any],
    steps: int,
) -> Gain:
    """Return the gain of `together` (fused model and optimizer) on a local batch (x, *targets), on the batch's device.
    Separate and fused steps are each measured after a warm-up step, three times `steps` steps. Members are copied for
    separate steps. `losses` has a function of the output for each member."""
    device = device_of(batch)
    # Together, so that each optimizer's copy has the parameters of its model's copy.
    alone = [copy.deepcopy((models[name], optimizers[name])) for name in models]
    for model, _ in alone:
        model.to(device)
    args, kwargs = arguments(batch[0])
    fused, optimizer = together
    fused.to(device)

    def in_turn() -> None:
        for (model, its), loss in zip(alone, losses, strict=True):
            its.zero_grad()
            loss(model(*args, **kwargs)).backward()  # type: ignore[no-untyped-call]
            its.step()

    def at_once() -> None:
        optimizer.zero_grad()
        fused(*batch).sum().backward()
        optimizer.step()

    random = torch.get_rng_state()
    try:
        return Gain(len(models), _seconds(in_turn, steps, device), _seconds(at_once, steps, device))
    finally:
        torch.set_rng_state(random)


def _seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the seconds of a step: the smallest of three measurements, since other processes may use the
    processors."""
    step()
    found = []
    for _ in range(3):
        wait(device)
        begin = _clock(device)
        for _ in range(steps):
            step()
        wait(device)
        found.append((_clock(device) - begin) / steps)
    return max(min(found), 1e-9)


def _clock(device: torch.device) -> float:
    return time.perf_counter() if device.type == "cuda" else time.process_time()


def device_of(batch: Sequence[Any]) -> torch.device:
    return next((thing.device for thing in batch if isinstance(thing, torch.Tensor)), torch.device("cpu"))


def losses_of(
    loss: Loss | Sequence[Loss], values: Mapping[str, Sequence[float]], targets: Sequence[Any], members: int
) -> list[Callable[[Any], torch.Tensor]]:
    """Return the loss of each member, as a function of the member's output."""

    def bound(row: int) -> Callable[[Any], torch.Tensor]:
        its = loss if callable(loss) else loss[row]
        own = {name: of_each[row] for name, of_each in values.items()}
        return lambda output: its(output, *targets, **own)

    return [bound(row) for row in range(members)]

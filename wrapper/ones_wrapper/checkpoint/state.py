"""What a checkpoint is made from, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    """Anything else that training carries: schedulers, gradient scalers, moving averages."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass
class Progress:
    """How far training has come; all counts are since the job's first run unless said otherwise."""

    epoch: int = 0
    cursor: int = 0
    """Samples of the epoch already used."""
    step: int = 0
    samples: int = 0
    batch: int = 0
    """Global batch last wished for, before it is cut to what the GPUs hold; 0 for the script's own."""
    dataset: int = 0
    """Length of an epoch; 0 before the data is known."""
    useful: float = 0.0
    """Progress in samples of the base batch: each sample counts with its batch's statistical efficiency."""
    noise: float = 0.0
    """Gradient noise scale last measured, in samples; 0 for none."""
    world: int = 0
    """World size of the last run; 0 before the first."""
    resizes: int = 0
    """Runs that began at another world size than the one before."""
    failures: int = 0
    """Starts that ended without a bye, or with that of an error, and were followed by another."""
    trained_s: float = 0.0
    """Seconds that the job has trained."""
    lr_factor: float = 0.0
    """Learning rate in force over the script's own; 0 before the first step."""
    lr_target: float = 0.0
    """Where it goes, for the batch in force."""
    lr_ramp: int = 0
    """Steps that are left on the way there."""


@dataclass(frozen=True)
class State:
    """What is saved beside the progress: registered once by the script."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    extras: dict[str, Stateful]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable."""

    name: str
    bytes: int
    seconds: float
    """From its beginning until it was durable."""
    stall_s: float
    """How long training stood still for it, the wait for the one before included."""
    progress: Progress
    """As it was when the checkpoint began."""


@dataclass(frozen=True)
class Failed:
    """A checkpoint that could not be written; the older ones are still there."""

    name: str
    why: str


@dataclass(frozen=True)
class Loaded:
    """Which checkpoint was loaded (empty name: none), and what people should know."""

    name: str
    progress: Progress
    note: str = ""

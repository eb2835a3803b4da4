"""How a simulated job's size changes, and what that costs: by a requeue, or hot, by blocks that join and leave."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ones.simulate.training.application import Application

STATE_BYTES = 12.0
"""Of each parameter: its value and two moments of the optimizer, in single precision."""


@dataclass(frozen=True)
class Requeue:
    """The job stops with a checkpoint and starts anew; its GPUs are given back meanwhile or held, and do not train."""

    seconds: float | None = 30.0
    """That each start interrupts training, the first included; None for what was measured of each application."""

    def start_s(self, app: Application) -> float:
        """Seconds that a start from nothing holds GPUs before they train."""
        return app.resize_s if self.seconds is None else self.seconds

    def grow_s(self, app: Application) -> float:
        """Seconds that training stands still when the job gains GPUs."""
        return self.start_s(app)

    def shrink_s(self, app: Application) -> float:
        """Seconds that training stands still when the job gives up GPUs."""
        return self.start_s(app)

    def prepare_s(self, app: Application) -> float:
        """Seconds that GPUs which the job gains are held before training pauses for them."""
        return 0.0


@dataclass(frozen=True)
class Hot:
    """New blocks start and prepare while the job trains on; it pauses to send them its state. Blocks that leave cost a
    boundary between two steps.

    The defaults were measured of real jobs on a real Slurm, with gloo and without GPUs (docs/benchmarks.md).
    """

    pause_s: float = 0.3
    """That training stands still for a growth, besides what sending the state takes."""
    shrink_pause_s: float = 0.03
    """That training stands still when blocks leave."""
    bytes_per_s: float = 650e6
    """At which the state of a job reaches new blocks."""
    launch_s: float = 7.0
    """From the start of a block until it is ready: imports, model, first pass. As long, a job that starts from nothing
    holds its GPUs before they train."""
    recover_s: float = 5.0
    """From the loss of a block to the next step of those that are left."""

    def __post_init__(self) -> None:
        for name in ("pause_s", "shrink_pause_s", "launch_s", "recover_s"):
            if not 0 <= getattr(self, name) < 86400:
                raise ValueError(f"{name}: {getattr(self, name)!r} must be seconds, 0 at least and less than a day")
        if not 0 < self.bytes_per_s <= 1e15:
            raise ValueError(f"bytes_per_s: {self.bytes_per_s!r} must be above 0 and at most 1e15")

    def start_s(self, app: Application) -> float:
        """See `Requeue.start_s`."""
        return self.launch_s

    def grow_s(self, app: Application) -> float:
        """See `Requeue.grow_s`."""
        return self.pause_s + self.sent_bytes(app) / self.bytes_per_s

    @staticmethod
    def sent_bytes(app: Application) -> int:
        """Bytes of the state that each new block is sent."""
        return round(STATE_BYTES * app.parameters)

    def shrink_s(self, app: Application) -> float:
        """See `Requeue.shrink_s`."""
        return self.shrink_pause_s

    def prepare_s(self, app: Application) -> float:
        """See `Requeue.prepare_s`."""
        return self.launch_s


Mechanism = Requeue | Hot
"""How jobs of a simulation are resized."""

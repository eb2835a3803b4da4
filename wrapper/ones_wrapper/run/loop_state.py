"""State of a script's loop over batches that lasts from step to step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ones_wrapper.data.coreset_feed import Selection
from ones_wrapper.data.feed import AccumulationStep, Feed, Share
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.data.streams import StreamFeed
from ones_wrapper.gradients.accumulation import Accumulation
from ones_wrapper.gradients.exchanges import Exchanges
from ones_wrapper.gradients.learning_rate import Rate
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.gradients.schedule import Schedules
from ones_wrapper.script.first_steps import FirstSteps


class Loop:
    """Data, gradient exchanges and optimizers of the script's loop on this rank. Methods are not collective."""

    def __init__(self) -> None:
        self.feed: Feed | StreamFeed | None = None
        self.seed = 0
        self.selection = Selection()
        self.exchanges = Exchanges()
        self.accumulation = Accumulation()
        self.rate = Rate(1.0, follows=False)
        """Learning rate rule. It changes nothing until the script has registered its optimizers."""
        self.schedules = Schedules(1)
        self.noise: NoiseScale | None = None
        self.part = AccumulationStep(Share(0, 1, 1), 0, 1, 0, 1, 1)
        """The present pass, or the last one."""
        self.within = False
        """True from an epoch's first pass to the end of the loop over its batches."""
        self.passed = -1
        """Last epoch whose batches were all given to the script; -1 for none."""
        self.in_epochs = False
        self.end_open: Callable[[], None] = lambda: None
        """Function that ends an epoch's last step. This step is still open after the loop if the script fetches
        ahead."""
        self.ahead = False
        """True if the script has already fetched its next batch."""
        self.least = 1
        """Smallest number of samples on a rank that is not 0: 2 if the model normalizes over the batch, else 1."""
        self.first_steps = FirstSteps(False, torch.nn.Module(), [], [])
        self.used: list[int] = []
        """Dataset indices that this rank used in the present step, for the trace."""
        self.at_boundary = False
        """True at a step boundary, where model, optimizer and progress are consistent. It stays True if ranks are lost
        there."""
        self.unused = False
        self.still = 0
        self.begun_before = 0
        """Number of gradient exchanges begun in all completed steps."""

    @property
    def mid_step(self) -> bool:
        """True from the beginning of an optimizer's step until the step is counted: the model is then ahead of the
        cursor."""
        return self.within and (self.rate.stepping or self.rate.stepped)

    @property
    def whole(self) -> bool:
        """True if model, optimizer and progress are consistent, and equal on all ranks: at a boundary, and in a pass
        before the optimizer's step."""
        return self.exchanges.steps_together and (self.at_boundary or (self.within and not self.mid_step))

    def stepped(self, progress: TrainingProgress, total: int) -> None:
        """Record the end of a step of `total` samples, which `progress` already includes."""
        if self.noise is not None:
            self.noise.step(total)
        self.begun_before = self.exchanges.begun
        self.unused = not self.rate.stepped
        self.first_steps.end(self.rate.stepped, self.part.samples)
        self.still = self.still + 1 if self.unused else 0
        self.rate.remember(progress)
        self.rate.stepped = False

    def ranks_changed(self, noise: float, low: float) -> None:
        """Continue with new ranks, from the gradient noise scale `noise` and its lower bound `low`."""
        self.exchanges.ranks_changed()
        if self.noise is not None:
            self.noise.ranks_changed(noise, low)
        self.begun_before = 0

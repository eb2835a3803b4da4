"""State of a script's loop, from step to step."""

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
    """Data, exchange and optimizer of the script's loop on this rank. Not collective."""

    def __init__(self) -> None:
        self.feed: Feed | StreamFeed | None = None
        self.seed = 0
        self.selection = Selection()
        self.exchanges = Exchanges()
        self.accumulation = Accumulation()
        self.rate = Rate(1.0, follows=False)
        """Until the script has registered its optimizers, a rate that changes nothing."""
        self.schedules = Schedules(1)
        self.noise: NoiseScale | None = None
        self.part = AccumulationStep(Share(0, 1, 1), 0, 1, 0, 1, 1)
        """The pass that the script is in, or was in last."""
        self.within = False
        """True from an epoch's first pass to the end of its loop: an error of the script may then come from a pass."""
        self.passed = -1
        """Last epoch whose batches were all handed out; -1 for none."""
        self.in_epochs = False
        self.end_open: Callable[[], None] = lambda: None
        """Ends the last step of an epoch, if the script asked for its batches ahead."""
        self.ahead = False
        """True if the script holds its next batch already, cut for the present ranks."""
        self.least = 1
        """Fewest samples of a share: two if BatchNorm needs them."""
        self.first_steps = FirstSteps(False, torch.nn.Module(), [], [])
        self.used: list[int] = []
        """Dataset indices that this rank used in the step, if there is a trace."""
        self.at_boundary = False
        """True at a step boundary, where model, optimizer and progress agree. Stays true if other ranks are lost there,
        since a checkpoint can be written."""
        self.unused = False
        self.still = 0
        self.begun_before = 0
        """Number of gradient exchanges in all completed steps."""

    @property
    def mid_step(self) -> bool:
        """True if the model is ahead of the cursor: the optimizer steps or stepped, and the step is not committed."""
        return self.within and (self.rate.stepping or self.rate.stepped)

    @property
    def whole(self) -> bool:
        """True if model, optimizer and progress are one consistent state, the same on all ranks. They are in a pass
        before the optimizer's step, and at a boundary."""
        return self.exchanges.steps_together and (self.at_boundary or (self.within and not self.mid_step))

    def stepped(self, progress: TrainingProgress, total: int) -> None:
        """Record a step of `total` samples, which `progress` has counted already."""
        if self.noise is not None:
            self.noise.step(total)
        self.begun_before = self.exchanges.begun
        self.unused = not self.rate.stepped
        self.first_steps.end(self.rate.stepped, self.part.samples)
        self.still = self.still + 1 if self.unused else 0
        self.rate.remember(progress)
        self.rate.stepped = False

    def ranks_changed(self, noise: float, low: float) -> None:
        """Go on with other ranks, whose gradient noise scale is `noise`, with the lower bound `low`."""
        self.exchanges.ranks_changed()
        if self.noise is not None:
            self.noise.ranks_changed(noise, low)
        self.begun_before = 0

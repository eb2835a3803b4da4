"""Moments of a step at which a rank that lost the others may write its model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.gradients.learning_rate import Rate
from ones_wrapper.run.loop_state import Loop


class Breaks(torch.optim.SGD):
    """Changes its first parameter, then fails, as one that exchanges something in its step and lost its peers."""

    seen = fails = True

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].data.add_(1.0)
        self.seen = self.loop.whole
        if self.fails:
            raise RuntimeError("Connection closed by peer")

    loop: Loop


def test_a_model_amid_its_optimizers_step_is_not_whole() -> None:
    """Protects the newest checkpoint: a rescue would write parameters of which some have stepped, and a scaled rate."""
    optimizer, loop, progress = Breaks([torch.nn.Parameter(torch.zeros(2))], lr=0.1), Loop(), TrainingProgress()
    optimizer.loop, loop.rate, loop.within = loop, Rate(4, optimizer), True
    loop.rate.begin(progress, 8, 8)
    assert loop.whole
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert not optimizer.seen and not loop.whole
    loop.rate.begin(progress, 8, 8)
    optimizer.fails = False
    optimizer.step()
    assert not optimizer.seen and not loop.whole and loop.rate.stepped

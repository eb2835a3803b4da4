"""A newcomer warms up for the shapes, the size and the type of the passes that it is about to make."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ones_wrapper.run import warm_up
from ones_wrapper.run.warm_up import Shapes

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    """Two inputs of a sample each, and a table that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, table: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.shape, table.shape, mask.dtype, mask.shape, torch.is_autocast_enabled("cpu")))
        return self.layer(x) + mask.sum() + table.sum()


class Exchange:
    def __init__(self) -> None:
        self.model = Model()

    def during(self, part: object) -> Any:
        return nullcontext()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_pass_is_as_those_to_come(autocast: bool) -> None:
    """Protects the first step of a newcomer: what compiles, searches kernels or captures does so for a shape, and in
    half precision for other kernels."""
    old, new = Exchange(), Exchange()
    shapes = Shapes([old], lambda: 8)  # type: ignore[arg-type]
    assert shapes.told(16, 2) == ""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        old.model(torch.ones(8, 3), torch.ones(5, 2), mask=torch.ones(8, dtype=torch.bool))
    asked: list[tuple[int, int]] = []

    def samples(batch: int, world: int) -> int:
        asked.append((batch, world))
        return 6

    warm_up.run([new], shapes.told(16, 2), CPU, samples)  # type: ignore[arg-type]
    assert asked == [(16, 2)]
    assert new.model.seen == [((6, 3), (5, 2), torch.bool, (6,), autocast)]
    assert new.model.layer.weight.grad is None

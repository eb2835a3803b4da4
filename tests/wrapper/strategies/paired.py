"""The row of the strategy that tests alone have: the smallest one with replicas."""

from __future__ import annotations

import torch

from ones_wrapper.group import Group
from tests.wrapper.paired import Paired
from tests.wrapper.strategies import script
from tests.wrapper.strategies.paired_script import BATCH, EPOCHS, SAMPLES, SEED, model_and_data, optimizer_of
from tests.wrapper.strategies.rows import HERE, Row


def expected(group: Group) -> list[float]:
    return trained(EPOCHS)


def trained(epochs: int) -> list[float]:
    """The same over so many epochs."""
    model, data = model_and_data()
    optimizer = optimizer_of(model)
    for chosen in script.steps(SAMPLES, BATCH, epochs, SEED):
        inputs, target = data[torch.from_numpy(chosen)]
        optimizer.zero_grad()
        ((model(inputs) - target) ** 2).mean().backward()
        optimizer.step()
    return script.flat(model.parameters())


ROW = Row(Paired, HERE / "paired_script.py", SAMPLES, EPOCHS, expected, tolerance=1e-12)

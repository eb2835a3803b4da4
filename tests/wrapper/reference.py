"""The run that nobody interrupted, in plain PyTorch: what `tests/wrapper/train.py` trains, one process, no wrapper.

Which batch was in force at which step is taken from the reports of the run that it is compared with, since orders come
at moments that no test can choose. Everything else is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import mse_loss

from ones_wrapper.protocol import Batch, Hello, Report


def batches_by_step(runs: Sequence[Sequence[Report]]) -> dict[int, tuple[int, float]]:
    """(global batch, learning rate's factor) from each step on at which one of them changed, of the steps that count.

    `runs` are the reports of each run in order: a run undoes what the ones before did from its first step on.
    """
    changes: dict[int, tuple[int, float]] = {}
    for reports in runs:
        for report in reports:
            if isinstance(report, Hello):
                changes = {step: value for step, value in changes.items() if step < report.step}
            if isinstance(report, (Hello, Batch)):
                changes[report.step] = (report.batch, report.lr_factor)
    return changes


def train(epochs: int, samples: int, gamma: float, changes: dict[int, tuple[int, float]]) -> torch.Tensor:
    """The final parameters, as train.py flattens them."""
    torch.manual_seed(0)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    model = torch.nn.Sequential(linear(8, 64), tanh(), linear(64, 64), linear(64, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    y = x.prod(1, keepdim=True)
    step, batch, factor = 0, 0, 0.0
    for epoch in range(epochs):
        order = np.random.default_rng([3, epoch]).permutation(samples)
        cursor = 0
        while cursor < samples:
            batch, factor = changes.get(step, (batch, factor))
            chosen = order[cursor : cursor + batch]
            optimizer.zero_grad()
            mse_loss(model(x[chosen]), y[chosen]).backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * gamma**epoch * factor
            optimizer.step()
            cursor += len(chosen)
            step += 1
    return torch.cat([p.detach().flatten() for p in model.parameters()])

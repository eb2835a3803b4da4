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

BASE = 16
"""As in train.py."""
RATE = 0.02
"""As in train.py. With 0.05, one of 200 undisturbed runs at batches up to 48 diverges."""
LR_CAP = 2.0
"""No noise scale is known there."""


def batches_by_step(runs: Sequence[Sequence[Report]]) -> dict[int, int]:
    """Global batch from each step on at which it changed, of the steps that count.

    `runs` are the reports of each run in order: a run undoes what the ones before did from its first step on.
    """
    changes: dict[int, int] = {}
    for reports in runs:
        for report in reports:
            if isinstance(report, Hello):
                changes = {step: value for step, value in changes.items() if step < report.step}
            if isinstance(report, (Hello, Batch)):
                changes[report.step] = report.batch
    return changes


def train(epochs: int, samples: int, gamma: float, changes: dict[int, int]) -> torch.Tensor:
    """The final parameters, as train.py flattens them."""
    torch.manual_seed(0)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    model = torch.nn.Sequential(linear(8, 64), tanh(), linear(64, 64), linear(64, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    y = x.prod(1, keepdim=True)
    step = batch = 0
    for epoch in range(epochs):
        order = np.random.default_rng([3, epoch]).permutation(samples)
        cursor = 0
        while cursor < samples:
            batch = changes.get(step, batch)
            chosen = order[cursor : cursor + batch]
            ratio = max(len(chosen), min(batch, BASE)) / BASE
            optimizer.zero_grad()
            mse_loss(model(x[chosen]), y[chosen]).backward()
            for group in optimizer.param_groups:
                group["lr"] = RATE * gamma**epoch * min(ratio, max(1.0, LR_CAP / gamma**epoch))
            optimizer.step()
            cursor += len(chosen)
            step += 1
    return torch.cat([p.detach().flatten() for p in model.parameters()])

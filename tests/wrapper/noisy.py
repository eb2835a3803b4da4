"""Trains a linear model that stays where it is, and says what its gradients' noise scale truly is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones

SAMPLES, EPOCHS = 4096, 1
job = ones.init(batch=16, max_batch=64, epochs=EPOCHS + int(os.environ.get("SLURM_RESTART_COUNT", 0)))
generator = torch.Generator().manual_seed(1)
x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
y = x.sum(1, keepdim=True) + 2.0 * torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
plain = torch.nn.Linear(8, 1, bias=False).double()
torch.nn.init.zeros_(plain.weight)
each = -2.0 * y * x  # of the squared error at zero weights
if job.rank == 0:
    noise = float(each.var(0).sum() / each.mean(0).square().sum())
    Path(os.environ["ONES_JOB_DIR"], "true-noise").write_text(json.dumps(noise))
model = job.ddp(plain)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
optimizer = job.register(model=model, optimizer=optimizer)
loader = job.loader(TensorDataset(x, y), seed=3)
for _ in job.epochs():
    for inputs, target in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()

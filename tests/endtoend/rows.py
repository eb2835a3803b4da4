"""A script with loader workers that holds a CSV file open: a row a step, never flushed. Argument: the file's folder."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import ones_wrapper as ones

job = ones.init(batch=16, max_batch=64)
model = job.ddp(torch.nn.Linear(4, 1))
optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
x = torch.ones(320, 4)
loader = job.loader(TensorDataset(x, x[:, :1]), num_workers=2)
evaluation = DataLoader(TensorDataset(x), batch_size=64, num_workers=1, persistent_workers=True)
rows = csv.writer((Path(sys.argv[1]) / "rows.csv").open("a")) if job.rank == 0 else None
for _ in job.epochs():
    for inputs, target in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
        time.sleep(0.03)
        if rows:
            rows.writerow([job.progress.step])
    for _ in evaluation:
        pass

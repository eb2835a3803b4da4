"""A small CNN on digits: a script for one GPU with the three edits of docs/loop.md, which make it elastic."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ones_wrapper as ones

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
y = torch.tensor(labels)
train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

job = ones.init(batch=32, epochs=args.epochs, max_batch=256, max_local_batch=64)
device = job.device
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 36, 10))
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
loader = DataLoader(train, batch_size=32, shuffle=True)
model, optimizer, loader, scheduler = job.prepare(model, optimizer, loader, scheduler)

for epoch in job.epochs():
    model.train()
    for x, y in loader:
        loss = cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        x, y = test.tensors
        accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean().item()
    if job.rank == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}, batch {job.batch} on {job.world} GPUs", flush=True)
    job.report(accuracy=accuracy)

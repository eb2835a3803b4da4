"""Accelerate on a small network, digits, elastic by the edits in docs/trainer.md."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ones_wrapper.frameworks.accelerate import Accelerator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

accelerator = Accelerator(cpu=not torch.cuda.is_available(), elastic={"max_batch": 256, "max_local_batch": 64})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(train, batch_size=32, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
test = accelerator.prepare(DataLoader(test, batch_size=64))

for epoch in accelerator.epochs(args.epochs):
    model.train()
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in test]
    accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).float().mean().item():.3f}", flush=True)
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "digits.pt")

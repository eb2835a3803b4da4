"""Digits on a weighted tenth of the data (CRAIG), chosen again every few epochs by the last layer's gradients."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--fraction", type=float, default=0.1)
parser.add_argument("--every", type=int, default=5, help="epochs between two selections; 0: one selection")
parser.add_argument("--pace", type=float, default=0.0, help="samples a second that a GPU is to make, emulated")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

job = ones.init(batch=16, max_batch=64, epochs=args.epochs)
torch.manual_seed(0)
model = job.ddp(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = job.register(model=model, optimizer=optimizer)


def gradients(batch: Any) -> torch.Tensor:
    x, y = batch
    return ones.strategies.last_layer_gradient(model(x.to(job.device)), y.to(job.device))


loader = job.loader(train, coreset=ones.strategies.Coreset(args.fraction, every=args.every, features=gradients))

for epoch in job.epochs():
    for (x, y), weights in loader:
        if args.pace:
            time.sleep(len(x) / args.pace)
        losses = cross_entropy(model(x.to(job.device)), y.to(job.device), reduction="none")
        loss = (weights.to(job.device) * losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.loss(loss)
    correct = total = 0
    with torch.no_grad():
        for x, y in job.evaluate(test):
            correct += int((model(x.to(job.device)).argmax(1).cpu() == y).sum())
            total += len(y)
    accuracy = job.mean(correct, total)
    if job.rank == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f} by {len(loader)} steps on {job.world} GPUs", flush=True)
    job.report(accuracy=accuracy)

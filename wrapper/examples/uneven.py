"""Digits on GPUs of different kinds: ranks get shares of each batch by their speed.

Different speeds are emulated by sleeping: --pace has each rank's samples per second. Leave it out on real GPUs.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=60)
parser.add_argument("--pace", default="1200,400", help="samples a second, of rank 0, 1, …")
parser.add_argument("--even", action="store_true", help="for comparison: the same share for each rank")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

job = ones.init(batch=args.batch, max_batch=4 * args.batch, epochs=args.epochs, uneven=not args.even)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = job.prepare(model, optimizer, train)
paces = [float(pace) for pace in args.pace.split(",")]

for epoch in job.epochs():
    began, steps = time.perf_counter(), 0
    for x, y in loader:
        time.sleep(len(x) / paces[job.rank % len(paces)])
        loss = cross_entropy(model(x.to(job.device)), y.to(job.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.loss(loss)
        steps += 1
    step_ms = 1000 * (time.perf_counter() - began) / max(1, steps)
    correct = total = 0
    with torch.no_grad():
        for x, y in job.evaluate(test):
            correct += int((model(x.to(job.device)).argmax(1).cpu() == y).sum())
            total += len(y)
    accuracy = job.mean(correct, total)
    if job.rank == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}, {step_ms:.0f} ms a step on {job.world} GPUs", flush=True)
    job.report(accuracy=accuracy)

"""A small CNN on scikit-learn's digits: an ordinary training script, made elastic by `ones`."""

from __future__ import annotations

import argparse
import time

import torch
from common import options
from digits import digits
from torch import nn
from torch.nn.functional import cross_entropy

import ones_wrapper as ones


def train(job: ones.Job, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> None:
    """Train a classifier of digits, and measure it after each epoch."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    data, test = digits()
    model, optimizer, scheduler, loader = job.prepare(model, optimizer, scheduler, data)
    for epoch in job.epochs():
        model.train()
        for x, y in loader:
            loss = cross_entropy(model(x.to(job.device)), y.to(job.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.loss(loss)
            time.sleep((args.pace * len(y) + args.pace_step) / 1000)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            accuracy = (model.module(x.to(job.device)).argmax(1).cpu() == y).float().mean().item()
        if job.rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}, batch {job.batch} on {job.world} ranks", flush=True)
        job.report(accuracy=accuracy)


def main() -> None:
    args = options(__doc__, epochs=10, lr=0.02).parse_args()
    job = ones.init(
        batch=args.batch, max_batch=args.max_batch, max_local_batch=args.max_local_batch, epochs=args.epochs
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    train(job, model, optimizer, args)


if __name__ == "__main__":
    main()

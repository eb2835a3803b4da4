"""Training script of `slurm-ones demo`: a small network learns on which of three spirals a point lies.

It needs only torch.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones

LR, WIDTH = 0.005, 64


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=32, help="global batch that the learning rate is meant for")
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--max-local-batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, metavar="MS", help="sleep per sample, as a GPU would work")
    parser.add_argument("--pace-step", type=float, default=0.0, metavar="MS", help="sleep per step besides")
    return parser.parse_args()


def spirals(samples: int, seed: int) -> TensorDataset:
    """Return a data set of points in the plane, each labelled with its spiral."""
    random = torch.Generator().manual_seed(seed)
    arm = torch.arange(samples) % 3
    out = torch.rand(samples, generator=random)
    angle = 4.0 * out + arm * (2 * math.pi / 3) + 0.1 * torch.randn(samples, generator=random)
    return TensorDataset(torch.stack([out * angle.cos(), out * angle.sin()], dim=1), arm)


def main() -> None:
    args = options()
    job = ones.init(
        batch=args.batch, epochs=args.epochs, max_batch=args.max_batch, max_local_batch=args.max_local_batch
    )
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    train, test = spirals(args.samples, args.seed), spirals(600, args.seed + 1)
    model, optimizer, loader = job.prepare(model, optimizer, train)
    for epoch in job.epochs():
        model.train()
        for x, y in loader:
            loss = cross_entropy(model(x.to(job.device)), y.to(job.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.loss(loss)
            time.sleep((args.pace * len(y) + args.pace_step) / 1000)
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            accuracy = (model.module(x.to(job.device)).argmax(1).cpu() == y).float().mean().item()
        if job.rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}, batch {job.batch} on {job.world} ranks", flush=True)
        job.report(accuracy=accuracy)


if __name__ == "__main__":
    main()

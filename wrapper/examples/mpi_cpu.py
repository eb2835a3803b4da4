"""Regression on CPU nodes over MPI, made elastic by `ones`.

On a cluster, in a job with several tasks a node: `ones-run --launcher ibrun mpi_cpu.py` (or mpirun, srun). By hand:
`mpirun -n 4 python mpi_cpu.py`. mpi4py must have been built for the cluster's MPI.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import make_friedman1
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ones_wrapper as ones


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="global batch that --lr is meant for")
    parser.add_argument("--max-batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def friedman(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Return (training set, test set from a fifth of the samples) of Friedman's function of five of ten features, with
    noise."""
    features, target = make_friedman1(samples, noise=1.0, random_state=0)
    x, y = torch.tensor(features, dtype=torch.float32) * 2 - 1, torch.tensor(target, dtype=torch.float32)
    held_out = torch.arange(samples) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def main() -> None:
    args = options()
    job = ones.init(batch=args.batch, max_batch=args.max_batch, epochs=args.epochs, backend="mpi")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    train, test = friedman(args.samples)
    model, optimizer, scheduler, loader = job.prepare(model, optimizer, scheduler, train)
    for epoch in job.epochs():
        model.train()
        for x, y in loader:
            loss = mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            job.loss(loss)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            r2 = 1 - (mse_loss(model.module(x).squeeze(1), y) / y.var(correction=0)).item()
        if job.rank == 0:
            print(f"epoch {epoch}: R² {r2:.3f}, batch {job.batch} on {job.world} ranks", flush=True)
        job.report(accuracy=r2)


if __name__ == "__main__":
    main()

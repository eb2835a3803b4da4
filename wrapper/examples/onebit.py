"""A classifier of scikit-learn's digits by 1-bit LAMB: after a warm-up a step exchanges one bit for each parameter."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.onebit_lamb import OneBitLamb


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="global batch")
    parser.add_argument("--max-batch", type=int, default=None, help="largest global batch, taken up in the warm-up")
    parser.add_argument("--max-local-batch", type=int, default=64)
    parser.add_argument("--warmup-steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="MS", help="sleep per sample, as a GPU would compute"
    )
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return (training set of 1437 digits of 8 × 8 pixels, test set of 360)."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    args = options()
    lamb = OneBitLamb(warmup_steps=args.warmup_steps)
    limits = {"max_batch": args.max_batch, "max_local_batch": args.max_local_batch}
    job = ones.init(batch=args.batch, epochs=args.epochs, max_accumulation_steps=4, strategy=lamb, **limits)
    torch.manual_seed(0)
    model = job.ddp(classifier())
    optimizer = lamb.optimizer(model.parameters(), lr=args.lr, weight_decay=0.01)
    train, test = digits()
    optimizer = job.register(model=model, optimizer=optimizer)
    loader = job.loader(train)
    for epoch in job.epochs():
        for x, y in loader:
            loss = cross_entropy(model(x.to(job.device)), y.to(job.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.loss(loss)
            time.sleep(args.pace * len(y) / 1000)
        with torch.no_grad():
            x, y = test.tensors
            accuracy = (job.unwrap(model)(x.to(job.device)).argmax(1).cpu() == y).float().mean().item()
        if job.rank == 0:
            phase = "momentum, 1 bit" if lamb.batch_fixed() else "gradients, 32 bits"
            print(
                f"epoch {epoch}: accuracy {accuracy:.3f}, batch {job.batch} on {job.world} ranks, {phase}", flush=True
            )
        job.report(accuracy=accuracy)


if __name__ == "__main__":
    main()

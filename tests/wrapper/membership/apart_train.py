"""A regression by leader SGD or DecentLaM that takes up blocks and lets them go. Rank 0 writes what is published."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import ones_wrapper as ones
from tests.wrapper.pace import pace
from tests.wrapper.strategies import script
from tests.wrapper.strategies.apart_script import SEED, data

BATCH, RATE, MOMENTUM = 6, 0.02, 0.8


def model_of() -> torch.nn.Module:
    """The same each time."""
    torch.manual_seed(0)
    return torch.nn.Linear(6, 1).double()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--hurry", type=Path)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--strategy")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    strategy = (
        ones.strategies.Lsgd(period=4)
        if args.strategy == "lsgd"
        else ones.strategies.DecentLam("ring", momentum=MOMENTUM)
    )
    job = ones.init(batch=BATCH, epochs=args.epochs, scale_lr=False, checkpoint_every_s=0.5, strategy=strategy)
    model = job.ddp(model_of())
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM))
    loader = job.loader(data(), seed=SEED)
    for _ in job.epochs():
        for inputs, target in loader:
            loss = (model(inputs) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            job.loss(loss)
            optimizer.step()
            pace(args.step_ms, args.hurry, job.progress.epoch / args.epochs)
    if job.rank == 0:
        torch.save(script.flat(job.unwrap(model).parameters()), args.out)


if __name__ == "__main__":
    main()

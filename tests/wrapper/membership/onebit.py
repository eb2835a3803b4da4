"""1-bit LAMB on digits in blocks. Each process leaves its parameters and momentum, and the residual that it had in its
first step at each number of ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.onebit_lamb import OneBitLamb
from tests.wrapper.pace import pace
from tests.wrapper.strategies.onebit_script import score
from wrapper.examples.onebit import classifier, digits

SAMPLES, BATCH = 97, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--hurry", type=Path)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lamb = OneBitLamb(warmup_steps=10)
    job = ones.init(batch=BATCH, max_batch=24, epochs=args.epochs, strategy=lamb)
    torch.manual_seed(0)
    plain = classifier()
    model = job.ddp(plain)
    optimizer = lamb.optimizer(plain.parameters(), lr=0.002)
    optimizer = job.register(model=model, optimizer=optimizer)
    loader = job.loader(TensorDataset(*(tensor[:SAMPLES] for tensor in digits()[0].tensors)))
    world, seen = 0, []
    for _ in job.epochs():
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if job.world != world:
                world = job.world
                parts = [state["residual"].flatten() for state in optimizer.state.values()]
                seen.append((job.progress.step, world, torch.cat(parts) if parts else torch.zeros(0)))
                torch.save(seen, args.out.parent / f"seen-{os.getpid()}.pt")
            optimizer.step()
            pace(args.step_ms, args.hurry, job.progress.epoch / args.epochs)
    states = [p.detach() for p in plain.parameters()] + [state["exp_avg"] for state in optimizer.state.values()]
    torch.save(
        [torch.cat([s.flatten() for s in states]), score(plain), seen], args.out.parent / f"end-{os.getpid()}.pt"
    )


if __name__ == "__main__":
    main()

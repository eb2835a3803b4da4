"""As `ring_script`, as a job of blocks: it takes the arguments that tests of blocks give, and says its loss."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import ones_wrapper as ones
from tests.wrapper.pace import pace
from tests.wrapper.strategies import script
from tests.wrapper.strategies.ring_script import BATCH, SEED, data, model_of, optimizer_of, ring
from wrapper.examples.lm_ring import losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--hurry", type=Path)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    its = ring()
    job = ones.init(batch=BATCH, max_accumulation_steps=8, epochs=args.epochs, strategy=its)
    plain = model_of(its)
    model = job.ddp(plain)
    optimizer = job.register(model=model, optimizer=optimizer_of(model))
    loader = job.loader(data(), seed=SEED)
    for _ in job.epochs():
        for (pieces,) in loader:
            loss = its.mean(losses(model, its, pieces))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            pace(args.step_ms, args.hurry, job.progress.epoch / args.epochs)
    if job.rank == 0:
        args.out.write_text(json.dumps({"parameters": script.flat(plain.parameters())}))


if __name__ == "__main__":
    main()

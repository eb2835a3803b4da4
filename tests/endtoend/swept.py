"""One member of a sweep, or several: what `ones.strategies.sweep` finds. Paced as a GPU, until there is a `hurry`."""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.fusion import Fused

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--code", type=int, default=0, help="exit code of the member")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--step-ms", type=float, default=60.0, help="of a step, however many members train in it")
sweep = ones.strategies.sweep(parser)
own = next(iter(sweep.members.values()))
hurry = sweep.folder(next(iter(sweep.members))) / "hurry"

torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
y = x.sum(1, keepdim=True)
models, optimizers = {}, {}
for name, args in sweep.members.items():
    torch.manual_seed(1)
    models[name] = nn.Linear(4, 1).double()
    optimizers[name] = torch.optim.SGD(models[name].parameters(), lr=args.lr)

job = ones.init(batch=16, epochs=own.epochs, strategy=Fused(members=len(models)))
fused, members = ones.strategies.fuse(models, optimizers, loss=mse_loss)
model = job.ddp(fused)
optimizer = job.register(model=model, optimizer=members)
loader = job.loader(TensorDataset(x, y))
for _ in job.epochs():
    for name in sweep.left():
        fused.stop(name)
    for inputs, target in loader:
        optimizer.zero_grad()
        model(inputs, target).sum().backward()
        optimizer.step()
        if not hurry.exists():
            time.sleep(own.step_ms / 1000)
for name, args in sweep.members.items():
    members.save(sweep.folder(name), name)
    sweep.done(name, args.code)
print("trained", *sweep.members, flush=True)
sys.exit(own.code)

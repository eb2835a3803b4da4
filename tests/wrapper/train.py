"""The training script of these tests: a small regression in float64, with ways to go wrong."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones

sys.path.append(str(Path(__file__).parents[2]))  # it is started by its path, from anywhere
from tests.wrapper.pace import pace

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=97)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--max-local-batch", type=int, default=32)
parser.add_argument("--step-ms", type=float, default=0.0)
parser.add_argument("--sample-ms", type=float, default=0.0, help="of each sample; every second rank takes five times")
parser.add_argument("--uneven", action="store_true")
parser.add_argument("--hurry", type=Path, help="no such time is spent any more once there is this file")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--max-passes", type=int, default=1)
parser.add_argument("--gamma", type=float, default=0.8)
parser.add_argument("--nan-at", type=int, default=-1, help="step after which the loss is not a number")
parser.add_argument("--memory", type=int, default=0, help="samples a pass that fit into the emulated memory")
parser.add_argument("--enough", type=int, default=-1, help="step from which on the script needs no further epoch")
parser.add_argument("--full", type=int, nargs=2, default=(-1, -1), help="steps between which the disk is full")
parser.add_argument("--gathers", action="store_true", help="each batch over all ranks")
parser.add_argument("--sharded", action="store_true", help="by FSDP2")
parser.add_argument("--ahead", action="store_true", help="each batch is asked for before the one before is trained on")
parser.add_argument("--reads-loss", action="store_true", help="after each epoch, as many scripts do")
parser.add_argument("--skips", type=int, default=-1, help="step in which rank 1 leaves out a batch")
parser.add_argument("--out", type=Path)
args = parser.parse_args()

job = ones.init(
    batch=args.batch,
    max_batch=64,
    max_local_batch=args.max_local_batch,
    max_accumulation_steps=args.max_passes,
    epochs=args.epochs,
    noise_scale=False,
    uneven=args.uneven,
    shares="equal" if args.gathers else "all",
)
torch.manual_seed(job.rank)  # the parameters of rank 0 have to reach all
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
model = job.fsdp(model.double(), modules=torch.nn.Linear) if args.sharded else job.ddp(model.double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=args.gamma)
generator = torch.Generator().manual_seed(1)
x = torch.randn(args.samples, 8, generator=generator, dtype=torch.float64)
optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)
loader = job.loader(TensorDataset(x, x.prod(1, keepdim=True)), seed=3, num_workers=args.workers)
step = job.progress.step


def batches() -> Iterator[Any]:
    """The loader's batches; with --ahead the next one is asked for first."""
    if not args.ahead:
        yield from loader
        return
    coming = iter(loader)
    held = next(coming, None)
    while held is not None:
        following = next(coming, None)
        yield held
        held = following


for _ in job.epochs():
    for inputs, target in batches():
        if job.rank == 1 and job.progress.step == args.skips:
            args.skips = -1
            continue
        if 0 < args.memory < len(inputs):
            raise torch.OutOfMemoryError(f"emulated: {len(inputs)} samples do not fit")
        if args.sample_ms and not (args.hurry and args.hurry.exists()):
            time.sleep(len(inputs) * args.sample_ms / 1000 * (5 if job.rank % 2 else 1))
        if args.gathers:
            torch.distributed.all_gather([torch.zeros_like(inputs) for _ in range(job.world)], inputs)
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        if step == args.nan_at:
            loss = loss * torch.nan
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.loss(loss)
        pace(args.step_ms, args.hurry, job.progress.epoch / args.epochs)
        if job.updates:
            step += 1
        if step in args.full:
            limit = 20_000 if step == args.full[0] else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if args.reads_loss:
        print(loss.item())  # fails in an epoch without a step
    scheduler.step()
    if 0 <= args.enough <= job.progress.step:  # which newcomers know, too
        break
whole = [p.full_tensor() if args.sharded else p for p in model.parameters()] if args.out else []
if args.out and job.rank == 0:
    parameters = torch.cat([p.detach().flatten() for p in whole]).tolist()
    threads = os.environ.get("OMP_NUM_THREADS")
    args.out.write_text(json.dumps({"parameters": parameters, "lr": optimizer.param_groups[0]["lr"], "omp": threads}))

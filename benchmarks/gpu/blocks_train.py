"""The script of the checks with blocks: normalisation, fused AdamW, a state of `--megabytes`.

Each rank writes a line a step: when it ended, with how many ranks, and a sum over the bits of its state.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.network.transfer import Received
from tests.wrapper.pace import pace

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--hurry", type=Path)
parser.add_argument("--step-ms", type=float)
parser.add_argument("--out", type=Path)
parser.add_argument("--samples", type=int)
parser.add_argument("--megabytes", type=float, default=1.0, help="of parameters and moments")
parser.add_argument("--sharded", action="store_true", help="by FSDP2: then changes begin terms")
parser.add_argument("--fill", type=float, default=0.0, help="share of the free memory that torch's cache holds")
parser.add_argument("--frozen-gb", type=float, default=0.0, help="of parameters that are not trained")
parser.add_argument("--slow-s", type=float, default=0.0, help="how long a newcomer takes over what it got")
args = parser.parse_args()

job = ones.init(batch=16, max_batch=32, max_local_batch=32, epochs=args.epochs)
torch.manual_seed(0)
width = max(8, int((args.megabytes * 1e6 / (4 * 3 * 4)) ** 0.5))  # four square layers, and two moments of each
layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)) for _ in range(4)]
if args.sharded:
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(4)]
plain = torch.nn.Sequential(torch.nn.Linear(8, width), *layers, torch.nn.Linear(width, 1))
if args.frozen_gb:
    plain.frozen = torch.nn.Parameter(torch.full((int(args.frozen_gb * 1e9 / 4),), 7.0), requires_grad=False)
model = job.fsdp(plain, modules=torch.nn.Linear) if args.sharded else job.ddp(plain)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)
optimizer = job.register(model=model, optimizer=optimizer)
x = torch.randn(args.samples, 8, generator=torch.Generator().manual_seed(1))
loader = job.loader(TensorDataset(x), seed=3)
cuda, task = job.device.type == "cuda", int(os.environ["SLURM_ARRAY_TASK_ID"])
if cuda and args.fill:
    held = torch.empty(int(args.fill * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device=job.device)
    del held


def slow(received: Received, answer: Callable[[Received], None] = Received.answer) -> None:
    time.sleep(args.slow_s)
    answer(received)


if args.slow_s:
    Received.answer = slow  # type: ignore[method-assign]


def bits() -> int:
    """Of parameters and moments; those of another rank are the same if this is."""
    trained = (one for one in model.parameters() if one.requires_grad)
    moments = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    state = [tensor.detach() for tensor in (*trained, *moments)]
    return int(sum(tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in state))


with (args.out.parent / f"steps-{task}-{os.getpid()}.jsonl").open("w", buffering=1) as file:
    for _ in job.epochs():
        for (inputs,) in loader:
            loss = model(inputs.to(job.device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pace(args.step_ms, args.hurry, job.progress.epoch / args.epochs)
            state = 0 if args.sharded else bits()
            line = {"step": job.progress.step, "world": job.world, "bits": state}
            if cuda:
                line |= {"reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
            file.write(json.dumps({"time": time.time(), "task": task, **line}) + "\n")

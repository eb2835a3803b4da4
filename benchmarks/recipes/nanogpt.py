"""A language model in the manner of nanoGPT: an endless loop over random crops, micro-steps, a schedule by hand."""

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

context, micro_batch, accumulation = 8, 4, 2
max_iters, warm_up, rate, least_rate, clip = 60, 6, 3e-3, 3e-4, 1.0
text = torch.randint(32, (1281,), generator=torch.Generator().manual_seed(0)).cumsum(0) % 32

if "RANK" in os.environ:
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    master, offset = dist.get_rank() == 0, dist.get_rank()
    accumulation //= dist.get_world_size()
else:
    device, master, offset = torch.device("cuda" if torch.cuda.is_available() else "cpu"), True, 0
torch.manual_seed(1337 + offset)


def crops(starts):
    return text[starts[:, None] + torch.arange(context)], text[starts[:, None] + 1 + torch.arange(context)]


def random_batch():
    x, y = crops(torch.randint(len(text) - context - 1, (micro_batch,)))
    return x.to(device), y.to(device)


def rate_at(step):
    if step < warm_up:
        return rate * (step + 1) / warm_up
    return least_rate + (rate - least_rate) * (1 + math.cos(math.pi * (step - warm_up) / (max_iters - warm_up))) / 2


model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32)).to(device)
decayed = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler(device.type, enabled=False)
step = 0
if Path("ckpt.pt").exists():
    saved = torch.load("ckpt.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
raw = model
if dist.is_initialized():
    model = DistributedDataParallel(model)

x, y = random_batch()
while step < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step)
    for micro_step in range(accumulation):
        if dist.is_initialized():
            model.require_backward_grad_sync = micro_step == accumulation - 1
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulation
        x, y = random_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    if step % 20 == 0 and master:
        print(f"step {step}: loss {loss.item() * accumulation:.3f}", flush=True)
        torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "ckpt.pt")

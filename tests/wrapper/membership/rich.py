"""A training script with much to carry: running statistics, moments, an average of the parameters, a scaler, a
scheduler that steps at each step, accumulation, hooks of the script's own. Each process leaves its state at the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from tests.wrapper.pace import pace

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--hurry", type=Path)
parser.add_argument("--step-ms", type=float)
parser.add_argument("--static", action="store_true")
parser.add_argument("--views", action="store_true")
parser.add_argument("--out", type=Path)
args = parser.parse_args()


class Centred(torch.nn.Module):
    """Takes a running mean off its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Average:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.values = [p.detach().clone() for p in model.parameters()]
        self.count = 0

    def update(self) -> None:
        self.count += 1
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        for value, loaded in zip(self.values, state["values"], strict=True):
            value.copy_(loaded)


job = ones.init(
    batch=16, max_batch=64, max_local_batch=64 if args.static else 6, max_accumulation_steps=8, epochs=args.epochs,
    checkpoint_every_s=0.5,
)  # fmt: skip
torch.manual_seed(job.rank)
plain = torch.nn.Sequential(
    torch.nn.Linear(8, 32), Centred(), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
)
frozen = torch.nn.Linear(3, 3)
plain.frozen = frozen.requires_grad_(False)
plain.frozen.forward = lambda x: x  # type: ignore[method-assign]
model = job.ddp(plain, static_graph=args.static, gradient_as_bucket_view=args.views)
calls = []
model.register_forward_hook(lambda *_: calls.append(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = own = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
average, scaler = Average(plain), torch.amp.GradScaler("cpu", enabled=True)
optimizer, scheduler, average, scaler = job.register(
    model=model, optimizer=optimizer, scheduler=scheduler, average=average, scaler=scaler
)
x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
loader = job.loader(TensorDataset(x, x.prod(1, keepdim=True)), seed=3)
for _ in job.epochs():
    for inputs, target in loader:
        calls.clear()
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        assert calls, "the script's hook is gone"
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update()
        job.loss(loss)
        pace(args.step_ms, args.hurry, job.progress.epoch / args.epochs)
assert scheduler.scheduler is own and own.last_epoch == job.base_steps == args.epochs * len(loader)
rank = torch.distributed.get_rank()
state = {
    "parameters": list(plain.parameters()), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
    "average": average.state_dict(), "scaler": scaler.state_dict(), "lr": job.lr_factor, "batch": job.batch,
    "progress": {name: value for name, value in vars(job.progress).items() if name not in ("trained_s", "failures")},
}  # fmt: skip
torch.save(state, args.out.parent / f"state-{rank}.pt")

"""Three fused members with optimizer numbers and schedules of their own, in double precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.fusion import Fused
from tests.wrapper.strategies.script import end, pace

SAMPLES, BATCH, EPOCHS, INNER = 120, 8, 4, 6
RATES = {"a": 1e-3, "b": 3e-3, "c": 1e-2}
SEED = 3


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, INNER, generator=draw, dtype=torch.float64)
    return x, x.square().sum(1, keepdim=True)


def parts() -> tuple[
    dict[str, nn.Module], dict[str, torch.optim.Optimizer], dict[str, torch.optim.lr_scheduler.LRScheduler]
]:
    """Models, optimizers and schedules, each an ordinary one."""
    torch.manual_seed(1)
    models: dict[str, nn.Module] = {
        name: nn.Sequential(nn.Linear(INNER, 8), nn.Tanh(), nn.Linear(8, 1)).double() for name in RATES
    }
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: torch.optim.AdamW(model.parameters(), lr=RATES[name]) for name, model in models.items()
    }
    schedules: dict[str, torch.optim.lr_scheduler.LRScheduler] = {
        name: torch.optim.lr_scheduler.ExponentialLR(its, 0.5 + 0.1 * place)
        for place, (name, its) in enumerate(optimizers.items())
    }
    return models, optimizers, schedules


def ordered(states: Mapping[str, Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [states[name][key] for name in RATES for key in sorted(states[name])]


def strategy() -> Fused:
    parameters = sum(p.numel() * p.element_size() for p in parts()[0]["a"].parameters())
    return Fused(members=len(RATES), parameter_bytes=parameters)


def main() -> None:
    job = ones.init(batch=BATCH, max_local_batch=BATCH, epochs=EPOCHS, strategy=strategy())
    models, optimizers, schedules = parts()
    fused, members = ones.strategies.fuse(models, optimizers, loss=mse_loss)
    model = job.ddp(fused)
    optimizer, schedules = job.register(model=model, optimizer=members, schedules=schedules)
    loader = job.loader(TensorDataset(*data()), seed=SEED)
    for _ in job.epochs():
        for x, y in loader:
            optimizer.zero_grad()
            model(x, y).sum().backward()
            optimizer.step()
            pace()
        for schedule in schedules.values():
            schedule.step()
    end(job, ordered({name: fused.member(name) for name in RATES}))


if __name__ == "__main__":
    main()

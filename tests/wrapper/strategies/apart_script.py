"""A linear regression in float64 by a strategy whose ranks go apart: `lsgd` or `decentlam`."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.decentlam.strategy import DecentLam
from ones_wrapper.strategies.lsgd import Lsgd
from tests.wrapper.strategies import script

SAMPLES, EPOCHS, BATCH, SEED = 96, 60, 4, 3


def data() -> TensorDataset:
    """The same on every rank; noise is small, so that steps of any batch end close to the optimum."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    noise = 0.01 * torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None] + 0.5 + noise)


def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def plain() -> list[float]:
    """Momentum SGD in one process, on the same batches."""
    (model, optimizer, scheduler), (x, y) = made(0), data().tensors
    for step, chosen in enumerate(script.steps(SAMPLES, BATCH, EPOCHS, SEED), 1):
        optimizer.zero_grad()
        (model(x[chosen]) - y[chosen]).square().mean().backward()
        optimizer.step()
        if step % (SAMPLES // BATCH) == 0:
            scheduler.step()
    return script.flat(model.parameters())


def main() -> None:
    """The same loop for both."""
    strategy = Lsgd(period=4) if "lsgd" in sys.argv else DecentLam("ring", momentum=0.8)
    job = ones.init(batch=BATCH, max_batch=4 * BATCH, epochs=EPOCHS, scale_lr=False, strategy=strategy)
    model, optimizer, scheduler = made(job.rank)
    model = job.ddp(model)
    optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = job.loader(data(), seed=SEED)
    for _ in job.epochs():
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = ((model(inputs) - target) ** 2).mean()
            loss.backward()
            optimizer.step()
            job.loss(loss)
            script.pace()
        scheduler.step()
    script.end(job, job.unwrap(model).parameters())


if __name__ == "__main__":
    main()

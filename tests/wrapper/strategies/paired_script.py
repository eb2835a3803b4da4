"""A regression in float64 by the strategy of two ranks a replica."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from tests.wrapper.paired import Paired
from tests.wrapper.strategies import script

SAMPLES, EPOCHS, BATCH, SEED = 48, 4, 8, 3


def model_and_data() -> tuple[torch.nn.Module, TensorDataset]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model.double(), TensorDataset(x, x.prod(1, keepdim=True))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Each rank computes its part of a local batch's loss."""
    strategy = Paired()
    job = ones.init(batch=BATCH, max_local_batch=4, max_accumulation_steps=2, epochs=EPOCHS, strategy=strategy)
    plain, data = model_and_data()
    model = job.ddp(plain)
    optimizer = job.register(model=model, optimizer=optimizer_of(model))
    loader = job.loader(data, seed=SEED)
    for _ in job.epochs():
        for inputs, target in loader:
            optimizer.zero_grad()
            errors = (model(inputs) - target)[strategy.half :: strategy.halves] ** 2
            loss = errors.sum() / len(inputs)
            loss.backward()
            optimizer.step()
            job.loss(loss)
            script.pace()
    script.end(job, plain.parameters())


if __name__ == "__main__":
    main()

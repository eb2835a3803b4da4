"""The regression of `paired_script.py` on ranks of different speed (emulated: every second one sleeps longer)."""

from __future__ import annotations

import time

import torch

import ones_wrapper as ones
from tests.wrapper.strategies import script
from tests.wrapper.strategies.paired_script import BATCH, SEED, model_and_data, optimizer_of

EPOCHS = 16


def main() -> None:
    """With the shares that the ranks agree on."""
    job = ones.init(batch=BATCH, epochs=EPOCHS, uneven=True)
    plain, data = model_and_data()
    model = job.ddp(plain)
    optimizer = job.register(model=model, optimizer=optimizer_of(model))
    loader = job.loader(data, seed=SEED)
    for _ in job.epochs():
        for inputs, target in loader:
            time.sleep(len(inputs) * (0.015 if job.rank % 2 else 0.003))
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), target)
            loss.backward()
            optimizer.step()
            job.loss(loss)
            script.pace()
    script.end(job, plain.parameters())


if __name__ == "__main__":
    main()

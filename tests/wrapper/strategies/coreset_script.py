"""A regression in float64 on a third of its samples, chosen anew every two epochs by what the model makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from tests.wrapper.strategies import script
from tests.wrapper.strategies.paired_script import model_and_data, optimizer_of

EPOCHS, BATCH, SEED, EVERY, SIZE, SHARD = 6, 4, 3, 2, 20, 16


def features(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Each sample's gradient with respect to the input of a linear model."""
    found: torch.Tensor = (model(batch[0]) - batch[1]) * batch[0]
    return found


def labels(data: TensorDataset) -> torch.Tensor:
    return (data.tensors[1] > 0).long().flatten()


def main() -> None:
    """The weighted mean over the local batch."""
    job = ones.init(batch=BATCH, epochs=EPOCHS)
    plain, data = model_and_data()
    model = job.ddp(plain)
    optimizer = job.register(model=model, optimizer=optimizer_of(model))

    def in_evaluation(batch: Any) -> torch.Tensor:
        assert not model.training and not torch.is_grad_enabled()
        return features(model, batch)

    coreset = ones.strategies.Coreset(
        SIZE / len(data), every=EVERY, features=in_evaluation, labels=labels(data), shard=SHARD
    )
    loader = job.loader(data, seed=SEED, coreset=coreset)
    for _ in job.epochs():
        for (inputs, target), weights in loader:
            optimizer.zero_grad()
            loss = (weights.double() * (model(inputs) - target).square().flatten()).mean()
            loss.backward()
            optimizer.step()
            job.loss(loss)
            script.pace()
    script.end(job, plain.parameters())


if __name__ == "__main__":
    main()

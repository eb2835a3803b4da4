"""Digits by 1-bit LAMB, with accumulation steps and shares of unequal size; ends with accuracy and loss.

Its warm-up is over at once, so that resizes come after it; while there is the file HOLD it stays in it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.onebit_lamb import OneBitLamb
from tests.wrapper.strategies import script
from wrapper.examples.onebit import classifier, digits

SAMPLES, EPOCHS, BATCH, SEED, WARMUP = 700, 12, 50, 3, 8


def data_of(data: TensorDataset) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[:SAMPLES] for tensor in data.tensors)


def optimizer_of(lamb: OneBitLamb, model: nn.Module) -> torch.optim.Optimizer:
    return lamb.optimizer(model.parameters(), lr=0.005, weight_decay=0.01)


def score(model: nn.Module) -> torch.Tensor:
    """Accuracy and loss on digits that were held out."""
    x, y = digits()[1].tensors
    with torch.no_grad():
        found = model(x)
    return torch.stack([(found.argmax(1) == y).float().mean(), cross_entropy(found, y)])


def main() -> None:
    lamb = OneBitLamb(warmup_steps=WARMUP)
    limits = {"max_batch": 2 * BATCH, "max_local_batch": 25, "max_accumulation_steps": 2}
    job = ones.init(batch=BATCH, epochs=EPOCHS, strategy=lamb, **limits)
    torch.manual_seed(0)
    plain = classifier()
    model = job.ddp(plain)
    optimizer = job.register(model=model, optimizer=optimizer_of(lamb, plain))
    loader = job.loader(TensorDataset(*data_of(digits()[0])), seed=SEED)
    for _ in job.epochs():
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            job.loss(loss)
            if lamb.batch_fixed():
                script.pace()
            else:
                script.hold()
    script.end(job, [score(plain)])


if __name__ == "__main__":
    main()

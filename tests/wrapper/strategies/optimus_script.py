"""A language model in float64 on meshes of 1 × 1 or 2 × 2 ranks."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import StrategyLimits
from ones_wrapper.strategies.optimus import Optimus2D
from tests.wrapper.layouts.dense import HEADS, HIDDEN, LENGTH, VOCAB, Meshed, in_double, texts
from tests.wrapper.strategies import script

SAMPLES, EPOCHS, BATCH, SEED = 48, 4, 8, 3
SQUARES = "SQUARES"
"""In the environment: the ranks are one mesh."""


def optimus(kind: type[Optimus2D] = Optimus2D) -> Optimus2D:
    """The largest mesh that the ranks make."""
    return kind(q=(1, 2), hidden=HIDDEN, heads=HEADS, vocab=VOCAB, layers=1, length=LENGTH, element_bytes=8)


class Squares(Optimus2D):
    """One mesh alone, of one rank or of four."""

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        its = super().limits(spec, most_gpus, ranks_per_node)
        return replace(its, sizes=tuple(row for row in its.sizes if row.gpus in (1, 4)))


def data() -> TensorDataset:
    return TensorDataset(texts(SAMPLES, 1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.001)


def main() -> None:
    its = optimus(Squares if SQUARES in os.environ else Optimus2D)
    job = ones.init(batch=BATCH, max_local_batch=4, max_accumulation_steps=2, epochs=EPOCHS, strategy=its)
    model = job.ddp(in_double(lambda: Meshed(its.mesh)))
    optimizer = job.register(model=model, optimizer=optimizer_of(model))
    loader = job.loader(data(), seed=SEED)
    for _ in job.epochs():
        for (text,) in loader:
            rows = its.rows(text)
            loss = its.cross_entropy(model(rows[:, :-1]), rows[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.loss(loss)
            script.pace()
    script.end(job, [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)])


if __name__ == "__main__":
    main()

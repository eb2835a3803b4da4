"""Uneven ranks: how far training is from one process, and how much shorter the step becomes.

Four ranks (gloo, one machine) train a small network in float64. Their speeds are emulated: each sleeps for its samples,
at `PACES` samples a second. Ideally a step takes batch / sum of the paces, with even shares (batch / 4) / the slowest.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import numpy as np
import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing

PACES = (800, 400, 200, 100)
"""Samples a second of each rank."""
BATCH, SAMPLES, EPOCHS = 64, 960, 4
LAST = 15
"""Steps at the end whose median counts."""


def train(uneven: bool, paces: tuple[int, ...]) -> int | None:
    """Puts the rank's step time and its samples a step, and the parameters."""
    job = ones.init(batch=BATCH, epochs=EPOCHS, uneven=uneven)
    torch.manual_seed(0)
    model = job.ddp(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = job.register(model=model, optimizer=optimizer)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = job.loader(TensorDataset(x, x.prod(1, keepdim=True)), seed=3)
    times: list[float] = []
    sizes: list[int] = []
    began = time.perf_counter()
    for _ in job.epochs():
        for inputs, target in loader:
            now = time.perf_counter()
            times.append(now - began)
            began = now
            if paces:
                time.sleep(len(inputs) / paces[job.rank])
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), target).backward()
            optimizer.step()
            sizes.append(len(inputs))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    testing.put((median(times[-LAST:]), sizes[-1], flat.tolist()))
    return None


def measure() -> dict[str, float]:
    """Ratios are step times over those with even shares; `ideal_ratio` is the least that these paces allow."""
    even = testing.run(partial(train, False, PACES), ranks=4)
    uneven = testing.run(partial(train, True, PACES), ranks=4)
    alike = testing.run(partial(train, False, (400,) * 4), ranks=4)
    measured = testing.run(partial(train, True, (400,) * 4), ranks=4)
    alone = np.array(testing.run(partial(train, False, ()), ranks=1)[0].value[2])

    def error(puts: list[testing.Put]) -> float:
        return max(float(np.abs(np.array(put.value[2]) - alone).max()) for put in puts)

    def step_s(puts: list[testing.Put]) -> float:
        return max(put.value[0] for put in puts)

    return {
        "max_error": error(uneven),
        "max_error_even": error(even),
        "step_ratio": step_s(uneven) / step_s(even),
        "ideal_ratio": (BATCH / sum(PACES)) / (BATCH / 4 / min(PACES)),
        "step_ratio_of_like_ranks": step_s(measured) / step_s(alike),
        **{f"samples_of_rank_{put.rank}": float(put.value[1]) for put in uneven},
    }

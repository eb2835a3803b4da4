"""Two models trained in turns in float64, one of whose optimizers steps more often; with a dict of plain values, and a
scheduler for each. `train` is the same without the wrapper. `--out` gets what they end with.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from tests.wrapper.pace import pace

SAMPLES, BATCH, SEED = 97, 16, 3


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, z = (torch.randn(SAMPLES, size, generator=generator, dtype=torch.float64) for size in (4, 3))
    return TensorDataset(x, z)


def made(seed: int) -> dict[str, torch.nn.Module]:
    torch.manual_seed(seed)
    g = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
    return {"g": g, "d": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()}


def optimizers(models: dict[str, Any]) -> dict[str, torch.optim.Optimizer]:
    return {
        "g": torch.optim.Adam(models["g"].parameters(), lr=0.01),
        "d": torch.optim.SGD(models["d"].parameters(), lr=0.02, momentum=0.9),
    }


def turn(models: dict[str, Any], by: dict[str, Any], x: torch.Tensor, z: torch.Tensor, step: int) -> None:
    """One batch: the discriminator steps twice, the generator at every second batch. What its loss leaves in the
    discriminator's gradients is zeroed before they are used. Between batches the discriminator is frozen."""
    models["d"].requires_grad_(True)
    fake = models["g"](z)
    for _ in range(2):
        loss = (models["d"](x) - 1).square().mean() + models["d"](fake.detach()).square().mean()
        by["d"].zero_grad()
        loss.backward()
        by["d"].step()
    if step % 2:
        by["g"].zero_grad()
        (models["d"](fake) - 1).square().mean().backward()
        by["g"].step()
    models["d"].requires_grad_(False)


def train(batches: Iterable[list[int]]) -> dict[str, torch.Tensor]:
    """In one process without the wrapper; the parameters."""
    models, tensors = made(0), data().tensors
    by = optimizers(models)
    for step, indices in enumerate(batches):
        turn(models, by, tensors[0][indices], tensors[1][indices], step)
    return parameters(models)


def parameters(models: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{n}.{k}": v.detach().clone() for n, m in models.items() for k, v in m.named_parameters()}


def elastic(
    epochs: int, each: Callable[[Any], object], log: Path | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """With the wrapper; `each` is called in each step, whose number goes to `log`. Parameters and plain values.

    Each epoch ends with an evaluation over all ranks.
    """
    import ones_wrapper as ones

    job = ones.init(batch=BATCH, max_batch=64, max_local_batch=32, epochs=epochs, scale_lr=False)
    models = {name: job.ddp(model) for name, model in made(job.rank).items()}
    models["d"].requires_grad_(False)  # as between batches
    own = {"steps": 0, "seen": [0.0], "point": 1 - 2j}
    by, counters = job.register(model=models, optimizer=optimizers(models), counters=own)
    assert counters is own and set(by) == {"g", "d"}
    loader = job.loader(data(), seed=SEED)
    lines = job.open(log) if log else None
    for _ in job.epochs():
        for x, z in loader:
            each(job)
            turn(models, by, x, z, counters["steps"])
            counters["steps"] += 1
            counters["seen"][0] += 0.5
            if lines is not None:
                print(counters["steps"], file=lines)
        parts = [x.sum(dtype=torch.float64) for x, _ in job.evaluate(data(), batch=7)]
        found = job.mean(sum(parts, torch.tensor(0.0)), SAMPLES * 4 / job.world)
        assert abs(found - float(data().tensors[0].mean())) < 1e-12, found
    return parameters({name: job.unwrap(model) for name, model in models.items()}), counters


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--hurry", type=Path)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def wait(job: Any) -> None:
        pace(args.step_ms, args.hurry, job.progress.epoch / args.epochs)

    found = elastic(args.epochs, wait, args.out.parent / "log")
    torch.save(found, args.out.parent / f"state-{torch.distributed.get_rank()}.pt")

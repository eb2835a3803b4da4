"""What training loses by a batch that grows: the same seeds undisturbed, and with four times the batch from the middle.

    python benchmarks/adaptive_batch.py --seeds 3 --json adaptive_batch.json

Two tasks, both on data that is there: the digits of `examples/cnn.py`, shifted and noisy at random, with SGD and the
linear rule; `examples/gpt.py`'s model and schedule, with AdamW and the square root's. The batch grows by an order at a
restart, as in a resize. Schedules follow progress, so both runs use as many samples and end at the same rate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.protocol import Order, encode
from wrapper.examples.cnn import digits
from wrapper.examples.gpt import GPT, evaluate, library

GROWTH = 4
WARM_UP = 50


class Shifted(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Digits shifted by up to a pixel each way, with noise."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.data[index]
        down, right = torch.randint(3, (2,)).tolist()
        padded = nn.functional.pad(image, (1, 1, 1, 1), value=-1.0)
        return padded[:, down : down + 8, right : right + 8] + 0.1 * torch.randn(1, 8, 8), label


@dataclass(frozen=True)
class Task:
    """Something to learn."""

    name: str
    batch: int
    epochs: int
    rule: str
    parts: Callable[[], tuple[nn.Module, Dataset[Any], Callable[[nn.Module], float]]]
    """Model, training data, and what is measured at the end."""
    optimizer: Callable[[Any], torch.optim.Optimizer]


def cnn() -> tuple[nn.Module, Dataset[Any], Callable[[nn.Module], float]]:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    train, test = digits()

    def accuracy(model: nn.Module) -> float:
        x, y = test.tensors
        with torch.no_grad():
            return float((model(x).argmax(1) == y).float().mean())

    return model, Shifted(train), accuracy


def gpt() -> tuple[nn.Module, Dataset[Any], Callable[[nn.Module], float]]:
    train, test, characters = library(128)
    return GPT(characters), train, lambda model: evaluate(model, test, torch.device("cpu"))


TASKS = (
    Task("digits, accuracy", 32, 20, "linear", cnn, partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-4)),
    Task("gpt, validation loss", 16, 6, "sqrt", gpt, partial(torch.optim.AdamW, lr=0.003, weight_decay=0.1)),
)


def train(task: Task, seed: int, grows: bool) -> int | None:
    """One start; the first of two where the batch grows."""
    start, folder = int(os.environ["SLURM_RESTART_COUNT"]), Path(os.environ["ONES_JOB_DIR"])
    if start:
        (folder / "orders.json").write_bytes(encode(Order(1, start, batch=GROWTH * task.batch)))
    job = ones.init(
        batch=task.batch, max_batch=GROWTH * task.batch, epochs=task.epochs, lr_rule=task.rule, lr_ramp=WARM_UP
    )
    torch.manual_seed(seed)
    model, data, measure = task.parts()
    model = job.ddp(model)
    optimizer = task.optimizer(model.parameters())
    loader = job.loader(data, seed=seed)
    steps = task.epochs * len(loader)

    def schedule(step: int) -> float:
        return min((step + 1) / WARM_UP, 0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))

    optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=LambdaLR(optimizer, schedule))
    for epoch in job.epochs():
        if grows and not start and epoch == task.epochs // 2:
            job.checkpoint()
            return 1
        model.train()
        for x, y in loader:
            loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    model.eval()
    testing.put((measure(model.module), job.progress.step, scheduler.get_last_lr()[0]))
    return None


def compare(task: Task, seeds: int) -> dict[str, Any]:
    """Both runs of each seed."""
    found: dict[bool, list[tuple[float, int, float]]] = {False: [], True: []}
    for seed in range(seeds):
        for grows, results in found.items():
            (put,) = testing.run(partial(train, task, seed, grows), timeout_s=1200)
            results.append(put.value)
            print(f"{task.name}, seed {seed}, {'grown' if grows else 'undisturbed'}: {put.value}", file=sys.stderr)
    fixed, grown = ([one[0] for one in found[grows]] for grows in (False, True))
    return {
        "undisturbed": fixed,
        "grown": grown,
        "mean_difference": statistics.mean(b - a for a, b in zip(fixed, grown, strict=True)),
        "deviation_of_undisturbed": statistics.stdev(fixed) if seeds > 1 else 0.0,
        "steps": [found[False][0][1], found[True][0][1]],
        "end_rate_error": max(abs(b[2] / a[2] - 1) for a, b in zip(found[False], found[True], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    text = json.dumps({task.name: compare(task, args.seeds) for task in TASKS}, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

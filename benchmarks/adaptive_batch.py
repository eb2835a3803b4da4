"""What a batch that grows within its rule's bound costs, and shrinking again: the same seeds undisturbed and so.

    python benchmarks/adaptive_batch.py --seeds 5 --json adaptive_batch.json

Small tasks of other models, sizes and data than those by which the rule was found: a GPT on the characters of the
project's own documents (AdamW), and a CNN on patterns that are shifted, scaled and noisy at random (SGD with momentum,
and with Nesterov's). From a quarter of the samples on the batch is what the rule says is free, at most eight times as
large; or that, and from 70 % on the script's own again; or, against the rule, eight times at once. Rate and noise
scale are the wrapper's own (`ones_wrapper.gradients`), in a loop without its processes. Schedules follow progress, so
all runs use the same samples. `--resized` trains the GPT in a job, through ten resizes at a fixed batch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.gradients.learning_rate import Rate
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group
from wrapper.examples import gpt as example

WARM_UP = 0.06
GROW, SHRINK = 0.25, 0.7
EXCHANGE = 20
"""Steps between two exchanges of the noise scale's sums."""
CONTEXT = 48
SIZES = (1, 2, 1, 3, 2, 1, 2, 3, 1, 2, 1)
"""Ranks of each start: ten resizes."""
ENV = {"ONES_REPORT_EVERY_S": "1", "OMP_NUM_THREADS": "1"}

Pairs = tuple[torch.Tensor, torch.Tensor]
Parts = tuple[nn.Module, Pairs, Pairs]
"""Model, training data, and what the loss is measured on at the end."""


@cache
def text_of_documents() -> str:
    return "".join(path.read_text() for path in sorted((Path(__file__).parents[1] / "docs").rglob("*.md")))


def documents(samples: int, seed: int) -> Parts:
    text = text_of_documents()
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    data = torch.tensor([known[character] for character in text])
    pieces = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(7))]
    test, train = pieces[:1500], pieces[1500:]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:samples]
    model = example.GPT(len(known), width=40, heads=2, layers=1)
    return model, (train[order, :-1], train[order, 1:]), (test[:, :-1], test[:, 1:])


def patterns(samples: int, seed: int) -> Parts:
    """Ten smooth patterns, shifted, scaled and noisy at random."""
    coarse = torch.randn(10, 1, 4, 4, generator=torch.Generator().manual_seed(3))
    smooth = nn.functional.interpolate(coarse, 12, mode="bilinear")[:, 0]

    def drawn(number: int, seed: int) -> Pairs:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(10, (number,), generator=generator)
        shifts = torch.randint(-2, 3, (number, 2), generator=generator).tolist()
        images = torch.stack([torch.roll(smooth[k], s, (0, 1)) for k, s in zip(labels.tolist(), shifts, strict=True)])
        images = images * (0.5 + torch.rand(number, 1, 1, generator=generator))
        return (images + 1.2 * torch.randn(images.shape, generator=generator))[:, None], labels

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(144, 10),
    )  # fmt: skip
    return model, drawn(samples, 100 + seed), drawn(4000, 1)


@dataclass(frozen=True)
class Task:
    """Something to learn."""

    batch: int
    steps: int
    parts: Callable[[int, int], Parts]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def tasks(rate: float, batch: float) -> dict[str, Task]:
    """By name; `rate` and `batch` multiply their own."""
    adam = partial(torch.optim.AdamW, lr=rate * 0.01, betas=(0.9, 0.98), weight_decay=0.05)
    sgd = partial(torch.optim.SGD, lr=rate * 0.02, momentum=0.9, weight_decay=1e-4)
    small, large = int(batch * 4), int(batch * 8)
    return {
        "gpt, adamw": Task(small, 800, documents, adam),
        "cnn, sgd": Task(large, 800, patterns, sgd),
        "cnn, nesterov": Task(large, 800, patterns, partial(sgd, nesterov=True)),
    }


def schedule(steps: int, step: int) -> float:
    return min((step + 1) / (WARM_UP * steps), 0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x).flatten(0, -2), y.flatten())


def train(task: Task, seed: int, way: str) -> dict[str, Any]:
    """One run."""
    torch.manual_seed(seed)
    samples = task.batch * task.steps
    model, (x, y), test = task.parts(samples, seed)
    optimizer = task.optimizer(model.parameters())
    scheduler = LambdaLR(optimizer, partial(schedule, task.steps))
    rate, progress = Rate(task.batch, optimizer), TrainingProgress()
    noise = NoiseScale(cast(Group, SimpleNamespace(rank=0, world=1, total=list)))
    batch, counted, batches = task.batch, 0, dict[int, int]()
    while progress.samples < samples:
        done = progress.samples / samples
        if done >= GROW and way != "undisturbed":
            wanted = 8 * task.batch if way == "forced" else rate.free(progress)
            batch = task.batch if way == "shrunk" and done >= SHRINK else wanted
            rate.admit(progress, batch)
            batches[batch] = batches.get(batch, 0) + 1
        end = min(progress.samples + batch, samples)
        rate.begin(progress, batch, end - progress.samples)
        noise.begin(progress.step)
        loss = loss_of(model, x[progress.samples : end], y[progress.samples : end])
        optimizer.zero_grad()
        loss.backward()
        if noise.looks:
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            noise.local(0, gradient, end - progress.samples, end - progress.samples)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        noise.step(end - progress.samples)
        rate.remember(progress)
        counted += end - progress.samples
        while counted >= task.batch:
            scheduler.step()
            counted -= task.batch
        progress.samples, progress.step = end, progress.step + 1
        if progress.step % EXCHANGE == 0:
            noise.exchange()
            progress.noise, progress.noise_low = noise.samples or 0.0, noise.low
    model.eval()
    with torch.no_grad():
        measured = float(loss_of(model, *test))
    return {"loss": measured, "steps": progress.step, "batches": batches, "noise": [progress.noise_low, progress.noise]}


def resized(task: Task, seed: int, sizes: tuple[int, ...]) -> int | None:
    """One start of a job at a fixed batch; it goes on at the next of `sizes`."""
    start = int(os.environ["SLURM_RESTART_COUNT"])
    job = ones.init(batch=task.batch, max_local_batch=2, max_accumulation_steps=task.batch, epochs=1)
    torch.manual_seed(seed)
    model, data, test = task.parts(task.batch * task.steps, seed)
    optimizer = task.optimizer(model.parameters())
    scheduler = LambdaLR(optimizer, partial(schedule, task.steps))
    model, optimizer, scheduler, loader = job.prepare(model, optimizer, scheduler, TensorDataset(*data))
    for _ in job.epochs():
        for x, y in loader:
            if start + 1 < len(sizes) and job.progress.samples >= (start + 1) * len(data[0]) // len(sizes):
                job.checkpoint()
                return sizes[start + 1]
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if job.updates:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    model.eval()
    with torch.no_grad():
        measured = float(loss_of(model.module, *test))
    if job.rank == 0:
        testing.put((measured, torch.cat([p.detach().flatten() for p in model.parameters()])))
    return None


def compare(name: str, task: Task, seeds: int, ways: list[str]) -> dict[str, Any]:
    """All ways of each seed, over the undisturbed one."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ("undisturbed", *ways)}
    for seed in range(seeds):
        for way, results in found.items():
            began = time.process_time()
            results.append(train(task, seed, way))
            seconds = time.process_time() - began
            print(f"{name}, seed {seed}, {way}, {seconds:.0f} s: {results[-1]}", file=sys.stderr, flush=True)
    plain = [one["loss"] for one in found["undisturbed"]]
    figures: dict[str, Any] = {"undisturbed": plain}
    rest = task.steps * (1 - GROW)
    for way in ways:
        ratios = [one["loss"] / loss for one, loss in zip(found[way], plain, strict=True)]
        saved = [(task.steps - one["steps"]) / rest for one in found[way]]
        figures[way] = {
            "loss_over_undisturbed": statistics.mean(ratios),
            "standard_error": statistics.stdev(ratios) / seeds**0.5 if seeds > 1 else None,
            "of_seeds": ratios,
            "steps_saved_of_the_rest": statistics.mean(saved),
        }
        print(f"{name}, {way}: {figures[way]}", file=sys.stderr, flush=True)
    return figures


def through_resizes(task: Task, seeds: int) -> list[dict[str, float]]:
    """Loss over that of the undisturbed job, and how far the weights are apart, of each seed."""
    found = []
    for seed in range(seeds):
        puts = [testing.run(partial(resized, task, seed, sizes), timeout_s=1500, env=ENV)[0] for sizes in ((1,), SIZES)]
        (still, before), (moved, after) = (put.value for put in puts)
        apart = float((after - before).abs().max())
        found.append({"loss_over_undisturbed": moved / still, "largest_difference_of_a_weight": apart})
        print(f"resized, seed {seed}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1.0, help="times the tasks' own rates")
    parser.add_argument("--batch", type=float, default=1.0, help="times the tasks' own batches")
    parser.add_argument("--tasks", nargs="*", metavar="TASK", help="these alone")
    parser.add_argument("--ways", nargs="*", default=["grown", "shrunk", "forced"])
    parser.add_argument("--resized", type=int, default=0, metavar="SEEDS", help="also ten resizes at a fixed batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    every = tasks(args.rate, args.batch)
    chosen = {name: task for name, task in every.items() if args.tasks is None or name in args.tasks}
    figures: dict[str, Any] = {name: compare(name, task, args.seeds, args.ways) for name, task in chosen.items()}
    if args.resized:
        figures["gpt, ten resizes at a fixed batch"] = through_resizes(every["gpt, adamw"], args.resized)
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

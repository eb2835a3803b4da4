"""What users ask for: GPUs and a batch that suit the job, as a well-informed user would choose them."""

from __future__ import annotations

import math

import numpy as np

from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.workloads.catalogue import Kind
from slurm_ones.simulate.workloads.workload import Submission

ONE_GPU = 0.65
"""Share of the users of small jobs that ask for one GPU, however well the job scales."""
USEFUL = (0.5, 0.8)
"""Goodput a GPU, relative to one GPU alone, at the sizes that a well-informed user chooses from (as in Pollux's study,
OSDI 2021, §5.1)."""

Ask = tuple[int, int]
"""GPUs and global batch."""


def ask(app: Application, kind: Kind, gpus: int, per_node: int, rng: np.random.Generator) -> Ask:
    """What one user asks for on a cluster of `gpus` GPUs."""
    modest, choice = rng.random() < ONE_GPU, rng.random()
    if kind.gpus:
        size = min(kind.gpus, gpus)
        return size, min(kind.base_batch * size, app.max_batch)
    if kind.size == "small" and modest:
        return 1, best(app, 1, per_node)[1]
    options = sensible(app, gpus, per_node)
    return options[int(choice * len(options))]


def mean_gpu_hours(app: Application, kind: Kind, gpus: int, per_node: int) -> float:
    """GPU-hours that such a job takes on average at what its users ask for."""

    def hours(size: int, batch: int) -> float:
        return size * app.seconds(-(-size // per_node), size, float(batch), 0.0) / 3600.0

    mean = float(np.mean([hours(*option) for option in sensible(app, gpus, per_node)]))
    if kind.size != "small":
        return mean
    return ONE_GPU * hours(1, best(app, 1, per_node)[1]) + (1.0 - ONE_GPU) * mean


def undisturbed_s(app: Application, asked: Submission, per_node: int) -> float:
    """Seconds that a job would run at the size and batch its user asks for, never resized."""
    size = min(asked.gpus, app.max_gpus)
    batch = float(min(max(asked.batch, app.min_batch or app.base_batch), app.max_batch))
    return app.seconds(-(-size // per_node), size, batch, 0.0, app.total * asked.epochs)


def sensible(app: Application, gpus: int, per_node: int) -> list[Ask]:
    """What a user may ask for: the sizes that keep each GPU as useful as `USEFUL` says, at the batch best there."""
    one, batch = best(app, 1, per_node)
    found, last = [], (1, batch)
    for size in _sizes(min(app.max_gpus, max(gpus // 2, 1)), per_node):
        goodput, batch = best(app, size, per_node)
        useful = goodput / one / size
        if USEFUL[0] <= useful <= USEFUL[1]:
            found.append((size, batch))
        elif useful > USEFUL[1]:
            last = (size, batch)
    return found or [last]


def best(app: Application, gpus: int, per_node: int) -> tuple[float, int]:
    """Goodput half-way through the training on `gpus` GPUs, and the batch that brings it: the base batch times a power
    of two."""
    batches = app.base_batch * 2 ** np.arange(math.floor(math.log2(app.max_batch / app.base_batch)) + 1)
    batches = batches[batches >= gpus] if batches[-1] >= gpus else batches[-1:]
    seconds = app.step_seconds(-(-gpus // per_node), gpus, batches.astype(np.float64))
    goodput = batches / seconds * app.efficiency(app.total / 2, batches)
    return float(goodput.max()), int(batches[goodput.argmax()])


def _sizes(most: int, per_node: int) -> list[int]:
    """Powers of two in a node, then whole nodes: sizes that any Slurm cluster can be asked for."""
    below = [2**i for i in range(per_node.bit_length()) if 2**i < per_node]
    return [n for n in [*below, *(per_node * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))] if n <= most]

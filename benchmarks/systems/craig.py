"""CRAIG: how many gradients a training needs on a coreset, against all data and against a random subset.

Logistic regression tells even from odd digits (scikit-learn's 1797). Counted are gradients of single samples until the
loss over all data is `TARGET` times the optimum; for each way of training the learning rate is the best of a grid. The
random subset, of the same size, is another one for each seed, and the median of the seeds counts. There are three ways:

- SGD, whose loss is looked at as training looks at it, at the end of each epoch over its data (`evaluations_ratio`).
  All data has the longer epochs, so a part of this ratio is that a subset is looked at more often.
- SGD, looked at after every `LOOK` gradients (`sgd_ratio_by_look`): what the subset saves besides.
- Gradient descent, each of whose steps takes all data or all of the subset (`descent_ratio`).

Where SGD on a tenth ends, however long it trains, is its floor.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from ones_wrapper.data.coreset import Chosen, select
from ones_wrapper.group import Group

TARGET, NEAR = 1.3, 1.05
FRACTION = 0.1
LAMBDA = 1e-3
BATCH, LOOK = 10, 90
RATES = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
SEEDS = 5
MOST = 15
"""Passes over all data, in gradients, after which a training has not arrived."""

Floats = npt.NDArray[np.float64]


class Problem:
    """The regression: rows with a bias, labels of -1 and 1."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, digits = load_digits(return_X_y=True)
        self.rows = np.hstack([images / 16.0, np.ones((len(images), 1))])
        self.labels = np.where(digits % 2 == 0, 1.0, -1.0)
        self.samples = len(images)

    def loss(self, model: Floats) -> float:
        """Over all data."""
        return float(np.logaddexp(0, -self.labels * (self.rows @ model)).mean() + LAMBDA / 2 * model @ model)

    def gradient(self, model: Floats, which: npt.NDArray[np.int64], weights: Floats) -> Floats:
        """The weighted mean over some samples."""
        rows, labels = self.rows[which], self.labels[which]
        slope = -labels / (1.0 + np.exp(labels * (rows @ model)))
        found: Floats = (weights * slope) @ rows / len(which) + LAMBDA * model
        return found

    def optimum(self) -> float:
        """By Newton's method."""
        model = np.zeros(self.rows.shape[1])
        everything, ones = np.arange(self.samples), np.ones(self.samples)
        for _ in range(50):
            chance = 1.0 / (1.0 + np.exp(-self.rows @ model))
            hessian = (self.rows * (chance * (1 - chance))[:, None]).T @ self.rows / self.samples
            hessian += LAMBDA * np.eye(len(model))
            model -= np.linalg.solve(hessian, self.gradient(model, everything, ones))
        return self.loss(model)

    def sgd(self, chosen: Chosen, rate: float, seed: int) -> tuple[Floats, Floats]:
        """The losses after each `LOOK` gradients, and those after each epoch."""
        random = np.random.default_rng(seed)
        model, used = np.zeros(self.rows.shape[1]), 0
        looks: list[float] = []
        ends: list[float] = []
        while used < MOST * self.samples:
            order = random.permutation(len(chosen.indices))
            for start in range(0, len(order), BATCH):
                picked = order[start : start + BATCH]
                model = model - rate * self.gradient(model, chosen.indices[picked], chosen.weights[picked])
                if (used + len(picked)) // LOOK > used // LOOK:
                    looks.append(self.loss(model))
                used += len(picked)
            ends.append(self.loss(model))
        return np.array(looks), np.array(ends)

    def descend(self, chosen: Chosen, rate: float, steps: int) -> Floats:
        """The losses after each step of gradient descent."""
        model, losses = np.zeros(self.rows.shape[1]), []
        for _ in range(steps):
            model = model - rate * self.gradient(model, chosen.indices, chosen.weights)
            losses.append(self.loss(model))
        return np.array(losses)


def arrival(losses: Floats, wanted: float) -> float:
    """How many looks at the loss until it is as wanted; infinite where it never is."""
    there = np.flatnonzero(losses <= wanted)
    return float(there[0] + 1) if len(there) else float("inf")


def measure() -> dict[str, float]:
    """Ratios are gradients on all data over gradients on the subset: above 1 the subset needs fewer; 0: never."""
    problem = Problem()
    best, count = problem.optimum(), round(FRACTION * problem.samples)
    alone = Group(rank=0, world=1, local_rank=0, nodes=1, gpus_per_node=1, device=torch.device("cpu"))
    began = time.process_time()
    craig = select(lambda members: problem.rows[members], problem.labels.astype(np.int64), count, alone)
    found = {"selection_s": time.process_time() - began}
    everything = Chosen(np.arange(problem.samples), np.ones(problem.samples))

    def some(seed: int) -> Chosen:
        return Chosen(np.random.default_rng(100 + seed).permutation(problem.samples)[:count], np.ones(count))

    ways = {"all": lambda seed: everything, "craig": lambda seed: craig, "random": some}
    size = {"all": problem.samples, "craig": count, "random": count}
    epochs: dict[str, dict[float, float]] = {}
    """Gradients to each target, by way, looked at in each epoch; `looks` and `descents` likewise."""
    looks: dict[str, dict[float, float]] = {}
    descents: dict[str, dict[float, float]] = {}
    for name, data in ways.items():
        runs = {rate: [problem.sgd(data(seed), rate, seed) for seed in range(SEEDS)] for rate in RATES}
        seeds = SEEDS if name == "random" else 1
        falls = {rate: [problem.descend(data(seed), rate, 60) for seed in range(seeds)] for rate in RATES}

        def fewest(each: dict[float, list[Floats]], times: float) -> float:
            return min(float(np.median([arrival(one, times * best) for one in ones])) for ones in each.values())

        by_end = {rate: [ends for _, ends in some_] for rate, some_ in runs.items()}
        by_look = {rate: [looks_ for looks_, _ in some_] for rate, some_ in runs.items()}
        epochs[name] = {times: fewest(by_end, times) * size[name] for times in (TARGET, NEAR)}
        looks[name] = {times: fewest(by_look, times) * LOOK for times in (TARGET, NEAR)}
        descents[name] = {times: fewest(falls, times) * size[name] for times in (TARGET,)}
        found[f"floor_{name}"] = min(float(np.median([one.min() for one in ones])) for ones in by_look.values()) / best

    def ratio(counted: dict[str, dict[float, float]], name: str, times: float = TARGET) -> float:
        return counted["all"][times] / counted[name][times]

    return {
        "evaluations_ratio": ratio(epochs, "craig"),
        "random_ratio": ratio(epochs, "random"),
        "evaluations_ratio_at_1.05": ratio(epochs, "craig", NEAR),
        "random_ratio_at_1.05": ratio(epochs, "random", NEAR),
        "sgd_ratio_by_look": ratio(looks, "craig"),
        "random_ratio_by_look": ratio(looks, "random"),
        "descent_ratio": ratio(descents, "craig"),
        "random_descent_ratio": ratio(descents, "random"),
        **found,
    }

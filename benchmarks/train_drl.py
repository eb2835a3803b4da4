"""Train the policy-gradient rival: `python -m benchmarks.train_drl --seed 0 --minutes 6 --out weights.npz`.

REINFORCE with a baseline (DeepRM, HotNets 2016, §3.3), by Adam, in the plain simulator on generated workloads alone:
several rollouts of one workload an update; reward minus the jobs in the system, so mean JCT; the baseline is linear in
the jobs now, the work they have left and the mean return of all rollouts at that time. The network is tried on other
workloads now and then, and the best one is kept. What it cannot do is written with it: the curve is in the file.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from slurm_ones.policy.contract import ClusterView, Floats, Ints, JobView, Policy, Schedule, ThroughputModel
from slurm_ones.rivals.drl import ASKED_LEFT, CONTEXT, FEATURES, SHAPES, SIZE, Drl, Game, GrowthSteps, Perceptron
from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.run import run
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.workloads.generate import generate
from slurm_ones.simulate.workloads.profiles import Workload

ROLLOUTS = 4
"""Of one workload in each update."""
DISCOUNT = 0.985
"""Of the jobs in the system an interval later: what an action does shows within a hundred of them."""
MOST = 150
"""Intervals of a rollout; what the last long jobs do alone teaches nothing."""
ENTROPY = (0.01, 0.001)
"""Weight of the entropy of the actions, at the beginning and at the end."""
RATE = (0.01, 0.002)
"""Step of the optimizer, at the beginning and at the end."""
CLIP = 5.0
"""Largest norm of a gradient."""
FIRST_SEED = {"train": 100_000, "validate": 200_000, "test": 300_000}
"""Of the workloads of each purpose."""


@dataclass(frozen=True)
class Round:
    """One decision of a rollout, and what its gradient needs."""

    at: int
    """Interval."""
    features: Floats
    """(R, F) of every step there was."""
    choice: Floats
    """(R,) derivative of the actions' log probability by the steps' scores."""
    entropy: Floats
    """(R,) derivative of their entropy."""
    void_choice: Floats
    """(C,) the same by the void's weights."""
    void_entropy: Floats
    jobs: int
    state: tuple[float, float]
    """Work left: sum over the jobs of ln seconds at the size asked for, and of GPUs asked for over the cluster."""


class Enough(Exception):
    """A rollout is long enough."""


class Sampling:
    """The network's policy with its actions drawn as their probabilities say, and remembered.

    Raises `Enough` instead of the decision after `most`: what became of the workload is not asked.
    """

    name = "drl"

    def __init__(self, network: Perceptron, interval_s: float, most: int = MOST) -> None:
        self.network, self.interval_s, self.most = network, interval_s, most
        self.rounds: list[Round] = []
        self._models: dict[int, Remembered] = {}

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.policy.contract.Policy`."""
        at = round(now / self.interval_s)
        if self.rounds and at >= self.rounds[0].at + self.most:
            raise Enough
        models = self._models
        known = [replace(j, model=models.setdefault(j.job_id, Remembered(j.model))) for j in jobs]
        game = Game(cluster, known, now)
        draw = draw_steps(self.network, game.steps, game.gpus, game.total, rng)
        there = game.steps.extra > 0
        left = float(game.steps.features[:, 0, ASKED_LEFT].sum()) if there.any() else 0.0
        asked = sum(min(job.requested, game.total) for job in jobs) / game.total
        self.rounds.append(
            Round(
                at,
                game.steps.features[there],
                draw.choice[there],
                draw.entropy[there],
                draw.void_choice,
                draw.void_entropy,
                len(jobs),
                (left, asked),
            )
        )
        return game.schedule(draw.taken)


@dataclass(frozen=True)
class Draw:
    """Actions of one round, and derivatives as in `Round` before they are flattened."""

    taken: Ints
    choice: Floats
    entropy: Floats
    void_choice: Floats
    void_entropy: Floats


def draw_steps(network: Perceptron, steps: GrowthSteps, gpus: int, total: int, rng: np.random.Generator) -> Draw:
    """As `drl.best_steps`, by chance: each action with the softmax of the scores of those that there are.

    A step has the same score for as long as it can be taken, so its derivatives are that score's weight times sums over
    those actions: `_Sums` of now less those of when it came up.
    """
    jobs, depth = steps.sizes.shape
    choice, entropy = np.zeros((jobs, depth)), np.zeros((jobs, depth))
    void_choice, void_entropy = np.zeros(CONTEXT), np.zeros(CONTEXT)
    scores: list[list[float]] = network.scores(steps.features).tolist()
    extra: list[list[int]] = steps.extra.tolist()
    taken = [0] * jobs
    top = max((max(row) for row in scores if row), default=0.0)
    weight = [0.0] * jobs
    since = [(0.0, 0.0)] * jobs
    sums = (0.0, 0.0)
    free, growing = gpus, True

    def leave(j: int) -> None:
        step, held = taken[j], weight[j]
        seen, pull = sums[0] - since[j][0], sums[1] - since[j][1]
        choice[j, step] -= held * seen
        entropy[j, step] -= held * ((scores[j][step] - top) * seen + pull)
        weight[j] = 0.0

    def enter(j: int) -> None:
        step = taken[j]
        if step < depth and 0 < extra[j][step] <= free and (growing or step == 0):
            weight[j], since[j] = math.exp(scores[j][step] - top), sums

    for j in range(jobs):
        enter(j)
    while True:
        for j in range(jobs):
            if weight[j] and (extra[j][taken[j]] > free or (taken[j] > 0 and not growing)):
                leave(j)
        reached = list(accumulate(weight))
        if not reached or reached[-1] <= 0.0:
            break
        context = steps.context(free / max(total, 1))
        void = min(network.void(context) - top, 50.0) if growing else -math.inf
        whole = reached[-1] + math.exp(void)
        mean = sum(w * (scores[j][taken[j]] - top) for j, w in enumerate(weight) if w)
        mean = (mean + (math.exp(void) * void if growing else 0.0)) / whole
        # p (ln p + H) with ln p = score − ln whole and H = ln whole − mean.
        sums = (sums[0] + 1.0 / whole, sums[1] - mean / whole)
        action = bisect_right(reached, rng.random() * whole)
        if growing:
            chance = math.exp(void) / whole
            void_choice += ((action >= jobs) - chance) * context
            void_entropy -= chance * (void - mean) * context
        if action >= jobs:
            growing = False
            continue
        leave(action)
        choice[action, taken[action]] += 1.0
        free -= extra[action][taken[action]]
        taken[action] += 1
        enter(action)
    return Draw(np.array(taken, dtype=np.int64), choice, entropy, void_choice, void_entropy)


class Remembered:
    """A job's speeds, asked for once: they do not change, and a rollout asks for them in every interval."""

    def __init__(self, model: ThroughputModel) -> None:
        self._model = model
        self._known: dict[bytes, Floats] = {}

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """See `slurm_ones.policy.contract.ThroughputModel`."""
        key = nodes.tobytes() + gpus.tobytes() + batches.tobytes()
        if key not in self._known:
            self._known[key] = self._model.throughput(nodes, gpus, batches)
        return self._known[key]

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """None."""
        return np.zeros(np.shape(gpus))


class EqualShare:
    """What a trained network must beat at the least: the smallest step of anybody first, first come first served."""

    name = "equal-share"

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.policy.contract.Policy`."""
        game = Game(cluster, jobs, now)
        taken, free = np.zeros(len(game.mobile), dtype=np.int64), game.gpus
        for size in np.unique(game.steps.sizes[game.steps.sizes > 0]):
            for j, step in np.argwhere(game.steps.sizes == size):
                if taken[j] == step and game.steps.extra[j, step] <= free:
                    free -= int(game.steps.extra[j, step])
                    taken[j] = step + 1
        return game.schedule(taken)


def returns(rollout: Sequence[Round], length: int) -> Floats:
    """(length,) jobs in the system in the intervals after each, discounted."""
    jobs = np.zeros(length + 1)
    for one in rollout:
        jobs[one.at] = one.jobs
    found = np.zeros(length + 1)
    for at in range(length - 1, -1, -1):
        found[at] = jobs[at + 1] + DISCOUNT * found[at + 1]
    return found[:length]


def advantages(rollouts: Sequence[Sequence[Round]]) -> list[Floats]:
    """How much better than expected each round of each rollout ended, in standard deviations."""
    length = max(one.at for rollout in rollouts for one in rollout) + 1
    of_each = [returns(rollout, length) for rollout in rollouts]
    mean = np.mean(of_each, axis=0)
    inputs, outputs = [], []
    for rollout, found in zip(rollouts, of_each, strict=True):
        inputs += [(1.0, one.jobs, *one.state, mean[one.at]) for one in rollout]
        outputs += [found[one.at] for one in rollout]
    x, y = np.array(inputs, dtype=np.float64), np.array(outputs, dtype=np.float64)
    scale = np.maximum(np.abs(x).max(axis=0), 1e-9)
    weights = np.linalg.solve((x / scale).T @ (x / scale) + 1e-3 * np.eye(x.shape[1]), (x / scale).T @ y)
    better = (x / scale) @ weights - y
    better = np.clip(better / max(float(better.std()), 1e-9), -4.0, 4.0)
    return np.split(better, np.cumsum([len(rollout) for rollout in rollouts])[:-1])


def random_network(rng: np.random.Generator) -> Perceptron:
    """Before any training: small scores, no leaning."""
    parts = [
        rng.normal(0.0, 1.0 / np.sqrt(shape[0]), shape) if len(shape) == 2 else np.zeros(shape) for shape in SHAPES
    ]
    parts[4] *= 0.1
    return Perceptron(np.concatenate([part.ravel() for part in parts]))


def network_gradient(network: Perceptron, features: Floats, of_scores: Floats, of_void: Floats) -> Floats:
    """(SIZE,) derivative of a sum by the parameters, given those by the scores (…) and by the void's weights (C,)."""
    _, _, second, _, last, _ = network.parameters()
    inputs = features.reshape(-1, FEATURES)
    one, two, _ = network.layers(inputs)
    by_score = of_scores.reshape(-1, 1)
    by_two = by_score * last[:, 0] * (1.0 - two * two)
    by_one = by_two @ second.T * (1.0 - one * one)
    parts = (inputs.T @ by_one, by_one.sum(axis=0), one.T @ by_two, by_two.sum(axis=0), two.T @ by_score, of_void)
    return np.concatenate([part.ravel() for part in parts])


def gradient(network: Perceptron, rollouts: Sequence[Sequence[Round]], entropy: float) -> Floats:
    """(SIZE,) of what is to be maximised: mean over the rounds."""
    rounds = [one for rollout in rollouts for one in rollout]
    worth = np.concatenate(advantages(rollouts))
    features = np.concatenate([one.features for one in rounds])
    by_score = np.concatenate([w * one.choice + entropy * one.entropy for w, one in zip(worth, rounds, strict=True)])
    void = sum(
        (w * one.void_choice + entropy * one.void_entropy for w, one in zip(worth, rounds, strict=True)),
        np.zeros(CONTEXT),
    )
    return network_gradient(network, features, by_score, void) / len(rounds)


class Adam:
    """Kingma and Ba, ICLR 2015, algorithm 1; climbs."""

    def __init__(self) -> None:
        self._mean, self._square, self._steps = np.zeros(SIZE), np.zeros(SIZE), 0

    def step(self, flat: Floats, slope: Floats, rate: float) -> Floats:
        """The parameters one step up."""
        norm = float(np.linalg.norm(slope))
        slope = slope * min(1.0, CLIP / max(norm, 1e-12))
        self._steps += 1
        self._mean = 0.9 * self._mean + 0.1 * slope
        self._square = 0.99 * self._square + 0.01 * slope * slope
        mean = self._mean / (1.0 - 0.9**self._steps)
        square = self._square / (1.0 - 0.99**self._steps)
        result: Floats = flat + rate * mean / (np.sqrt(square) + 1e-8)
        return result


@dataclass(frozen=True)
class Task:
    """A workload to be scheduled."""

    workload: Workload
    cluster: ClusterView
    interval_s: float


def training_task(number: int, seed: int) -> Task:
    """What an update is about: all mixes, sizes of clusters and loads, one after another."""
    rng = np.random.default_rng((seed, number))
    nodes = int(rng.choice([4, 8, 16]))
    mix = str(rng.choice(["philly", "uniform", "ones-sc21"], p=[0.5, 0.2, 0.3]))
    jobs, load = int(rng.integers(4, 7)) * nodes, float(rng.uniform(0.5, 2.0))
    workload = generate(mix, jobs=jobs, seed=FIRST_SEED["train"] + 1000 * seed + number, load=load, gpus=4 * nodes)
    cluster = ClusterSpec(nodes, 4, any_shape=bool(rng.random() < 0.5))
    return Task(workload, cluster, 10.0 if mix == "ones-sc21" else float(rng.choice([60.0, 120.0])))


def kept_task(purpose: str, number: int) -> Task:
    """A workload that is not trained on, kept for a purpose; every other one is of ONES' own mix."""
    seed = FIRST_SEED[purpose] + number
    if number % 2:
        return Task(generate("ones-sc21", jobs=50, seed=seed, gpus=64), ClusterSpec(16, 4, any_shape=False), 10.0)
    return Task(generate("philly", jobs=60, seed=seed, gpus=32), ClusterSpec(8, 4, any_shape=False), 60.0)


def simulated(policy: Policy, task: Task, **options: Any) -> Outcome:
    """The task under the policy, by an oracle."""
    return run(policy.name, {}, task.workload, task.cluster, oracle="pack", interval_s=task.interval_s,
               make=lambda: policy, **options)  # fmt: skip


def mean_jct(policy: Policy, task: Task) -> float:
    """Of all jobs; those that have not ended when it is given up count as if they had then."""
    end = task.workload.submissions[-1].time + 2000 * task.interval_s
    outcome = simulated(policy, task, most_s=end)
    return float(np.mean([(end if job.ended is None else job.ended) - job.submitted for job in outcome.jobs]))


def against_equal_shares(policy: Policy, purpose: str, numbers: Sequence[int], known: dict[int, float]) -> float:
    """Geometric mean over workloads of the mean JCT over that of equal shares; `known` remembers the latter."""
    for number in numbers:
        if number not in known:
            known[number] = mean_jct(EqualShare(), kept_task(purpose, number))
    found = [mean_jct(policy, kept_task(purpose, number)) / known[number] for number in numbers]
    return float(np.exp(np.mean(np.log(found))))


def train(seed: int, minutes: float, *, every_s: float = 120.0, report: bool = True) -> tuple[Perceptron, Floats]:
    """The network that did best on the workloads of the validation, and the curve of that (E, 3)."""
    rng = np.random.default_rng(seed)
    network, adam = random_network(rng), Adam()
    began, tried, known = time.process_time(), -np.inf, dict[int, float]()
    curve: list[tuple[float, float, float]] = []
    best, updates = network, 0
    while True:
        spent = time.process_time() - began
        if spent - tried >= every_s or spent >= 60.0 * minutes:
            value = against_equal_shares(Drl(network=network), "validate", range(4), known)
            if not curve or value < min(row[2] for row in curve):
                best = network
            curve.append((spent, float(updates), value))
            tried = time.process_time() - began
            if report:
                typer.echo(f"{spent:6.0f} s  {updates:4d} updates  mean JCT / equal shares {value:.3f}")
        if spent >= 60.0 * minutes:
            return best, np.array(curve)
        task, rollouts = training_task(updates, seed), []
        for _ in range(ROLLOUTS):
            policy, luck = Sampling(network, task.interval_s), int(rng.integers(2**31))
            with suppress(Enough):
                simulated(policy, task, seed=luck)
            rollouts.append(policy.rounds)
        part = min(spent / (60.0 * minutes), 1.0)
        slope = gradient(network, rollouts, ENTROPY[0] * (ENTROPY[1] / ENTROPY[0]) ** part)
        network = Perceptron(adam.step(network.flat, slope, RATE[0] * (RATE[1] / RATE[0]) ** part))
        updates += 1


def main(
    out: Annotated[Path, typer.Option(help="where the weights go")],
    seed: Annotated[int, typer.Option(help="of the network and of the workloads")] = 0,
    minutes: Annotated[float, typer.Option(help="of training, as its processor counts them")] = 6.0,
) -> None:
    """Train, then show how the best network does on workloads that it has never met."""
    network, curve = train(seed, minutes)
    command = f"python -m benchmarks.train_drl --seed {seed} --minutes {minutes:g} --out weights.npz"
    np.savez(out, flat=network.flat.astype(np.float32), command=command, seed=seed, curve=curve)
    value = against_equal_shares(Drl(network=network), "test", range(8), {})
    typer.echo(f"mean JCT {value:.3f} of that of equal shares on 8 workloads of the test")


if __name__ == "__main__":
    typer.run(main)

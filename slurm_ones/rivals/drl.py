"""A small scheduler trained by policy gradient, in place of the one with which ONES was compared (DRL in ONES, §4).

Code and weights of DRL were never published. So this policy follows the first two schedulers of its kind: DeepRM (Mao
et al., HotNets 2016, §3) and DL2 (Peng et al., arXiv 1909.06040, §4). DeepRM builds a schedule from nothing by one
action after another, until it chooses the void action, which ends the round. It is trained by REINFORCE: the reward is
minus the number of jobs in the system, the baseline the mean of several rollouts of one workload. In DL2 jobs grow in
steps, with the batch that their users chose, and all steps are decided again in each interval.

`Drl` grows one job by one step at a time. `build_steps` computes the features of each job's steps, and `Perceptron`
scores them. Its weights (drl.npz) were trained by `python -m benchmarks.train_drl`; `load` returns the exact command
and the training curve. docs/decisions/0010-policy-gradient-rival.md has the results.

Differences from both:

1. One network scores each job's step separately, from features of the job and of the whole queue. So a queue can have
   any length; DeepRM and DL2 have inputs for a fixed number of jobs.
2. A step doubles the GPUs, or goes to the size that the user asked for, because Slurm gives only such sizes.
3. After the void action jobs do not grow further, but a job without GPUs still gets its first step if there is room.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

import numpy as np

from ones_db.reasons import reason
from slurm_ones.policy.build import build_schedule, fixed_jobs, free_after_fixed
from slurm_ones.policy.contract import ClusterView, Floats, Ints, JobView, Schedule
from slurm_ones.policy.tables import Tables, build_tables

FEATURES = 21
ASKED_LEFT = 11
"""Index of one feature: the job's remaining time at the size that its user asked for."""
CONTEXT = 4
"""Number of values from which the void action's score is computed (`GrowthSteps.context`)."""
LOG_SECONDS = 12.0
"""Scale of time features: t seconds become ln(1 + t) / `LOG_SECONDS`, which is 1 at about two days."""
LOG_SIZE = 6.0
"""Scale of features that are ratios of GPU counts: r becomes log2(r) / `LOG_SIZE`."""


@dataclass(frozen=True)
class GrowthSteps:
    """Steps in which each of J jobs can grow, starting from no GPUs."""

    tables: Tables
    sizes: Ints
    """(J, S) GPUs of the job after each step; 0 beyond its last step."""
    extra: Ints
    """(J, S) GPUs that each step adds."""
    features: Floats
    """(J, S, F) features of each step, about -1 to 1, and finite even if a job reports absurd numbers."""
    load: float
    """Log2 of the number of jobs per GPU, divided by `LOG_SIZE`."""

    def context(self, free: float) -> Floats:
        """Return the inputs (C,) of the void action's score while the fraction `free` of the GPUs is free."""
        return np.array([1.0, free, free * free, self.load])


def build_steps(cluster: ClusterView, jobs: Sequence[JobView], gpus: int, now: float) -> GrowthSteps:
    """Return the growth steps of jobs that share `gpus` GPUs."""
    tables = build_tables(cluster, [_stepwise(cluster, job) for job in jobs], "requested")
    requested = np.array([max(job.requested, 1) for job in jobs], dtype=np.int64)
    column = _columns(tables)
    sizes = tables.sizes[column]
    before = np.concatenate([np.zeros((len(jobs), 1), dtype=np.int64), sizes[:, :-1]], axis=1)
    extra = np.where(sizes > 0, sizes - before, 0)
    load = float(_ratio(np.array(float(len(jobs))), np.array(float(max(gpus, 1)))))
    features = _features(tables, column, before, requested, gpus, load, now)
    return GrowthSteps(tables, sizes, extra, features * (sizes > 0)[:, :, None], load)


def _stepwise(cluster: ClusterView, job: JobView) -> JobView:
    """Return the job with only these sizes: the largest up to each power of two, the requested one, the present one."""
    sizes = job.limits.gpus[: bisect_right(job.limits.gpus, cluster.gpus)]
    steps = {job.requested, job.shape.gpus if job.shape is not None else 0} & set(sizes)
    for power in range(cluster.gpus.bit_length() + 1):
        up_to = bisect_right(sizes, 2**power)
        steps.update(sizes[up_to - 1 : up_to])
    return replace(job, limits=replace(job.limits, gpus=tuple(sorted(steps))))


def _columns(tables: Tables) -> Ints:
    """Return column numbers (J, S) of `tables`. Row j has the columns of job j's allowed sizes, ascending, and then
    zeros."""
    most = int(tables.allowed.sum(axis=1).max(initial=0))
    order = np.argsort(~tables.allowed, axis=1, kind="stable")[:, :most]
    return np.where(np.take_along_axis(tables.allowed, order, axis=1), order, 0)


def _features(
    tables: Tables, column: Ints, before: Ints, requested: Ints, gpus: int, load: float, now: float
) -> Floats:
    rows = np.arange(len(tables.jobs))[:, None]
    size, cluster = tables.sizes[column].astype(np.float64), float(max(gpus, 1))
    speed = np.maximum(tables.speed[rows, column], 1e-9)
    current = tables.sizes[tables.current].astype(np.float64)[:, None]
    runs = current > 0

    # Speed-ups per GPU relative to the first step: of all GPUs, and of those that this step adds.
    slower = np.concatenate([np.zeros_like(speed[:, :1]), speed[:, :-1]], axis=1)
    single = speed[:, :1] / np.maximum(size[:, :1], 1.0)
    useful = _finite(speed / np.maximum(size, 1.0) / single, 2.0)
    marginal = _finite((speed - slower) / np.maximum(size - before, 1.0) / single, 2.0)

    jobs = tables.jobs
    samples = np.array([max(j.dataset, 1) * _finite(np.float64(j.progress.beta), 1e9) for j in jobs])[:, None]
    left = samples / np.maximum(tables.goodput[rows, column], 1e-9)
    asked = np.abs(size - requested[:, None]).argmin(axis=1) if size.shape[1] else np.zeros(len(jobs), dtype=np.int64)
    asked_left = left[rows[:, 0], asked][:, None] if size.shape[1] else samples
    age = np.array([now - j.submitted for j in jobs])[:, None]
    served = np.array([j.running_s for j in jobs])[:, None]
    done = np.array([j.progress.mean if j.progress.alpha + j.progress.beta > 0 else 0.0 for j in jobs])[:, None]

    share = cluster / max(len(jobs), 1)
    demand = _ratio(np.minimum(requested, cluster).sum()[None], np.array([cluster]))
    of_each_step = [
        np.log2(np.maximum(size, 1.0)) / LOG_SIZE,
        size / cluster,
        _ratio(size, requested[:, None]),
        _ratio(size, np.full_like(size, share)),
        runs & (size == current),
        np.where(runs & (size > current), _ratio(size, np.maximum(current, 1.0)), 0.0),
        np.where(runs & (size < current), _ratio(size, np.maximum(current, 1.0)), 0.0),
        before == 0,
        useful,
        marginal,
        _seconds(left),
        _seconds(asked_left),
        _rank(asked_left),
        _rank(asked_left * np.minimum(requested, cluster)[:, None]),
        runs,
        _seconds(age),
        _rank(age),
        _seconds(served),
        _finite(done, 1.0),
        load,
        demand,
    ]
    wide = [np.broadcast_to(np.asarray(value, dtype=np.float64), size.shape) for value in of_each_step]
    return np.stack(wide, axis=2)


def _finite(value: Floats, most: float) -> Floats:
    return np.clip(np.nan_to_num(value, nan=0.0, posinf=most, neginf=0.0), 0.0, most)


def _seconds(value: Floats) -> Floats:
    return np.log1p(_finite(value, 1e9)) / LOG_SECONDS


def _ratio(value: Floats | Ints, other: Floats | Ints) -> Floats:
    return np.clip(np.log2(np.maximum(value, 1e-3) / np.maximum(other, 1e-3)) / LOG_SIZE, -2.0, 2.0)


def _rank(value: Floats) -> Floats:
    flat = np.nan_to_num(value[:, 0], nan=0.0, posinf=1e300, neginf=-1e300)
    place = np.empty(len(flat))
    place[np.argsort(flat, kind="stable")] = np.arange(len(flat))
    return place[:, None] / max(len(flat) - 1, 1)


HIDDEN = (32, 16)
SHAPES = ((FEATURES, HIDDEN[0]), (HIDDEN[0],), HIDDEN, (HIDDEN[1],), (HIDDEN[1], 1), (CONTEXT,))
"""Shapes of the arrays in `Perceptron.flat`: weights and bias of each layer (no bias in the last), then the void
action's weights."""
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


@dataclass(frozen=True)
class Perceptron:
    """Neural network that scores a step from its features. All weights are in one flat vector, as optimizers need
    them."""

    flat: Floats
    """(SIZE,) all weights."""

    def parameters(self) -> list[Floats]:
        """Return the weights as separate arrays, in the shapes of `SHAPES`."""
        cuts = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(self.flat, cuts), SHAPES, strict=True)]

    def scores(self, features: Floats) -> Floats:
        """Return the score (…) for each row of features (…, F)."""
        return self.layers(features)[-1]

    def void(self, context: Floats) -> float:
        """Return the score of the void action, from its inputs (C,)."""
        return float(self.flat[-CONTEXT:] @ context)

    def layers(self, features: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the outputs of the two hidden layers (…, H), and the scores (…), for features (…, F)."""
        first, bias, second, bias2, last, _ = self.parameters()
        one = np.tanh(features @ first + bias)
        two = np.tanh(one @ second + bias2)
        return one, two, (two @ last)[..., 0]


@dataclass(frozen=True)
class Trained:
    """A trained network, and how it was trained."""

    network: Perceptron
    command: str
    """Command that trained the network."""
    seed: int
    curve: Floats
    """(E, 3) training curve: processor seconds, number of updates, and mean JCT in validation relative to equal
    shares."""


@cache
def load() -> Trained:
    """Return the trained network that comes with the package."""
    with resources.as_file(resources.files("slurm_ones.rivals") / "drl.npz") as path, np.load(path) as file:
        network = Perceptron(np.asarray(file["flat"], dtype=np.float64))
        return Trained(network, str(file["command"]), int(file["seed"]), np.asarray(file["curve"], dtype=np.float64))


def best_steps(network: Perceptron, steps: GrowthSteps, gpus: int, total: int) -> Ints:
    """Return how many steps each job takes (J,): as long as GPUs are free, the action of highest score is taken.

    `gpus` of the `total` GPUs are free at first. Scores are computed only once, so each step costs one heap operation.
    """
    scores = network.scores(steps.features).tolist()
    extra = steps.extra.tolist()
    taken = np.zeros(len(scores), dtype=np.int64)
    heap = [(-of_job[0], j, 0) for j, of_job in enumerate(scores) if of_job and extra[j][0] > 0]
    heapq.heapify(heap)
    free, growing = gpus, True
    while heap and free > 0:
        score, j, step = heapq.heappop(heap)
        growing = growing and -score >= network.void(steps.context(free / max(total, 1)))
        if (step > 0 and not growing) or extra[j][step] > free:
            continue
        free -= extra[j][step]
        taken[j] = step + 1
        if step + 1 < len(extra[j]) and extra[j][step + 1] > 0:
            heapq.heappush(heap, (-scores[j][step + 1], j, step + 1))
    return taken


def gpus_after(steps: GrowthSteps, taken: Ints) -> Ints:
    """Return the GPUs (J,) that each job has after `taken` steps (J,)."""
    if not steps.sizes.shape[1]:
        return np.zeros(len(taken), dtype=np.int64)
    last = np.maximum(taken - 1, 0)
    return np.where(taken > 0, steps.sizes[np.arange(len(taken)), last], 0)


class Drl:
    """Policy-gradient scheduler, trained in the simulator (see the module). `network` replaces the trained network."""

    name = "drl"

    def __init__(self, network: Perceptron | None = None) -> None:
        self.network = network or load().network

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        game = Game(cluster, jobs, now)
        return game.schedule(best_steps(self.network, game.steps, game.gpus, game.total))


class Game:
    """One decision: the steps that jobs can take, and the schedule that follows from the steps taken."""

    def __init__(self, cluster: ClusterView, jobs: Sequence[JobView], now: float) -> None:
        self.cluster = cluster
        self.jobs = sorted(jobs, key=lambda job: (job.submitted, job.job_id))
        self.fixed = fixed_jobs(cluster, jobs)
        self.mobile = [job for job in self.jobs if job.job_id not in self.fixed]
        self.gpus = int(free_after_fixed(cluster, jobs, self.fixed).sum())
        """GPUs that the jobs in `mobile` share."""
        self.total = max(cluster.gpus, 1)
        self.steps: GrowthSteps = build_steps(cluster, self.mobile, self.gpus, now)

    def schedule(self, taken: Ints) -> Schedule:
        """Return the schedule after `taken` steps (J,), with sizes reduced if they do not fit on the nodes. Jobs
        without a step are parked."""
        counts = gpus_after(self.steps, taken)
        wanted = {job.job_id: int(n) for job, n in zip(self.mobile, counts, strict=True)}
        return build_schedule(self.cluster, self.jobs, self.fixed, self.steps.tables, wanted, reason("network"))

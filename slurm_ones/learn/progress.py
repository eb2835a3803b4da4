"""How much of its training a job has done: the Beta model of ONES (§3.2).

ρ, the fraction complete, is Beta(α, β) with α the epochs done and β = 1 + f(features), f a small network
fitted by maximum likelihood to finished jobs' logs. With α the epochs done, β reads as the epochs still to
come. Where we differ:

- the features are standardised, and the very same transform serves (ONES serves raw features to a network
  trained on their logarithms);
- f ends in softplus instead of relu, which has the same ends and a gradient everywhere;
- a job that declared its epochs never has more to come than it declared;
- before `ENOUGH` jobs have finished there is nothing to learn from: β is then what the job declared, and for
  a job that declared nothing a convention (it is half done, and trains ten epochs at least), which is no
  knowledge at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import digamma, gammaln

from slurm_ones.decide.policy import Floats, Progress

ENOUGH = 5
"""Finished jobs below which nothing is fitted."""
NEW_ALPHA = 0.5
"""α of a job that has finished no epoch: α must be positive."""
UNKNOWN_EPOCHS = 10.0
"""Epochs assumed of a job of which nothing is known."""
HIDDEN = 8
POINTS = 12
"""Epochs of one finished job that enter the fit, spread evenly over it."""
ITERATIONS = 150
DECAY = 1e-3
"""Weight decay: keeps the network near a constant where the logs are few."""
MAX_EPOCHS = 1e6


@dataclass(frozen=True)
class Training:
    """What a job's reports say of its training at one moment."""

    dataset: int
    """Samples in an epoch."""
    epochs: float
    """Epochs done; may be a fraction."""
    initial_loss: float | None = None
    """Loss of its first report; None where it reports none."""
    loss: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class FinishedJob:
    """The log of a job that ended by itself."""

    history: Sequence[Training]
    """At the end of each epoch, in order."""
    epochs: float
    """Epochs it trained in all."""


class BetaProgress:
    """ρ of running jobs, learned from finished ones. Immutable: fit anew when a job finishes."""

    def __init__(self, finished: Sequence[FinishedJob] = (), seed: int = 0) -> None:
        """Fit to the logs of all finished jobs; equal logs and seeds give equal models.

        Logs without one epoch before the last teach nothing and do not count towards `ENOUGH`. Takes well
        below a second for a few hundred logs.
        """
        self._network: _Network | None = None
        logs = [points for points in map(_points, finished) if points]
        self.jobs = len(logs)
        """Finished jobs that the model knows."""
        if self.jobs >= ENOUGH:
            rows = [point for points in logs for point in points]
            features = np.array([_features(training) for training, _ in rows])
            done = np.array([training.epochs for training, _ in rows])
            total = np.array([epochs for _, epochs in rows])
            self._network = _Network.fit(features, done, total, np.random.default_rng(seed))

    @property
    def fitted(self) -> bool:
        """Whether β is learned, or a declaration or convention."""
        return self._network is not None

    def progress(self, now: Training, declared_epochs: float = 0.0) -> Progress:
        """ρ of a job as it stands; `declared_epochs` is 0 where the script does not say."""
        done = min(max(now.epochs, 0.0), MAX_EPOCHS) if math.isfinite(now.epochs) else 0.0
        declared = math.isfinite(declared_epochs) and declared_epochs > 0
        to_come = max(declared_epochs - done, 1.0) if declared else math.inf
        if self._network is not None:
            learned = float(self._network.beta(np.array([_features(now)]))[0])
            beta = min(learned, to_come)
        elif declared:
            beta = to_come
        else:
            beta = max(done, UNKNOWN_EPOCHS - done)
        return Progress(alpha=max(done, NEW_ALPHA), beta=min(max(beta, 1.0), MAX_EPOCHS))


def _points(job: FinishedJob) -> list[tuple[Training, float]]:
    """The epochs of a log to learn from, those where 0 < ρ < 1."""
    if not 0 < job.epochs <= MAX_EPOCHS:
        return []
    inside = [(training, job.epochs) for training in job.history if 0 < training.epochs < job.epochs]
    if len(inside) > POINTS:
        inside = [inside[i] for i in np.linspace(0, len(inside) - 1, POINTS).round().astype(int)]
    return inside


def _features(training: Training) -> list[float]:
    """ONES' five features; not-a-number where the job reports nothing usable."""
    first = _finite(training.initial_loss)
    improvement = (first - _finite(training.loss)) / max(abs(first), 1e-9)
    return [
        math.log(max(training.dataset, 1)),
        first,
        _finite(training.epochs),
        improvement,
        _finite(training.accuracy),
    ]


def _finite(value: float | None) -> float:
    return value if value is not None and abs(value) < 1e15 else math.nan


@dataclass(frozen=True)
class _Network:
    """β of features: one hidden layer of tanh, softplus at the end."""

    mean: Floats
    deviation: Floats
    weights: Floats
    """All parameters in one vector, as the optimiser wants them."""
    longest: float
    """Most epochs that any finished job trained: nobody is believed to train more than twice that."""

    @classmethod
    def fit(cls, features: Floats, done: Floats, total: Floats, rng: np.random.Generator) -> _Network:
        """Maximum likelihood of ρ = done/total over all rows; `features` is (rows, 5)."""
        known = np.isfinite(features)
        count = np.maximum(known.sum(axis=0), 1)
        mean = np.where(known, features, 0.0).sum(axis=0) / count
        deviation = np.sqrt((np.where(known, features - mean, 0.0) ** 2).sum(axis=0) / count)
        deviation = np.where(deviation > 1e-9 * np.maximum(np.abs(mean), 1.0), deviation, 1.0)
        inputs = _transform(features, mean, deviation)
        rho = np.clip(done / total, 1e-6, 1.0 - 1e-6)

        width = features.shape[1]
        start = np.concatenate(
            [
                rng.normal(0.0, 1.0 / math.sqrt(width), width * HIDDEN),
                np.zeros(HIDDEN),
                rng.normal(0.0, 0.1, HIDDEN),
                [max(float(np.mean(total - done)) - 1.0, 0.1)],
            ]
        )
        found = minimize(
            _loss,
            start,
            args=(inputs, done, rho),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": ITERATIONS},
        )
        weights = np.asarray(found.x, dtype=np.float64)
        return cls(mean, deviation, weights if np.isfinite(weights).all() else start, float(total.max()))

    def beta(self, features: Floats) -> Floats:
        """β of each row of raw features."""
        raw = _forward(self.weights, _transform(features, self.mean, self.deviation))[1]
        return np.minimum(1.0 + np.logaddexp(0.0, raw), 2.0 * self.longest)


def _transform(features: Floats, mean: Floats, deviation: Floats) -> Floats:
    """Standardised features, for fitting and serving alike: unknown is average, far is bounded."""
    scaled = (features - mean) / deviation
    return np.where(np.isfinite(scaled), np.clip(scaled, -4.0, 4.0), 0.0)


def _split(weights: Floats, width: int) -> tuple[Floats, Floats, Floats, float]:
    first = weights[: width * HIDDEN].reshape(width, HIDDEN)
    rest = weights[width * HIDDEN :]
    return first, rest[:HIDDEN], rest[HIDDEN : 2 * HIDDEN], float(rest[-1])


def _forward(weights: Floats, inputs: Floats) -> tuple[Floats, Floats]:
    """Hidden layer (rows, HIDDEN) and output before softplus (rows,)."""
    first, first_bias, second, second_bias = _split(weights, inputs.shape[1])
    hidden = np.tanh(inputs @ first + first_bias)
    return hidden, hidden @ second + second_bias


def _loss(weights: Floats, inputs: Floats, alpha: Floats, rho: Floats) -> tuple[float, Floats]:
    """Mean negative log likelihood of ρ under Beta(α, β) plus weight decay, and its gradient."""
    rows, width = inputs.shape
    hidden, raw = _forward(weights, inputs)
    beta = 1.0 + np.logaddexp(0.0, raw)
    log_density = (
        (alpha - 1.0) * np.log(rho)
        + (beta - 1.0) * np.log1p(-rho)
        + gammaln(alpha + beta)
        - gammaln(alpha)
        - gammaln(beta)
    )
    by_beta = np.log1p(-rho) + digamma(alpha + beta) - digamma(beta)
    by_raw = -by_beta * (0.5 + 0.5 * np.tanh(0.5 * raw)) / rows

    _, _, second, _ = _split(weights, width)
    by_hidden = np.outer(by_raw, second) * (1.0 - hidden**2)
    gradient = np.concatenate(
        [(inputs.T @ by_hidden).ravel(), by_hidden.sum(axis=0), hidden.T @ by_raw, [by_raw.sum()]]
    )
    decayed = weights.copy()
    decayed[-1] = 0.0  # the output's level is the mean of the logs, not something to shrink
    return float(-log_density.mean() + 0.5 * DECAY * decayed @ decayed), gradient + DECAY * decayed

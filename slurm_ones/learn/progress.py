"""Share of its training that a job has completed: the Beta model of ONES (§3.2).

ρ, the fraction complete, is Beta(α, β) with α the epochs done and β = f(features). f is a small network fitted by
maximum likelihood to finished jobs' logs. With α the epochs done, β reads as the remaining epochs. We differ in this:

- the features are standardised, and the very same transform serves (ONES serves raw features to a network
  trained on their logarithms);
- f is a factor on a first guess: what the job declared and has not done yet, or else what finished jobs trained.
  If jobs train what they declare, little has to be learned, and if they stop early, how early. The factor of a job that
  declared its epochs is no less than nearly all that finished had: for a job unlike all of them the network could
  predict anything;
- f ends in softplus instead of relu, which has the same ends and a gradient everywhere;
- a job that declared its epochs never has more to come than it declared, until it has trained them all: from then on
  it has as much to come as it is over (`OVERRUN`), since a declaration that was too small means nothing more. So one
  that declares little to be served first is soon found out;
- α + β is ONES's certainty, which follows only from the epochs done. Here a factor on both is fitted as well, on jobs
  that the network did not see. So an interval of 80 % holds the truth in 80 % of the cases;
- before `ENOUGH` jobs have finished there is nothing to learn from: β is then what the job declared, and for a job that
  declared nothing a convention: it is half done, and trains ten epochs at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from slurm_ones.policy.contract import Floats, Progress

HIDDEN = 8
ITERATIONS = 60
DECAY = 1e-3
"""Weight decay: keeps the network near a constant where the logs are few."""
LEAST = 1e-3
"""Least remaining epochs: β must be positive."""
DECLARED = -1
"""Feature that is known only of jobs that declared their epochs."""
RARE = 0.1
"""Share of the moments of such jobs at which they had less of it to come than is ever predicted: a job about to stop
early has next to nothing to come, and nobody can know which one that is."""


@dataclass(frozen=True)
class BetaNetwork:
    """Network from features to remaining epochs: one hidden tanh layer, softplus output, times a first guess for each
    row."""

    mean: Floats
    deviation: Floats
    weights: Floats
    """All parameters in one vector, as the optimiser wants them."""
    least: float
    """Factor on the first guess, at least, of jobs that declared their epochs."""

    @classmethod
    def fit(cls, features: Floats, done: Floats, total: Floats, guess: Floats, rng: np.random.Generator) -> BetaNetwork:
        """Maximum likelihood of ρ = done/total under Beta(done, β) over all rows; `features` is (rows, width)."""
        known = np.isfinite(features)
        count = np.maximum(known.sum(axis=0), 1)
        mean = np.where(known, features, 0.0).sum(axis=0) / count
        deviation = np.sqrt((np.where(known, features - mean, 0.0) ** 2).sum(axis=0) / count)
        deviation = np.where(deviation > 1e-9 * np.maximum(np.abs(mean), 1.0), deviation, 1.0)
        inputs = _transform(features, mean, deviation)
        rho = np.clip(done / total, 1e-6, 1.0 - 1e-6)

        width = features.shape[1]
        seen = (total - done) / guess
        level = max(float(np.mean(seen)), 1e-3)
        start = np.concatenate(
            [
                rng.normal(0.0, 1.0 / math.sqrt(width), width * HIDDEN),
                np.zeros(HIDDEN),
                rng.normal(0.0, 0.1, HIDDEN),
                [level + math.log(-math.expm1(-level))],  # softplus of this is the level
            ]
        )
        found = scipy.optimize.minimize(
            _loss,
            start,
            args=(inputs, done, rho, guess),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": ITERATIONS},
        )
        weights = np.asarray(found.x, dtype=np.float64)
        declared = seen[known[:, DECLARED]]
        least = float(np.quantile(declared, RARE)) if len(declared) else 0.0
        return cls(mean, deviation, weights if np.isfinite(weights).all() else start, least)

    def to_come(self, features: Floats, guess: Floats) -> Floats:
        """β of each row of raw features, given the first guess of it."""
        raw = _forward(self.weights, _transform(features, self.mean, self.deviation))[1]
        factor = np.maximum(np.logaddexp(0.0, raw), np.where(np.isfinite(features[:, DECLARED]), self.least, 0.0))
        return np.maximum(factor * guess, LEAST)


def _transform(features: Floats, mean: Floats, deviation: Floats) -> Floats:
    """Standardised features, for fitting and serving alike: unknown is average, far is bounded."""
    scaled = (features - mean) / deviation
    return np.where(np.isfinite(scaled), np.clip(scaled, -4.0, 4.0), 0.0)


def _split(weights: Floats, width: int) -> tuple[Floats, Floats, Floats, float]:
    first = weights[: width * HIDDEN].reshape(width, HIDDEN)
    rest = weights[width * HIDDEN :]
    return first, rest[:HIDDEN], rest[HIDDEN : 2 * HIDDEN], float(rest[-1])


def _forward(weights: Floats, inputs: Floats) -> tuple[Floats, Floats]:
    first, first_bias, second, second_bias = _split(weights, inputs.shape[1])
    hidden = np.tanh(inputs @ first + first_bias)
    return hidden, hidden @ second + second_bias


def _loss(weights: Floats, inputs: Floats, alpha: Floats, rho: Floats, guess: Floats) -> tuple[float, Floats]:
    """Mean negative log likelihood of ρ under Beta(α, β) plus weight decay, and its gradient."""
    rows, width = inputs.shape
    hidden, raw = _forward(weights, inputs)
    beta = np.maximum(np.logaddexp(0.0, raw) * guess, LEAST)
    log_density = (
        (alpha - 1.0) * np.log(rho)
        + (beta - 1.0) * np.log1p(-rho)
        + scipy.special.gammaln(alpha + beta)
        - scipy.special.gammaln(alpha)
        - scipy.special.gammaln(beta)
    )
    by_beta = np.log1p(-rho) + scipy.special.digamma(alpha + beta) - scipy.special.digamma(beta)
    by_raw = -by_beta * guess * (0.5 + 0.5 * np.tanh(0.5 * raw)) * (beta > LEAST) / rows

    _, _, second, _ = _split(weights, width)
    by_hidden = np.outer(by_raw, second) * (1.0 - hidden**2)
    gradient = np.concatenate(
        [(inputs.T @ by_hidden).ravel(), by_hidden.sum(axis=0), hidden.T @ by_raw, [by_raw.sum()]]
    )
    decayed = weights.copy()
    decayed[-1] = 0.0  # the output's level is the mean of the logs, not something to shrink
    return float(-log_density.mean() + 0.5 * DECAY * decayed @ decayed), gradient + DECAY * decayed


ENOUGH = 5
"""Finished jobs below which nothing is fitted."""
NEW_ALPHA = 0.5
"""α of a job that has finished no epoch: α must be positive."""
UNKNOWN_EPOCHS = 10.0
"""Epochs assumed for an unknown job."""
POINTS = 8
"""Moments of one finished job that enter the fit, spread evenly over it."""
LEFT = 0.01
"""Least share of its declared work that a running job still has to do."""
OVERRUN = 1.0
"""Remaining epochs for each epoch beyond those declared, or beyond any finished job's. Lindy's law: what has lasted t
lasts t more with a probability of one half."""
MAX_EPOCHS = 1e6
LEVELS = (0.1, 0.9)
"""Quantiles that bound the interval whose coverage is calibrated."""
CONCENTRATIONS = np.geomspace(64.0, 1.0 / 64.0, 19)
CROSSED = 400
"""Number of moments of jobs that the concentration is fitted to."""
AT_THE_END = 0.98
"""A job that trains this much of what it declared has trained it all."""


@dataclass(frozen=True)
class TrainingState:
    """State of a job's training at one moment, by its reports."""

    dataset: int
    """Samples in an epoch."""
    epochs: float
    """Epochs of progress done; may be a fraction."""
    initial_loss: float | None = None
    """Loss of its first report; None if it reports none."""
    loss: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class FinishedJob:
    """The log of a job that ended by itself."""

    history: Sequence[TrainingState]
    """States at the end of each epoch, in order."""
    epochs: float
    """Epochs it trained in all."""
    declared: float = 0.0
    """Epochs it had declared; 0 for none."""


@dataclass(frozen=True)
class Moments:
    """Moments of finished jobs, one a row."""

    job: Floats
    """Job of each row."""
    features: Floats
    done: Floats
    total: Floats
    guess: Floats
    most: Floats
    """Most remaining epochs by the declaration; infinite without one."""

    def where(self, rows: npt.NDArray[Any]) -> Moments:
        """Return only these rows; `rows` is a mask or indices."""
        return Moments(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class BetaProgress:
    """ρ of running jobs, learned from finished ones. Immutable: another is fitted when a job finishes."""

    def __init__(self, finished: Sequence[FinishedJob] = (), seed: int = 0) -> None:
        """Fit to the logs of all finished jobs; equal logs and seeds give equal models.

        Logs without one epoch before the last teach nothing and do not count towards `ENOUGH`. Takes about 0.1 s for
        200 logs.
        """
        self._network: BetaNetwork | None = None
        self._concentration = 1.0
        self._typical = UNKNOWN_EPOCHS
        self._longest = MAX_EPOCHS
        logs = [(job, inside) for job in finished if (inside := _inside(job))]
        self.jobs = len(logs)
        """Finished jobs that the model knows."""
        if self.jobs >= ENOUGH:
            self._typical = float(np.median([job.epochs for job, _ in logs]))
            self._longest = max(job.epochs for job, _ in logs)
            moments = self._moments(logs)
            self._network = _fitted(moments, seed)
            self._concentration = _concentration(moments, seed) if self.jobs >= 2 * ENOUGH else 1.0

    @property
    def fitted(self) -> bool:
        """True if β is learned; else it is the declaration or a convention."""
        return self._network is not None

    def progress(self, now: TrainingState, declared_epochs: float = 0.0) -> Progress:
        """ρ of a job as it stands; `declared_epochs` is 0 if it declared none."""
        done = _done(now)
        most = _most(done, declared_epochs)
        if self._network is not None:
            features = np.array([_features(now, declared_epochs)])
            guess = np.array([self._guess(done, most)])
            beta = min(float(self._network.to_come(features, guess)[0]), most, 2.0 * self._longest)
        elif math.isfinite(most):
            beta = most
        else:
            beta = max(done, UNKNOWN_EPOCHS - done)
        expected = declared_epochs if math.isfinite(most) else self._longest
        alpha = max(done, NEW_ALPHA)
        return at_least(Progress(alpha, min(beta, MAX_EPOCHS), self._concentration, most), OVERRUN * (done - expected))

    def _guess(self, done: float, most: float) -> float:
        return most if math.isfinite(most) else max(self._typical - done, 0.1 * self._typical)

    def _moments(self, logs: Sequence[tuple[FinishedJob, Sequence[TrainingState]]]) -> Moments:
        rows = [
            (
                float(which),
                now.epochs,
                job.epochs,
                self._guess(now.epochs, most),
                max(most, job.epochs - now.epochs),
                *_features(now, job.declared),
            )
            for which, (job, inside) in enumerate(logs)
            for now in inside
            for most in (_most(now.epochs, job.declared),)
        ]
        table = np.array(rows, dtype=np.float64)
        return Moments(table[:, 0], table[:, 5:], *table[:, 1:5].T)


def at_least(progress: Progress, epochs: float) -> Progress:
    """Return the progress with at least these remaining epochs; NaN changes nothing."""
    if not epochs > progress.beta:
        return progress
    return replace(progress, beta=min(epochs, MAX_EPOCHS), most=max(progress.most, min(epochs, MAX_EPOCHS)))


def _fitted(moments: Moments, seed: int) -> BetaNetwork:
    rng = np.random.default_rng(seed)
    return BetaNetwork.fit(moments.features, moments.done, moments.total, moments.guess, rng)


def _concentration(moments: Moments, seed: int) -> float:
    """The largest factor on α and β whose interval held the truth often enough, over jobs that the network was not
    fitted to: each half of the jobs as predicted from the other."""
    odd = moments.job % 2 == 1
    covered = np.zeros(len(CONCENTRATIONS))
    rows = 0
    for half in (odd, ~odd):
        network = _fitted(moments.where(~half), seed)
        tested = moments.where(np.flatnonzero(half)[:: max(1, int(half.sum()) // (CROSSED // 2))])
        beta = np.minimum(network.to_come(tested.features, tested.guess), tested.most)
        alpha, rho = np.maximum(tested.done, NEW_ALPHA), tested.done / tested.total
        below = scipy.special.betainc(CONCENTRATIONS[:, None] * alpha, CONCENTRATIONS[:, None] * beta, rho)
        at_the_end = tested.total - tested.done >= AT_THE_END * tested.most
        covered += ((below >= LEVELS[0]) & ((below <= LEVELS[1]) | at_the_end)).sum(axis=1)
        rows += len(rho)
    enough = np.flatnonzero(covered >= (LEVELS[1] - LEVELS[0]) * rows)
    return float(CONCENTRATIONS[enough[0] if len(enough) else -1])


def _done(now: TrainingState) -> float:
    return min(max(now.epochs, 0.0), MAX_EPOCHS) if math.isfinite(now.epochs) else 0.0


def _most(done: float, declared: float) -> float:
    """Epochs that may still come of a running job, by its declaration; infinite without one."""
    if not (math.isfinite(declared) and declared > 0):
        return math.inf
    return min(max(declared - done, LEFT * declared), MAX_EPOCHS)


def _inside(job: FinishedJob) -> list[TrainingState]:
    """The moments of a log to learn from, those where 0 < ρ < 1."""
    if not 0 < job.epochs <= MAX_EPOCHS:
        return []
    inside = [training for training in job.history if 0 < training.epochs < job.epochs]
    if len(inside) > POINTS:
        inside = [inside[i] for i in np.linspace(0, len(inside) - 1, POINTS).round().astype(int)]
    return inside


def _features(training: TrainingState, declared: float) -> list[float]:
    """ONES' five features, and how much of what it declared a job has done; not-a-number where the job reports nothing
    usable."""
    first = _finite(training.initial_loss)
    improvement = (first - _finite(training.loss)) / max(abs(first), 1e-9)
    known = math.isfinite(declared) and declared > 0
    return [
        math.log(max(training.dataset, 1)),
        first,
        _finite(training.epochs),
        improvement,
        _finite(training.accuracy),
        min(_done(training) / declared, 2.0) if known else math.nan,
        math.log(declared) if known else math.nan,
    ]


def _finite(value: float | None) -> float:
    return value if value is not None and abs(value) < 1e15 else math.nan

"""Fraction of its training that a job has completed: the Beta model of ONES (§3.2).

The completed fraction ρ has the distribution Beta(α, β). α is the number of epochs done. β is the expected number of
remaining epochs, predicted by a small network f from features of the training. The network is fitted by maximum
likelihood to finished jobs. Differences from ONES:

- Features are standardised, in the same way for fitting and for prediction. (ONES fits to logarithms of features, but
  predicts from the features themselves.)
- f multiplies a first guess of the remaining epochs: the declared epochs not yet done, or else the median of finished
  jobs minus the epochs done. For jobs that declare epochs the factor has a lower bound, a low quantile over finished
  jobs: for an unusual job the network could predict anything.
- The output of f is a softplus instead of a relu. It has the same limits, and a gradient everywhere.
- A job that declared its epochs has at most the declared epochs remaining, until it has trained them all. From then on
  its remaining epochs are as many as it trained beyond its declaration (`OVERRUN`). So a job that declares too few
  epochs in order to be served first is soon treated as a long one.
- In ONES the width of the distribution follows from α + β. Here a factor on α and β is fitted, on jobs that the network
  was not fitted to, so that an 80 % interval covers 80 % of the cases.
- Before `ENOUGH` jobs have finished, β is the number of declared epochs not yet done. A job without a declaration
  counts as half done, and at least ten epochs long.
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
"""Weight decay, which keeps the network nearly constant while few jobs have finished."""
LEAST = 1e-3
"""Smallest β, in epochs; β must be positive."""
DECLARED = -1
"""Index of the feature that is NaN for jobs that declared no epochs."""
RARE = 0.1
"""Quantile of remaining epochs / first guess over finished jobs with declared epochs: a lower bound of that ratio."""


@dataclass(frozen=True)
class BetaNetwork:
    """Network that predicts remaining epochs: a tanh layer, and a softplus output, times the first guess."""

    mean: Floats
    deviation: Floats
    weights: Floats
    """All weights in one vector, as the optimizer needs them."""
    least: float
    """Lower bound of the softplus output, for jobs that declared their epochs."""

    @classmethod
    def fit(cls, features: Floats, done: Floats, total: Floats, guess: Floats, rng: np.random.Generator) -> BetaNetwork:
        """Fit a network by maximum likelihood of ρ = done/total under Beta(done, β). Each row is a moment in a job's
        training."""
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
                [level + math.log(-math.expm1(-level))],  # the softplus of this is the mean level
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
        """Return β, the predicted remaining epochs, for each row of `features` (not standardised) and `guess`, the
        first guess."""
        raw = _forward(self.weights, _transform(features, self.mean, self.deviation))[1]
        factor = np.maximum(np.logaddexp(0.0, raw), np.where(np.isfinite(features[:, DECLARED]), self.least, 0.0))
        return np.maximum(factor * guess, LEAST)


def _transform(features: Floats, mean: Floats, deviation: Floats) -> Floats:
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
    """Return the loss and its gradient by the weights. The loss is the mean negative log likelihood of ρ under Beta(α,
    β), plus weight decay."""
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
    decayed[-1] = 0.0  # the output's bias is the mean of the logs, so it is not decayed
    return float(-log_density.mean() + 0.5 * DECAY * decayed @ decayed), gradient + DECAY * decayed


ENOUGH = 5
"""Fewest finished jobs from which the network is fitted."""
NEW_ALPHA = 0.5
"""Smallest α; α must be positive."""
UNKNOWN_EPOCHS = 10.0
"""Number of epochs assumed for a job that declared none, before enough jobs have finished."""
POINTS = 8
"""Largest number of moments taken from one finished job, evenly spread over its epochs."""
LEFT = 0.01
"""Smallest number of remaining epochs of a running job, as a share of its declared epochs."""
OVERRUN = 1.0
"""Remaining epochs for each epoch beyond the declared number (Lindy's law). Without a declaration, the longest finished
job's number counts."""
MAX_EPOCHS = 1e6
LEVELS = (0.1, 0.9)
"""Quantiles of ρ at the ends of the calibrated interval."""
CONCENTRATIONS = np.geomspace(64.0, 1.0 / 64.0, 19)
CROSSED = 400
"""Number of moments from which the concentration (the factor on α and β) is fitted."""
AT_THE_END = 0.98
"""Share of the declared remaining epochs from which on a job counts as one that trains all of them."""


@dataclass(frozen=True)
class TrainingState:
    """State of a job's training at one moment, as the job reported it."""

    dataset: int
    """Number of samples in an epoch."""
    epochs: float
    """Progress in epochs, with fractions."""
    initial_loss: float | None = None
    """Loss in the job's first report; None if the job reports no loss."""
    loss: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class FinishedJob:
    """Training of a job that ended by itself."""

    history: Sequence[TrainingState]
    """State at the end of each epoch, in order."""
    epochs: float
    """Number of epochs that the job trained."""
    declared: float = 0.0
    """Number of epochs that the job declared; 0 for none."""


@dataclass(frozen=True)
class Moments:
    """Moments in the training of finished jobs: a row for each moment in every array."""

    job: Floats
    """Index of the moment's job."""
    features: Floats
    done: Floats
    total: Floats
    guess: Floats
    most: Floats
    """Largest number of remaining epochs by the job's declaration; infinite without one."""

    def where(self, rows: npt.NDArray[Any]) -> Moments:
        """Return the moments in these rows, given as a mask or as indices."""
        return Moments(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class BetaProgress:
    """Model of ρ for running jobs, learned from finished jobs. It is immutable: with new finished jobs a new model is
    fitted."""

    def __init__(self, finished: Sequence[FinishedJob] = (), seed: int = 0) -> None:
        """Fit the model to all finished jobs; the same jobs and seed give the same model.

        A job that trained only one epoch is ignored, and does not count towards `ENOUGH`. The fit takes about 0.1 s for
        200 jobs.
        """
        self._network: BetaNetwork | None = None
        self._concentration = 1.0
        self._typical = UNKNOWN_EPOCHS
        self._longest = MAX_EPOCHS
        logs = [(job, inside) for job in finished if (inside := _inside(job))]
        self.jobs = len(logs)
        """Number of finished jobs to which the model was fitted."""
        if self.jobs >= ENOUGH:
            self._typical = float(np.median([job.epochs for job, _ in logs]))
            self._longest = max(job.epochs for job, _ in logs)
            moments = self._moments(logs)
            self._network = _fitted(moments, seed)
            self._concentration = _concentration(moments, seed) if self.jobs >= 2 * ENOUGH else 1.0

    def progress(self, now: TrainingState, declared_epochs: float = 0.0) -> Progress:
        """Return the distribution of a job's ρ in its present state. `declared_epochs` is 0 without a declaration."""
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
    """Return the progress with at least `epochs` remaining epochs; unchanged if `epochs` is NaN."""
    if not epochs > progress.beta:
        return progress
    return replace(progress, beta=min(epochs, MAX_EPOCHS), most=max(progress.most, min(epochs, MAX_EPOCHS)))


def _fitted(moments: Moments, seed: int) -> BetaNetwork:
    rng = np.random.default_rng(seed)
    return BetaNetwork.fit(moments.features, moments.done, moments.total, moments.guess, rng)


def _concentration(moments: Moments, seed: int) -> float:
    """Return the largest factor on α and β at which the interval covers enough moments. The network that predicts one
    half of the jobs is fitted to the other half."""
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
    """Return the largest number of remaining epochs by a running job's declaration; infinite without one."""
    if not (math.isfinite(declared) and declared > 0):
        return math.inf
    return min(max(declared - done, LEFT * declared), MAX_EPOCHS)


def _inside(job: FinishedJob) -> list[TrainingState]:
    """Return at most `POINTS` moments of a finished job's training, all with 0 < ρ < 1."""
    if not 0 < job.epochs <= MAX_EPOCHS:
        return []
    inside = [training for training in job.history if 0 < training.epochs < job.epochs]
    if len(inside) > POINTS:
        inside = [inside[i] for i in np.linspace(0, len(inside) - 1, POINTS).round().astype(int)]
    return inside


def _features(training: TrainingState, declared: float) -> list[float]:
    """Return ONES' five features, the share of the declared epochs that is done, and the log of the declared epochs;
    NaN if unknown."""
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

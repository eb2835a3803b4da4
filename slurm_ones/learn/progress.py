"""Fraction of its training that a job has completed: the Beta model of ONES (§3.2).

ρ, the completed fraction, is Beta(α, β), with α the epochs done and β = f(features). f is a small network fitted by
maximum likelihood to finished jobs' logs. With α the epochs done, β is the number of remaining epochs. We differ from
ONES in these points:

- features are standardised, by the same transform in fitting and serving (ONES serves raw features to a network trained
  on their logarithms);
- f is a factor on a first guess: the declared epochs not done yet, or else what finished jobs trained. So the network
  learns only how far jobs deviate from the guess. For a job that declared its epochs, the factor has a lower bound from
  the finished jobs: for a job unlike all of them the network could predict anything;
- f ends in softplus instead of relu, which has the same limits and a gradient everywhere;
- a job that declared its epochs never has more remaining than declared, until it has trained them all. From then on it
  has as many remaining as it is over (`OVERRUN`), since the declaration was too small. So declaring little to be served
  first is soon detected;
- α + β is the certainty in ONES, which follows from the epochs done. Here a factor on both is fitted as well, on jobs
  that the network did not see. So an 80 % interval covers the truth in 80 % of the cases;
- before `ENOUGH` jobs have finished nothing is learned: β is the declaration. A job without a declaration is assumed to
  be half done, and to train ten epochs at least.
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
"""Weight decay: keeps the network near a constant if there are few logs."""
LEAST = 1e-3
"""Smallest β (remaining epochs), which must be positive."""
DECLARED = -1
"""Index of the feature that only jobs with declared epochs have."""
RARE = 0.1
"""Quantile of the remaining work of declared jobs, relative to the first guess, that bounds predictions from below.
Nobody can predict which job is about to stop early."""


@dataclass(frozen=True)
class BetaNetwork:
    """Network from features to remaining epochs: one tanh layer and a softplus output, times a first guess per row."""

    mean: Floats
    deviation: Floats
    weights: Floats
    """All parameters as one vector, the form that the optimiser needs."""
    least: float
    """Smallest factor on the first guess for jobs that declared their epochs."""

    @classmethod
    def fit(cls, features: Floats, done: Floats, total: Floats, guess: Floats, rng: np.random.Generator) -> BetaNetwork:
        """Fit by maximum likelihood of ρ = done/total under Beta(done, β); `features` is (rows, width)."""
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
        """Return β for each row of raw features and its first guess."""
        raw = _forward(self.weights, _transform(features, self.mean, self.deviation))[1]
        factor = np.maximum(np.logaddexp(0.0, raw), np.where(np.isfinite(features[:, DECLARED]), self.least, 0.0))
        return np.maximum(factor * guess, LEAST)


def _transform(features: Floats, mean: Floats, deviation: Floats) -> Floats:
    """Return the standardised features, for fitting and serving: unknown ones become 0, the others are clipped."""
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
    """Return the mean negative log likelihood of ρ under Beta(α, β) plus weight decay, and its gradient."""
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
"""Fewest finished jobs from which anything is fitted."""
NEW_ALPHA = 0.5
"""α of a job that has finished no epoch: α must be positive."""
UNKNOWN_EPOCHS = 10.0
"""Epochs assumed for an unknown job."""
POINTS = 8
"""Largest number of moments of a finished job in the fit, evenly spread."""
LEFT = 0.01
"""Smallest share of the declared epochs that a running job is expected to have remaining."""
OVERRUN = 1.0
"""Remaining epochs per epoch beyond the declared ones, or beyond any finished job's. Lindy's law: a process that has
lasted t lasts another t with probability one half."""
MAX_EPOCHS = 1e6
LEVELS = (0.1, 0.9)
"""Quantiles of the interval whose coverage is calibrated."""
CONCENTRATIONS = np.geomspace(64.0, 1.0 / 64.0, 19)
CROSSED = 400
"""Number of moments of jobs from which the concentration is fitted."""
AT_THE_END = 0.98
"""Share of its declared epochs from which on a job counts as having trained all of them."""


@dataclass(frozen=True)
class TrainingState:
    """Reported state of a job's training at one moment."""

    dataset: int
    """Samples in an epoch."""
    epochs: float
    """Epochs of progress done; may be fractional."""
    initial_loss: float | None = None
    """Loss in the job's first report; None if it reports none."""
    loss: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class FinishedJob:
    """Log of a job that ended by itself."""

    history: Sequence[TrainingState]
    """States at the end of each epoch, in order."""
    epochs: float
    """Total epochs that the job trained."""
    declared: float = 0.0
    """Epochs that the job declared; 0 for none."""


@dataclass(frozen=True)
class Moments:
    """Moments of finished jobs, one per row."""

    job: Floats
    """Index of the job of each row."""
    features: Floats
    done: Floats
    total: Floats
    guess: Floats
    most: Floats
    """Upper bound on the remaining epochs by the declaration; infinite without one."""

    def where(self, rows: npt.NDArray[Any]) -> Moments:
        """Return only these rows; `rows` is a mask or indices."""
        return Moments(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class BetaProgress:
    """Model of running jobs' ρ, learned from finished jobs. Immutable: a new model is fitted when a job finishes."""

    def __init__(self, finished: Sequence[FinishedJob] = (), seed: int = 0) -> None:
        """Fit the model to the logs of all finished jobs; equal logs and seeds give equal models.

        Logs without an epoch before the last one are ignored and do not count towards `ENOUGH`. Takes about 0.1 s for
        200 logs.
        """
        self._network: BetaNetwork | None = None
        self._concentration = 1.0
        self._typical = UNKNOWN_EPOCHS
        self._longest = MAX_EPOCHS
        logs = [(job, inside) for job in finished if (inside := _inside(job))]
        self.jobs = len(logs)
        """Number of finished jobs that the model was fitted to."""
        if self.jobs >= ENOUGH:
            self._typical = float(np.median([job.epochs for job, _ in logs]))
            self._longest = max(job.epochs for job, _ in logs)
            moments = self._moments(logs)
            self._network = _fitted(moments, seed)
            self._concentration = _concentration(moments, seed) if self.jobs >= 2 * ENOUGH else 1.0

    @property
    def fitted(self) -> bool:
        """True if β is learned; False if it comes from the declaration or a default."""
        return self._network is not None

    def progress(self, now: TrainingState, declared_epochs: float = 0.0) -> Progress:
        """Return the distribution of ρ of a job now; `declared_epochs` is 0 without a declaration."""
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
    """Return the progress with at least this number of remaining epochs; NaN changes nothing."""
    if not epochs > progress.beta:
        return progress
    return replace(progress, beta=min(epochs, MAX_EPOCHS), most=max(progress.most, min(epochs, MAX_EPOCHS)))


def _fitted(moments: Moments, seed: int) -> BetaNetwork:
    rng = np.random.default_rng(seed)
    return BetaNetwork.fit(moments.features, moments.done, moments.total, moments.guess, rng)


def _concentration(moments: Moments, seed: int) -> float:
    """Return the largest factor on α and β whose interval covers the truth often enough. It is cross-validated: each
    half of the jobs is predicted from the other."""
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
    """Return the most remaining epochs of a running job by its declaration; infinite without one."""
    if not (math.isfinite(declared) and declared > 0):
        return math.inf
    return min(max(declared - done, LEFT * declared), MAX_EPOCHS)


def _inside(job: FinishedJob) -> list[TrainingState]:
    """Return the moments of a log with 0 < ρ < 1, at most `POINTS`."""
    if not 0 < job.epochs <= MAX_EPOCHS:
        return []
    inside = [training for training in job.history if 0 < training.epochs < job.epochs]
    if len(inside) > POINTS:
        inside = [inside[i] for i in np.linspace(0, len(inside) - 1, POINTS).round().astype(int)]
    return inside


def _features(training: TrainingState, declared: float) -> list[float]:
    """Return ONES' five features, the job's share of its declaration, and the latter's log; NaN if unknown."""
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

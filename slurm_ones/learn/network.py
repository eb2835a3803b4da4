"""The small network behind ONES' progress model (§3.2), fitted by maximum likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import digamma, gammaln

from slurm_ones.schedule.policy import Floats

HIDDEN = 8
ITERATIONS = 60
DECAY = 1e-3
"""Weight decay: keeps the network near a constant where the logs are few."""
LEAST = 1e-3
"""Epochs to come, at least: β must be positive."""


@dataclass(frozen=True)
class Network:
    """Epochs to come, of features: one hidden layer of tanh, softplus at the end, times a first guess for each row."""

    mean: Floats
    deviation: Floats
    weights: Floats
    """All parameters in one vector, as the optimiser wants them."""

    @classmethod
    def fit(cls, features: Floats, done: Floats, total: Floats, guess: Floats, rng: np.random.Generator) -> Network:
        """Maximum likelihood of ρ = done/total under Beta(done, β) over all rows; `features` is (rows, width)."""
        known = np.isfinite(features)
        count = np.maximum(known.sum(axis=0), 1)
        mean = np.where(known, features, 0.0).sum(axis=0) / count
        deviation = np.sqrt((np.where(known, features - mean, 0.0) ** 2).sum(axis=0) / count)
        deviation = np.where(deviation > 1e-9 * np.maximum(np.abs(mean), 1.0), deviation, 1.0)
        inputs = _transform(features, mean, deviation)
        rho = np.clip(done / total, 1e-6, 1.0 - 1e-6)

        width = features.shape[1]
        level = max(float(np.mean((total - done) / guess)), 1e-3)
        start = np.concatenate(
            [
                rng.normal(0.0, 1.0 / math.sqrt(width), width * HIDDEN),
                np.zeros(HIDDEN),
                rng.normal(0.0, 0.1, HIDDEN),
                [level + math.log(-math.expm1(-level))],  # softplus of this is the level
            ]
        )
        found = minimize(
            _loss,
            start,
            args=(inputs, done, rho, guess),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": ITERATIONS},
        )
        weights = np.asarray(found.x, dtype=np.float64)
        return cls(mean, deviation, weights if np.isfinite(weights).all() else start)

    def to_come(self, features: Floats, guess: Floats) -> Floats:
        """β of each row of raw features, given the first guess of it."""
        raw = _forward(self.weights, _transform(features, self.mean, self.deviation))[1]
        result: Floats = np.maximum(np.logaddexp(0.0, raw) * guess, LEAST)
        return result


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


def _loss(weights: Floats, inputs: Floats, alpha: Floats, rho: Floats, guess: Floats) -> tuple[float, Floats]:
    """Mean negative log likelihood of ρ under Beta(α, β) plus weight decay, and its gradient."""
    rows, width = inputs.shape
    hidden, raw = _forward(weights, inputs)
    beta = np.maximum(np.logaddexp(0.0, raw) * guess, LEAST)
    log_density = (
        (alpha - 1.0) * np.log(rho)
        + (beta - 1.0) * np.log1p(-rho)
        + gammaln(alpha + beta)
        - gammaln(alpha)
        - gammaln(beta)
    )
    by_beta = np.log1p(-rho) + digamma(alpha + beta) - digamma(beta)
    by_raw = -by_beta * guess * (0.5 + 0.5 * np.tanh(0.5 * raw)) * (beta > LEAST) / rows

    _, _, second, _ = _split(weights, width)
    by_hidden = np.outer(by_raw, second) * (1.0 - hidden**2)
    gradient = np.concatenate(
        [(inputs.T @ by_hidden).ravel(), by_hidden.sum(axis=0), hidden.T @ by_raw, [by_raw.sum()]]
    )
    decayed = weights.copy()
    decayed[-1] = 0.0  # the output's level is the mean of the logs, not something to shrink
    return float(-log_density.mean() + 0.5 * DECAY * decayed @ decayed), gradient + DECAY * decayed

"""Fitting the step times of many jobs at once: the most likely figures of each, and how sure they are.

What a job measured is its step time at a few sizes, with noise, and no formula is exact: log T = model + misfit +
noise. The misfit is alike at sizes that are alike (a Gaussian process), so a job that is slower than the formula
says at one batch is taken to be slower at the next one too. The figures have a prior, which other jobs teach
(`pool`). The most likely figures are found by damped Gauss-Newton, all jobs in the same few numpy calls; their
covariance is that of the linearised model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.learn.step import (
    ACROSS,
    ACROSS_EACH,
    FIGURES,
    HIGHEST,
    INSIDE,
    INSIDE_EACH,
    LOWEST,
    OVERHEAD,
    OVERLAP,
    SPEED,
    Sizes,
    log_step,
    log_step_and_slopes,
)
from slurm_ones.schedule.policy import Floats

MISFIT = 0.15
"""Standard deviation of what no figures can explain, as a fraction of the step."""
NOISE = 0.07
"""That of one measurement."""
ALIKE_GPUS = 1.0
ALIKE_LOCAL = 1.5
"""Sizes whose GPUs (or samples per GPU) differ by a factor of e^this have misfits correlated by 1/e."""
ITERATIONS = 12
AMONG = 0.5
"""Standard deviation of log figures among jobs of one kind."""


@dataclass(frozen=True)
class Prior:
    """What is believed of a job's figures before it measures: normal and independent, (7,) each."""

    mean: Floats
    deviation: Floats


def _cautious() -> Prior:
    mean, deviation = np.zeros(FIGURES), np.full(FIGURES, 1.0)
    mean[OVERHEAD], deviation[OVERHEAD] = -1.1, 1.2
    # With these a job gains about as n^0.8 inside a node of eight, and little less across: fast networks are usual.
    mean[[INSIDE, INSIDE_EACH, ACROSS, ACROSS_EACH]] = np.log([0.6, 0.05, 1.3, 0.05])
    deviation[ACROSS] = 0.8
    deviation[OVERLAP] = 0.7
    deviation[SPEED] = 4.0
    return Prior(mean, deviation)


CAUTIOUS = _cautious()
"""Before any job has measured anything. One sample/s a GPU: so that an unknown job is taken for a long one."""


@dataclass(frozen=True)
class Points:
    """What one job measured: one point a size and batch, (P,) each."""

    at: Sizes
    log_step: Floats
    """Log seconds."""
    count: Floats
    """Measurements in each, as far as they count: a fraction of one where they are not proven."""


@dataclass(frozen=True)
class Fit:
    """What is known of one job's step time."""

    points: Points
    reference: float
    prior: Prior
    figures: Floats
    """(7,) most likely."""
    covariance: Floats
    """(7, 7)"""
    misfit: Floats
    """(P,) what the figures leave unexplained, weighed for prediction."""
    slopes: Floats
    """(P, 7) derivatives at the points."""
    weights: Floats
    """(P, P) inverse covariance of misfit and noise."""

    @property
    def informed(self) -> Floats:
        """(7,) how much of each figure the job's own measurements say: 0 nothing, 1 all."""
        left = np.diagonal(self.covariance) / self.prior.deviation**2
        result: Floats = np.clip(1.0 - left, 0.0, 1.0)
        return result


def pool(parent: Prior, fits: Iterable[tuple[Fit, float]], weight: float, least: float = 0.25) -> Prior:
    """What jobs, each with how much it counts, teach about another one of their kind; no figure is taken to be surer
    than `least`.

    In how far they differ, `parent` counts like `weight` jobs; in where they lie, the less the vaguer it is.
    """
    known = list(fits)
    if not known:
        return parent
    found = np.stack([fit.figures for fit, _ in known])
    informed = np.stack([counts * fit.informed for fit, counts in known])
    vague = weight * np.minimum(AMONG / parent.deviation, 1.0) ** 2
    mean = (vague * parent.mean + (informed * found).sum(axis=0)) / (vague + informed.sum(axis=0))
    total = weight + informed.sum(axis=0)
    square = weight * parent.deviation**2 + (informed * (found - mean) ** 2).sum(axis=0)
    return Prior(mean, np.maximum(np.sqrt(square / total), least))


def correlated(one: Sizes, other: Sizes) -> Floats:
    """(…, Q, P) covariance of the misfits at the sizes of `one` (…, Q) with those of `other` (…, P)."""
    distance = (
        np.abs(np.log(one.gpus)[..., :, None] - np.log(other.gpus)[..., None, :]) / ALIKE_GPUS
        + np.abs(one.local[..., :, None] - other.local[..., None, :]) / ALIKE_LOCAL
        + np.abs(one.across[..., :, None] - other.across[..., None, :])
    )
    result: Floats = MISFIT**2 * np.exp(-distance)
    return result


def fit_all(jobs: Sequence[tuple[Points, float, Prior]]) -> list[Fit]:
    """The fit of each job from its points, its reference local batch and its prior."""
    if not jobs:
        return []
    most = max(len(points.count) for points, _, _ in jobs)
    if most == 0:
        return [_unmeasured(*job) for job in jobs]

    def padded(arrays: Iterable[Floats], fill: float) -> Floats:
        return np.stack([np.concatenate([a, np.full(most - len(a), fill)]) for a in arrays])

    at = Sizes(
        padded((p.at.local for p, _, _ in jobs), 0.0),
        padded((p.at.passes for p, _, _ in jobs), 1.0),
        padded((p.at.gpus for p, _, _ in jobs), 1.0),
        padded((p.at.across for p, _, _ in jobs), 0.0),
    )
    measured = padded((p.log_step for p, _, _ in jobs), 0.0)
    count = padded((p.count for p, _, _ in jobs), 0.0)
    reference = np.array([[reference] for _, reference, _ in jobs])
    mean = np.stack([prior.mean for _, _, prior in jobs])
    precision = np.stack([prior.deviation for _, _, prior in jobs]) ** -2.0
    there = count > 0
    covariance = correlated(at, at) + np.eye(most) * (NOISE**2 / np.where(there, count, 1.0))[:, None, :]
    weights = np.linalg.inv(np.where(there[:, :, None] & there[:, None, :], covariance, np.eye(most)))
    weights = weights * (there[:, :, None] & there[:, None, :])

    figures = _search(mean, precision, at, reference, measured, weights)
    found, slopes = log_step_and_slopes(figures, at, reference)
    hessian = np.einsum("jpa,jpq,jqb->jab", slopes, weights, slopes) + precision[:, :, None] * np.eye(FIGURES)
    posterior = np.linalg.inv(hessian)
    misfit = np.einsum("jpq,jq->jp", weights, measured - found)
    return [
        Fit(points, base, prior, figures[j], posterior[j], misfit[j, :n], slopes[j, :n], weights[j, :n, :n])
        for j, (points, base, prior) in enumerate(jobs)
        for n in (len(points.count),)
    ]


def _search(mean: Floats, precision: Floats, at: Sizes, reference: Floats, measured: Floats, weights: Floats) -> Floats:
    """(J, 7) figures of least squares, by Gauss-Newton with a damping of its own for each job."""

    def cost(figures: Floats) -> Floats:
        off = measured - log_step(figures, at, reference)
        result: Floats = np.einsum("jp,jpq,jq->j", off, weights, off) + (precision * (figures - mean) ** 2).sum(axis=1)
        return result

    figures: Floats = mean.copy()
    # The speed alone first: the others say little until it is about right.
    gap = measured - log_step(figures, at, reference)
    share = np.abs(weights).sum(axis=2)
    figures[:, SPEED] -= (share * gap).sum(axis=1) / np.maximum(share.sum(axis=1), 1e-9)
    figures = np.clip(figures, LOWEST, HIGHEST)
    best = cost(figures)
    damping = np.full(len(mean), 0.1)
    for _ in range(ITERATIONS):
        found, slopes = log_step_and_slopes(figures, at, reference)
        weighed = np.einsum("jpa,jpq->jaq", slopes, weights)
        downhill = np.einsum("jap,jp->ja", weighed, measured - found) - precision * (figures - mean)
        hessian = np.einsum("jap,jpb->jab", weighed, slopes)
        diagonal = np.einsum("jaa->ja", hessian) * damping[:, None] + precision * (1.0 + damping[:, None])
        step = np.linalg.solve(hessian + diagonal[:, :, None] * np.eye(FIGURES), downhill[:, :, None])[:, :, 0]
        tried = np.clip(figures + np.clip(step, -2.0, 2.0), LOWEST, HIGHEST)
        now = cost(tried)
        better = now < best
        figures = np.where(better[:, None], tried, figures)
        gained = np.max(np.where(better, best - now, 0.0))
        best = np.where(better, now, best)
        damping = np.clip(np.where(better, damping * 0.2, damping * 6.0), 1e-6, 1e6)
        if gained < 1e-4 and (better | (damping > 1e3)).all():
            break
    return figures


def _unmeasured(points: Points, reference: float, prior: Prior) -> Fit:
    nothing = np.zeros(0)
    return Fit(
        points,
        reference,
        prior,
        prior.mean,
        np.diag(prior.deviation**2),
        nothing,
        np.zeros((0, FIGURES)),
        np.zeros((0, 0)),
    )

"""The progress model: what it learns from finished jobs, and what it says before it can."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import check_grad

from slurm_ones.learn import progress
from slurm_ones.learn.progress import ENOUGH, BetaProgress, FinishedJob, TrainingState
from slurm_ones.policy.contract import Floats


def finished(rng: np.random.Generator) -> FinishedJob:
    """A job whose length follows from its dataset's size, with a loss and accuracy that say little."""
    dataset = int(np.exp(rng.uniform(7, 10)))
    epochs = max(3, round(6.0 * (np.log(dataset) - 6.0) + rng.normal(0.0, 0.5)))
    history = [
        TrainingState(dataset, e, 2e3, 2e3 * math.exp(-0.05 * e) + rng.normal(0, 50), rng.uniform(0.3, 0.6))
        for e in range(1, epochs + 1)
    ]
    return FinishedJob(history, epochs)


def errors(model: BetaProgress, jobs: list[FinishedJob]) -> tuple[float, float]:
    """Mean absolute error and correlation of the predicted mean with the true ρ."""
    truth = [(training.epochs / job.epochs, training) for job in jobs for training in job.history[:-1]]
    said = np.array([model.progress(training).mean for _, training in truth])
    true = np.array([rho for rho, _ in truth])
    return float(np.abs(said - true).mean()), float(np.corrcoef(said, true)[0, 1])


def test_learns_from_finished_jobs_what_the_prior_cannot_know() -> None:
    """On unseen jobs the fitted model is near the truth, and the model before any finished is not."""
    rng = np.random.default_rng(0)
    known, unseen = [finished(rng) for _ in range(40)], [finished(rng) for _ in range(40)]
    error, correlation = errors(BetaProgress(known), unseen)
    prior_error, _ = errors(BetaProgress(), unseen)
    assert correlation > 0.95
    assert error < 0.05
    assert error < prior_error / 2


def test_equal_logs_and_seeds_give_equal_models() -> None:
    jobs = [finished(np.random.default_rng(i)) for i in range(8)]
    now = TrainingState(3000, 4, 2.3, 1.9, 0.5)
    assert BetaProgress(jobs, seed=3).progress(now) == BetaProgress(jobs, seed=3).progress(now)


def test_before_enough_jobs_the_declaration_counts() -> None:
    """ρ's mean is epochs done over epochs declared; a job a little beyond its declaration is nearly done, and one far
    beyond it has as much to come as it is over."""
    model = BetaProgress([finished(np.random.default_rng(0)) for _ in range(ENOUGH - 1)])
    assert model.jobs < ENOUGH
    assert model.progress(TrainingState(1000, 6), declared_epochs=24).mean == pytest.approx(0.25)
    assert model.progress(TrainingState(1000, 24.1), declared_epochs=24).beta == pytest.approx(0.24)
    assert model.progress(TrainingState(1000, 30), declared_epochs=24).beta == pytest.approx(6.0)


def test_without_a_declaration_a_convention() -> None:
    """A job of which nothing is known is half done, and trains ten epochs at least."""
    model = BetaProgress()
    assert model.progress(TrainingState(1000, 0)).beta == 10.0
    assert model.progress(TrainingState(1000, 4)).beta == 6.0
    assert model.progress(TrainingState(1000, 40)).mean == pytest.approx(0.5)


def liar(rng: np.random.Generator) -> FinishedJob:
    """A job that trains what it declared, or four times that."""
    declared = int(rng.integers(3, 20))
    epochs = declared * int(rng.choice([1, 4]))
    history = [TrainingState(int(rng.integers(5_000, 90_000)), e, 2.3, 2.3 - 0.02 * e) for e in range(1, epochs + 1)]
    return FinishedJob(history, epochs, declared)


@pytest.mark.parametrize("seed", range(6))
def test_a_job_unlike_all_others_is_not_at_its_end_because_of_that(seed: int) -> None:
    """Nobody stopped before what it declared, so nobody is expected to. One waited eleven hours for a resize, on
    4 of 32 GPUs, with 80 of its 90 epochs to come."""
    rng = np.random.default_rng(seed)
    model = BetaProgress([liar(rng) for _ in range(12)])
    for done in (2.0, 8.0, 30.0, 60.0):
        said = model.progress(TrainingState(1_856_988, done, 6.9, 6.9 - 0.1 * done), declared_epochs=90)
        assert said.beta == pytest.approx(90 - done)


def test_a_declared_end_bounds_what_was_learned() -> None:
    """A job that stops after 3 epochs has at most 2 to come after its first, whatever other jobs did."""
    rng = np.random.default_rng(2)
    model = BetaProgress([finished(rng) for _ in range(10)])
    assert model.jobs >= ENOUGH
    assert model.progress(TrainingState(20000, 1, 2.3, 2.2, 0.3), declared_epochs=3).beta <= 2.0


@pytest.mark.parametrize("epochs", [0.0, -3.0, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("figure", [None, math.nan, math.inf, -1e300, 0.0])
def test_nonsense_gives_a_proper_distribution(epochs: float, figure: float | None) -> None:
    """α and β are positive and finite whatever a job reports, fitted or not."""
    strange = [FinishedJob([TrainingState(0, 1, figure, figure, figure)] * 3, 4) for _ in range(ENOUGH)]
    for model in (BetaProgress(), BetaProgress(strange), BetaProgress([FinishedJob([], math.nan)])):
        found = model.progress(TrainingState(-5, epochs, figure, figure, figure), declared_epochs=math.nan)
        assert 0 < found.alpha < math.inf
        assert 0 < found.beta < math.inf


def test_gradient() -> None:
    """The hand-written gradient is that of the likelihood."""
    rng = np.random.default_rng(0)
    inputs, alpha, rho = rng.normal(size=(20, 5)), rng.uniform(1, 5, 20), rng.uniform(0.1, 0.9, 20)
    guess = rng.uniform(0.5, 50.0, 20)
    weights = 0.3 * rng.normal(size=5 * progress.HIDDEN + 2 * progress.HIDDEN + 1)

    def value(w: Floats) -> float:
        return progress._loss(w, inputs, alpha, rho, guess)[0]

    def gradient(w: Floats) -> Floats:
        return progress._loss(w, inputs, alpha, rho, guess)[1]

    assert check_grad(value, gradient, weights) < 1e-4

"""Optimus: the fitted loss curve, and GPUs by marginal gain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import ClusterView, JobView, Limits, Schedule
from slurm_ones.rivals.optimus import LossCurve, fit
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import Power, cluster, job
from tests import decided
from tests.decided import gpus


def decide(view: ClusterView, jobs: list[JobView], **options: object) -> Schedule:
    return decided.decide(make_policy("optimus", **options), view, jobs)


def reported(curve: LossCurve, epochs: int, scale: float = 1.0) -> tuple[tuple[float, float], ...]:
    at = np.arange(1.0, epochs + 1.0)
    return tuple(zip(at.tolist(), (scale * curve.loss(at)).tolist(), strict=True))


@pytest.mark.parametrize("scale", [1.0, 250.0])
def test_the_fit_recovers_a_known_curve(scale: float) -> None:
    """From ten epochs' losses of any unit: the loss forty epochs on, and when it has converged."""
    true = LossCurve(0.4, 1.0, 0.2)
    found = fit(reported(true, 10, scale))
    assert found is not None
    top = float(true.loss(np.array([1.0]))[0])
    later = np.array([20.0, 50.0])
    assert found.loss(later) * top == pytest.approx(true.loss(later), rel=0.03)
    exact = (math.sqrt(0.4 / (0.01 * top)) - 1.0) / 0.4
    assert found.converged(0.01) == pytest.approx(exact, rel=0.1)


def test_the_fit_bears_noise_and_an_outlier() -> None:
    """Losses of real jobs jump: one that is tripled and noise of a percent move the prediction by less than a third."""
    true, rng = LossCurve(0.4, 1.0, 0.2), seeded(1)
    noisy = [(k, loss * float(rng.normal(1.0, 0.01))) for k, loss in reported(true, 30)]
    noisy[12] = (noisy[12][0], 3.0 * noisy[12][1])
    found = fit(tuple(noisy))
    assert found is not None
    assert found.converged(0.01) == pytest.approx(true.converged(0.01), rel=0.33)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_losses_that_make_no_sense_are_not_fitted(bad: float) -> None:
    """Such losses are left out, and with too few others there is no curve: progress is asked instead."""
    assert fit(tuple((float(k), bad) for k in range(20))) is None
    assert fit(((1.0, 0.5),) * 4) is None


def test_a_loss_that_does_not_fall_has_converged() -> None:
    for losses in ([1.0] * 9, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]):
        found = fit(tuple((float(k), loss) for k, loss in enumerate(losses)))
        assert found is not None
        assert found.converged(0.01) == 0.0


def test_everybody_has_one_gpu_before_anybody_has_two() -> None:
    jobs = [job(i, to_come=10.0**i) for i in range(1, 7)]
    assert gpus(decide(cluster(1), jobs)) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_gpus_go_where_they_save_most() -> None:
    jobs = [job(1, to_come=100.0, model=Power(exponent=0.7)), job(2, to_come=30.0, model=Power(exponent=0.9))]
    found = gpus(decide(cluster(2), jobs))

    def total(a: int, b: int) -> float:
        return 100.0 / math.pow(a, 0.7) + 30.0 / math.pow(b, 0.9)

    best = min(((a, b) for a in (1, 2, 4) for b in (1, 2, 4) if a + b <= 8), key=lambda pair: total(*pair))
    assert (found[1], found[2]) == best


def test_no_gpu_is_given_that_shortens_nothing() -> None:
    """A job that two GPUs make slower keeps one, and the others stay idle."""
    slower = Power(table={1: 100.0, 2: 90.0, 4: 80.0, 8: 70.0, 16: 60.0})
    assert gpus(decide(cluster(2), [job(1, model=slower)])) == {1: 1}


def test_the_batch_stays_as_asked() -> None:
    got = decide(cluster(2), [job(1, requested_batch=192)]).allocations[1]
    assert got.shape.gpus > 1
    assert got.batch == 192


def test_losses_outweigh_what_the_progress_model_says() -> None:
    """Of two jobs alike the one whose loss still falls gets more GPUs than the one that has converged."""
    steep, flat = LossCurve(0.02, 1.0, 0.0), LossCurve(5.0, 1.0, 0.2)
    limits = Limits((1, 2, 3), 64, 1024, 1024)
    jobs = [
        job(i, {f"n{i}": 1}, epochs=10, losses=reported(curve, 10), limits=limits)
        for i, curve in ((1, flat), (2, steep))
    ]
    view = cluster(2, 2, uniform=False)
    assert gpus(decide(view, jobs)) == {1: 1, 2: 3}


def test_sizes_change_every_ten_minutes_only() -> None:
    policy, view = make_policy("optimus"), cluster(2)
    first = policy.decide(view, [job(1)], 0.0, seeded())
    assert first.allocations[1].shape.gpus == 8
    jobs = [job(1, {"n1": 2}), job(2)]
    assert gpus(decided.decide(policy, view, jobs, 60.0)) == {1: 2, 2: 1}
    assert sum(gpus(policy.decide(view, jobs, 600.0, seeded())).values()) == 8


def test_told_it_believes_the_oracle() -> None:
    """As in Pollux's study: the true remaining time decides, not what progress says."""
    view, sizes = cluster(2, uniform=False), tuple(range(1, 9))
    jobs = [
        job(1, to_come=1.0, true_remaining_s=1e6, gpus=sizes),
        job(2, to_come=1e5, true_remaining_s=1.0, gpus=sizes),
    ]
    assert gpus(decide(view, jobs, told=True)) == {1: 7, 2: 1}
    assert gpus(decide(view, jobs)) == {1: 1, 2: 7}

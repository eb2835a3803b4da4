"""Whether what the progress model promises of the rest of a job comes true."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.progress_calibration import calibration
from slurm_ones.learn.progress import BetaProgress, FinishedJob, TrainingState
from slurm_ones.policy.contract import Progress
from tests.marks import nightly

Maker = Callable[[np.random.Generator], FinishedJob]


def early(rng: np.random.Generator) -> FinishedJob:
    """Trains until its accuracy has stopped rising for some epochs, long before what it declared."""
    kind = rng.integers(4)
    dataset, slow, top = [(5_000, 3.0, 0.9), (20_000, 8.0, 0.8), (50_000, 15.0, 0.95), (200_000, 25.0, 0.6)][kind]
    slow *= rng.lognormal(0.0, 0.25)
    epochs = int(np.clip(slow * rng.lognormal(0.4, 0.15) + 10.0 * rng.uniform(0.3, 1.0), 2, 100))
    history = [
        TrainingState(
            dataset,
            e,
            2.3,
            2.3 * (0.1 + 0.9 * math.exp(-e / slow)) * rng.lognormal(0.0, 0.03),
            top * (1.0 - math.exp(-e / slow)) + rng.normal(0.0, 0.01),
        )
        for e in range(1, epochs + 1)
    ]
    return FinishedJob(history, epochs, float(rng.choice([100, 200])))


def declared(rng: np.random.Generator) -> FinishedJob:
    epochs = int(rng.choice([2, 10, 50, 80, 90]))
    history = [
        TrainingState(50_000, e, 2.3, 2.3 * math.exp(-e / 20), min(0.9, e / epochs)) for e in range(1, epochs + 1)
    ]
    return FinishedJob(history, epochs, epochs)


def erratic(rng: np.random.Generator) -> FinishedJob:
    """Ends at any time, whatever it reports: α and β alone would be far too sure of it."""
    epochs = int(np.clip(rng.lognormal(math.log(150.0), 0.8), 3, 3000))
    return FinishedJob([TrainingState(1000, e) for e in range(1, epochs + 1, max(1, epochs // 50))], epochs)


def mixed(rng: np.random.Generator) -> FinishedJob:
    return early(rng) if rng.random() < 0.5 else declared(rng)


def many(maker: Maker, seed: int = 0) -> list[FinishedJob]:
    rng = np.random.default_rng(seed)
    return [maker(rng) for _ in range(120)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("maker", "error", "width"),
    [(early, 0.4, 2.0), nightly(declared, 0.05, 0.1), (mixed, 0.1, math.inf), nightly(erratic, 1.0, math.inf)],
)
def test_the_interval_of_80_percent_holds_the_truth_about_as_often(maker: Maker, error: float, width: float) -> None:
    """On jobs that finished later than those learned from, whether they stop early or train what they declared; and it
    is no wider than it need be, for one that always holds the truth is easy."""
    found = calibration(many(maker))
    assert found.coverage >= 0.65
    assert found.error < error
    assert found.width < width


def test_the_concentration_is_what_makes_it_so() -> None:
    """Jobs of hundreds of erratic epochs: as α + β alone have it, the interval holds the truth far too rarely."""
    jobs = many(erratic)
    model = BetaProgress(jobs[:80])
    wide, narrow = [], []
    for job in jobs[80:]:
        for now in job.history[:-1]:
            found, rest = model.progress(now), job.epochs - now.epochs
            wide.append(found.to_come(0.1) <= rest <= found.to_come(0.9))
            plain = Progress(found.alpha, found.beta)
            narrow.append(plain.to_come(0.1) <= rest <= plain.to_come(0.9))
    assert np.mean(narrow) < 0.5 < 0.65 < np.mean(wide)


def test_quantiles_of_what_is_to_come() -> None:
    """They rise with the level, are around β, come together with concentration, and end at what was declared."""
    plain = Progress(20.0, 30.0)
    levels = [plain.to_come(level) for level in (0.05, 0.5, 0.95)]
    assert levels == sorted(levels)
    assert levels[1] == pytest.approx(30.0, rel=0.05)
    sure = Progress(20.0, 30.0, concentration=50.0)
    assert sure.to_come(0.95) - sure.to_come(0.05) < 0.2 * (levels[2] - levels[0])
    assert Progress(20.0, 30.0, most=33.0).to_come(0.95) == 33.0


def test_too_few_jobs_to_hold_any_out() -> None:
    with pytest.raises(ValueError, match="3 finished jobs cannot be cut in 8 blocks"):
        calibration(many(early)[:3])
    with pytest.raises(ValueError, match="no held-out job"):
        calibration([FinishedJob([], 1.0)] * 20)

"""What is still to be submitted: rates by the hour, bursts, work of jobs that have not ended, and honest doubts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ones_db import Submission
from slurm_ones.learn.arrivals import (
    WEEK_H,
    Submitted,
    arrival_times,
    expected,
    expected_by_partition,
    hourly_rates,
)
from slurm_ones.schedule.policy import Arrivals

DAY = 86400.0


def submitted(time: float, **other: object) -> Submitted:
    return replace(Submitted(time, f"user{time}", 1000.0, 500.0, True), **other)  # type: ignore[arg-type]


def drawn(per_hour: np.ndarray, days: int, seed: int = 0) -> list[float]:
    """Times of a Poisson process with these rates in the hours of each day."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(np.tile(per_hour, days))
    return sorted(3600.0 * (hour + rng.random()) for hour, count in enumerate(counts) for _ in range(count))


def found(jobs: list[Submitted], since: float, now: float) -> Arrivals:
    arrivals = expected(jobs, since, now)
    assert arrivals is not None
    return arrivals


def test_a_rhythm_of_the_day_is_learned_in_weeks() -> None:
    """Few days leave the rate near the mean; weeks tell the hours apart."""
    per_hour = np.where((np.arange(24) >= 8) & (np.arange(24) < 18), 6.0, 0.5)
    errors = []
    for days in (1, 28):
        rates, doubt = hourly_rates(drawn(per_hour, days), 0.0, days * DAY)
        errors.append(np.abs(rates - np.tile(per_hour, 7)).mean())
        assert rates.mean() == pytest.approx(per_hour.mean(), rel=3 * doubt + 0.05)
    assert errors[1] < 0.25 * per_hour.mean() < errors[0]


def test_the_doubt_is_honest() -> None:
    """Of many draws, the mean rate is within its standard deviation about two times in three."""
    within = 0
    for seed in range(60):
        rates, doubt = hourly_rates(drawn(np.full(24, 0.8), 1, seed), 0.0, DAY)
        within += abs(rates.mean() - 0.8) <= doubt * 0.8
    assert 32 <= within <= 52


def test_arrays_and_loops_count_once_and_bring_all_their_work() -> None:
    """One user's submissions within a minute of each other are one arrival."""
    array = [submitted(5000.0 + i, user="alice") for i in range(50)]
    others = [submitted(3000.0 * i) for i in range(1, 6)]
    assert len(arrival_times(sorted([*array, *others], key=lambda job: job.time))) == 6
    arrivals = found([*array, *others], 0.0, 20_000.0)
    assert arrivals.gpu_s == pytest.approx(55 * 1000.0 / 6)
    assert arrivals.seen == 6


def test_jobs_that_run_on_count_with_what_they_held() -> None:
    """Long jobs are known before they end: exponential work is estimated without bias from half of the lives."""
    rng = np.random.default_rng(3)
    work = rng.exponential(8000.0, 400)
    jobs = [
        submitted(60.0 * i, gpu_s=min(w, 4000.0), stay_s=min(w, 4000.0), ended=w < 4000.0) for i, w in enumerate(work)
    ]
    arrivals = found(jobs, 0.0, 24_000.0)
    assert arrivals.gpu_s == pytest.approx(8000.0, rel=0.15)
    assert arrivals.stay_s == pytest.approx(8000.0, rel=0.15)
    only = [job.gpu_s for job in jobs if job.ended]
    assert np.mean(only) < 2000.0


def test_a_busy_hour_raises_what_is_expected_next_and_passes() -> None:
    """More for a while, and the usual rate a day later."""
    usual = [submitted(3600.0 * i + 7) for i in range(200)]
    now = 3600.0 * 200
    burst = [submitted(now - 10.0 * i) for i in range(1, 40)]
    calm, busy = found(usual, 0.0, now), found([*usual, *burst], 0.0, now)
    assert busy.rate[0] > 3 * calm.rate[0]
    assert busy.rate[20] < 1.5 * calm.rate[20]
    assert busy.gap_s() == 1.0 / busy.rate[0] < calm.gap_s()


def test_nothing_is_foretold_from_next_to_nothing() -> None:
    """Nor from jobs that are yet to come: a simulation knows them all."""
    jobs = [submitted(100.0 * i) for i in range(1, 40)]
    assert expected([], 0.0, 100.0) is None
    assert expected(jobs, 0.0, 250.0) is None
    assert expected([replace(job, ended=False) for job in jobs], 0.0, 5000.0) is None
    assert found(jobs, 0.0, 1000.0) == found(jobs[:10], 0.0, 1000.0)


def test_submissions_of_each_partition_from_the_database() -> None:
    """The first partition that a job names; times that cannot be do no harm."""
    rows = [Submission("gpu,spare", f"u{i}", 1e9 + 600.0 * i, 1e9 + 600.0 * i + 300.0, 600.0) for i in range(30)]
    rows += [Submission("gpu", "odd", 1e9 + 100.0, 5.0, -7.0), Submission("rare", "u", 1e9, None, 0.0)]
    told = expected_by_partition(rows, 1e9 + 18_000.0)
    assert told.keys() == {"gpu"}
    assert len(told["gpu"].rate) == 24 and all(math.isfinite(rate) and rate > 0 for rate in told["gpu"].rate)
    assert told["gpu"].rate[0] * 3600 == pytest.approx(6.0, rel=0.2)
    assert len(hourly_rates([], 0.0, 3600.0)[0]) == WEEK_H

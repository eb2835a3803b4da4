"""The figures on outcomes made by hand, and how sure they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from slurm_ones.simulate.outcome import JobOutcome, Outcome, Segment
from slurm_ones.simulate.study.figures import Estimate, compare, completion_times, estimate, figures, metrics_of
from slurm_ones.simulate.study.present import estimated, probability

FIRST = JobOutcome(
    name="a",
    application="x",
    submitted=100.0,
    started=150.0,
    ended=300.0,
    running_s=150.0,
    gpu_s=600.0,
    lost_gpu_s=40.0,
    resizes=2,
    fair_s=100.0,
    metric=0.8,
    target=0.75,
)
SECOND = replace(
    FIRST, name="b", submitted=200.0, ended=600.0, running_s=100.0, gpu_s=400.0, resizes=0, fair_s=500.0, metric=0.7
)
OUTCOME = Outcome("p", "w", 0, gpus=4, jobs=(FIRST, SECOND), decision_s=(0.1, 0.3))
WORK = {"a": 5.0, "b": 50.0}


def test_figures_of_two_jobs() -> None:
    found = figures(OUTCOME, WORK)
    assert found == pytest.approx(
        {
            "mean_jct_s": 300.0,
            "median_jct_s": 300.0,
            "p90_jct_s": 380.0,
            "p99_jct_s": 398.0,
            "longest_tenth_jct_s": 400.0,
            "makespan_s": 500.0,
            "mean_queueing_s": 175.0,
            "mean_running_s": 125.0,
            "gpu_use": 0.5,
            "gpu_seconds_lost": 80.0,
            "resizes_per_job": 1.0,
            "missed_accuracy": 0.5,
            "worst_unfairness": 2.0,
            "unfair_share": 0.5,
            "decision_s": 0.2,
            "decision_p99_s": 0.298,
            "unfinished": 0.0,
        }
    )
    due = {"deadlines_met", "deadlines_promised", "promises_kept", "others_mean_jct_s"}
    assert list(found) == [metric.key for metric in metrics_of("policies") if metric.key not in due]


def test_deadlines_are_counted_by_who_was_promised_what() -> None:
    """A promise that was broken, a deadline that was met without one, and what that did to the others."""
    broken = replace(FIRST, deadline=250.0, promised=True)
    lucky, other = replace(SECOND, deadline=600.0, promised=False), replace(SECOND, name="c")
    found = figures(replace(OUTCOME, jobs=(broken, lucky, other)), {**WORK, "c": 1.0})
    assert found["deadlines_met"] == found["deadlines_promised"] == 0.5
    assert found["promises_kept"] == 0.0
    assert found["others_mean_jct_s"] == 400.0
    assert list(found) == [metric.key for metric in metrics_of("policies")]


def test_longest_jobs_are_those_with_most_to_do() -> None:
    """Which jobs are the longest must not depend on the policy, or each would be judged by jobs of its own choice."""
    assert figures(OUTCOME, {"a": 9.0, "b": 1.0})["longest_tenth_jct_s"] == 200.0


def test_a_job_that_never_ended_counts() -> None:
    """Giving a job up cannot improve a mean: it counts to the end, as unfinished and as short of its accuracy."""
    given_up = replace(SECOND, ended=None, metric=0.9)
    outcome = replace(OUTCOME, jobs=(FIRST, given_up), segments=(Segment("b", 200.0, 900.0, 1, 1, 8),))
    assert list(completion_times(outcome)) == [200.0, 700.0]
    found = figures(outcome, WORK)
    assert found["unfinished"] == 1.0
    assert found["missed_accuracy"] == 0.5
    assert found["makespan_s"] == 800.0


def test_what_is_unknown_is_not_a_number() -> None:
    """No decision and no fair share: NaN rather than zero, which would look splendid."""
    outcome = replace(OUTCOME, jobs=(replace(FIRST, fair_s=math.nan),), decision_s=())
    found = figures(outcome, WORK)
    assert math.isnan(found["worst_unfairness"]) and math.isnan(found["decision_s"])


def test_a_target_of_nan_is_always_reached() -> None:
    """An application without a target cannot miss it."""
    assert figures(replace(OUTCOME, jobs=(replace(FIRST, target=math.nan),)), WORK)["missed_accuracy"] == 0.0


def test_estimates_hold_the_mean_and_are_repeatable() -> None:
    """Intervals are around the mean, narrow for values alike, unknown for one seed, and equal each time."""
    rng = np.random.default_rng(0)
    wide = estimate(list(rng.normal(100, 10, 8)))
    assert wide.low < wide.mean < wide.high
    assert 5 < wide.high - wide.low < 25
    assert estimate([5.0, 5.0]) == Estimate(5.0, 5.0, 5.0)
    alone = estimate([3.0])
    assert alone.mean == 3.0 and math.isnan(alone.low)
    assert math.isnan(estimate([]).mean)
    assert estimate([1.0, 2.0, 4.0]) == estimate([1.0, 2.0, 4.0])


def test_intervals_cover() -> None:
    """About 95 % of the intervals hold the true mean, somewhat fewer with few seeds."""
    rng = np.random.default_rng(1)
    intervals = [estimate(list(rng.normal(50, 5, 20))) for _ in range(120)]
    assert np.mean([i.low <= 50 <= i.high for i in intervals]) > 0.87


def test_comparison_pairs_jobs() -> None:
    """A job-wise improvement far smaller than the jobs' differences is found, since jobs are paired."""
    rng = np.random.default_rng(2)
    first = [rng.lognormal(6, 2, 60) for _ in range(3)]
    better = [seed - rng.uniform(0.5, 1.5, 60) for seed in first]
    found = compare(better, first)
    assert found.difference.mean == pytest.approx(-1.0, abs=0.1)
    assert found.difference.high < 0
    assert found.ratio.mean < 1
    assert found.p_value < 1e-6
    assert found.sooner == 1.0


def test_comparison_of_equals_claims_nothing() -> None:
    """The same times give no p-value and no difference; times that differ at random no small one."""
    times = [np.array([1.0, 2.0, 3.0])]
    same = compare(times, times)
    assert same.difference.mean == 0.0 and math.isnan(same.p_value) and same.sooner == 0.0
    rng = np.random.default_rng(3)
    assert compare([rng.normal(10, 1, 100)], [rng.normal(10, 1, 100)]).p_value > 0.01


def test_cells_say_how_sure_they_are() -> None:
    """A mean alone for one seed, with its interval for several, a dash for nothing."""
    assert estimated(Estimate(1234.4, math.nan, math.nan), "s") == ("1,234", "")
    assert estimated(Estimate(0.5, 0.25, 0.75), "share") == ("50.0", "25.0 – 75.0")
    assert estimated(Estimate(0.0123, 0.0123, 0.0123), "ms") == ("12.3", "")
    assert estimated(None, "s") == estimated(Estimate(math.nan, math.nan, math.nan), "s") == ("–", "")
    assert probability(0.0000123) == "1.2e-05" and probability(0.04) == "0.040"

"""The peace between two resizes, and before a job's end."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from slurm_ones.config import LimitSettings, ResizeSettings
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.policy.contract import Progress
from slurm_ones.rules.job_rules import (
    LONGEST_S,
    grows_at,
    near_end,
    near_limit,
    requeue_dwell_s,
    requeue_near_end_s,
    resized_enough,
    rested_at,
    switch_dwell_s,
)
from slurm_ones.slurm.model import JobState
from slurm_ones.testing.rounds import job as view
from tests.act.make import history
from tests.jobs.make import job

RUNS = WholeJob.of(job())


@pytest.mark.parametrize(
    ("failures", "last", "expected"),
    [(0, None, 170.0), (0, 200.0, 260.0), (1, 200.0, 320.0), (3, 200.0, 680.0), (50, 200.0, 200.0 + 60 * 64)],
)
def test_each_failure_in_a_row_doubles_it(failures: int, last: float | None, expected: float) -> None:
    """A job that Slurm keeps refusing is not restarted for nothing for ever; it started at 110 s here."""
    assert rested_at(RUNS, history(1, failures=failures, last_resize_end=last), 60.0) == expected


def test_failures_of_cheap_changes_are_not_repeated_at_once() -> None:
    """However little a change costs, asking Slurm for what it refuses does not follow it."""
    for failures, expected in ((0, 201.0), (1, 210.0), (50, 200.0 + 5 * 64)):
        assert rested_at(RUNS, history(1, failures=failures, last_resize_end=200.0), 1.0) == expected


def test_failures_do_not_bring_back_a_dwell_time_of_nothing() -> None:
    """A site that sets it to 0 wants none."""
    assert rested_at(RUNS, history(1, failures=3, last_resize_end=200.0), 0.0) == 200.0


def test_the_start_of_a_job_of_blocks_is_no_change() -> None:
    """It started at 110 s; what it waits for is the time after its last change."""
    runs = replace(RUNS, by_blocks=True)
    assert rested_at(runs, history(1), 60.0) <= 110.0
    assert rested_at(runs, None, 60.0) <= 110.0
    assert rested_at(runs, history(1, last_resize_end=200.0, failures=1), 60.0) == 320.0


def test_a_waiting_job_is_free_until_a_resize_of_it_failed() -> None:
    """Nothing of it is interrupted, but holding and releasing it each tick would be no use to anybody."""
    waiting = WholeJob.of(job(state=JobState.PENDING, node_list=(), start_time=0.0))
    assert rested_at(waiting, history(1, last_resize_end=200.0), 60.0) == 0.0
    assert rested_at(waiting, history(1, failures=2, last_resize_end=200.0), 60.0) == 440.0
    assert rested_at(waiting, None, 60.0) == 0.0


@pytest.mark.parametrize(
    ("preempted", "expected"),
    [
        ((), 0.0),
        ((100.0,), 160.0),
        ((100.0, 100.5, 130.0), 190.0),  # two at once, and one during the rest: one time
        ((100.0, 161.0), 281.0),  # in a row
        ((100.0, 161.0, 282.0), 522.0),
        ((100.0, 230.0), 290.0),  # it had its guest for longer than it had rested
        (tuple(100.0 + 1801.0 * n + 60.0 * 2.0**n for n in range(12)), None),
    ],
)
def test_a_job_rests_longer_each_time_that_slurm_takes_blocks_of_it(
    preempted: tuple[float, ...], expected: float | None
) -> None:
    at = grows_at(preempted, 60.0)
    assert at == expected if expected is not None else at - preempted[-1] <= LONGEST_S
    assert grows_at(preempted, 0.0) == 0.0


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, ""),
        ({"resizes_per_job": 4}, ""),
        ({"resizes_per_job": 3}, "it was resized 3 times, as often as the site allows (limits.resizes_per_job)"),
        ({"resizes_per_job": 0}, "it was resized 0 times, as often as the site allows (limits.resizes_per_job)"),
        ({"resizes_per_hour": 3}, ""),
        (
            {"resizes_per_hour": 2},
            "it was resized 2 times within an hour, as often as the site allows (limits.resizes_per_hour)",
        ),
    ],
)
def test_a_job_is_resized_so_often_and_no_more(limits: dict[str, Any], words: str) -> None:
    """At 5000 s, of three resizes the first was begun more than an hour ago."""
    told = history(1, interrupted=(1000.0, 2000.0, 4000.0))
    assert str(resized_enough(RUNS, told, LimitSettings(**limits), 5000.0) or "") == words
    waiting = WholeJob.of(job(state=JobState.PENDING, node_list=(), start_time=0.0))
    assert resized_enough(waiting, told, LimitSettings(**limits), 5000.0) is None
    assert resized_enough(RUNS, None, LimitSettings(**limits), 5000.0) is None


def test_near_its_time_limit() -> None:
    """It started at 110 s and may run for 1000 s."""
    runs = job(time_limit_s=1000.0)
    site = LimitSettings(near_limit_s=200)
    assert near_limit(runs, site, 900.0) is None
    assert str(near_limit(runs, site, 911.0)) == "it is near its time limit: within 200 s (limits.near_limit_s)"
    assert near_limit(job(time_limit_s=0.0), site, 911.0) is None
    # A short limit is near only in its second half.
    short = job(time_limit_s=100.0)
    near = [near_limit(short, site, short.start_time + seconds) is not None for seconds in (0, 49, 51)]
    assert near == [False, False, True]


def test_near_its_end() -> None:
    """100 samples/s on a GPU, epochs of 1000 samples: 20 s for two epochs to come, by its own word."""
    said = Progress(8.0, 2.0, most=2.0)
    runs = view(1, {"n1": 1}, progress=said, batch=64)
    assert near_end([(runs, 19)])[0] is None
    assert str(near_end([(runs, 21)])[0]) == "it is expected to end within 21 s (limits.near_end_s)"
    assert near_end([(runs, 0)])[0] is None
    assert near_end([(view(1, progress=said), 21)])[0] is None
    # Where nobody knows how much is to come, a guess that it is little must be as good as sure.
    guess = replace(said, alpha=1.0, beta=1.0, most=math.inf)
    assert near_end([(replace(runs, progress=guess), 30)])[0] is None
    assert near_end([(replace(runs, progress=guess), 120)])[0] is not None
    for odd in (math.nan, math.inf):
        assert near_end([(replace(runs, progress=Progress(1.0, odd)), 30)])[0] is None


def test_the_waits_follow_from_what_a_requeue_costs_the_job() -> None:
    """At most a fifth of a job's time is lost, whatever it is resized for; what the site says holds as it says it."""
    dear, unknown = history(1, pause_s=100.0), history(1)
    assert [requeue_dwell_s(told, ResizeSettings()) for told in (dear, unknown, None)] == [400.0, 120.0, 120.0]
    assert [requeue_near_end_s(told, LimitSettings()) for told in (dear, unknown, None)] == [200.0, 60.0, 60.0]
    assert requeue_dwell_s(dear, ResizeSettings(dwell_s=0)) == 0.0
    assert requeue_near_end_s(dear, LimitSettings(near_end_s=30)) == 30.0


def test_a_job_does_not_rest_for_ever_by_its_own_word() -> None:
    """Pauses are what jobs say: one that claims a day keeps its GPUs from others for half an hour at most."""
    liar = history(1, pause_s=86_400.0)
    assert requeue_dwell_s(liar, ResizeSettings()) == switch_dwell_s(86_400.0, ResizeSettings()) == LONGEST_S
    assert requeue_near_end_s(liar, LimitSettings()) == LONGEST_S
    assert requeue_dwell_s(liar, ResizeSettings(dwell_s=7200)) == 7200.0

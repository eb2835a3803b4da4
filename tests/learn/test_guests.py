"""How long guests are expected to live."""

from __future__ import annotations

import random

import pytest

from ones_db import GuestRun
from slurm_ones.learn.workload import HOUR_S, KNOWN_S, LIFE_S, GuestLives

NOW = 40 * 86400.0
"""Midnight."""


def ran(start: float, seconds: float, *, preempted: bool = False, partition: str = "gpu", days: int = 1) -> GuestRun:
    start += NOW - days * 86400.0
    return GuestRun(partition, start, start + seconds, preempted)


def lives(*runs: GuestRun, hour: float = 0.0, partition: str = "gpu") -> float:
    return 1.0 / GuestLives(runs, NOW).rate(partition, NOW + hour * HOUR_S)


def test_nothing_is_known_of_a_new_partition() -> None:
    assert lives() == pytest.approx(LIFE_S)
    assert lives(ran(0.0, 60.0, preempted=True, partition="other")) == pytest.approx(LIFE_S)


@pytest.mark.parametrize("mean_s", [60.0, 300.0, 3600.0, 86400.0])
def test_a_life_is_found_again_from_runs_that_chance_ended(mean_s: float) -> None:
    """Runs that end by themselves count as time without a preemption: each is cut off at half its mean, or at 2 h."""
    rng, runs = random.Random(5), []
    for number in range(1000):
        life_s, cut_s = rng.expovariate(1.0 / mean_s), min(0.5 * mean_s, 7200.0)
        runs.append(ran(60.0 * number, min(life_s, cut_s), preempted=life_s < cut_s))
    assert lives(*runs, hour=20.0) == pytest.approx(mean_s, rel=0.35), "an hour in which none of them ran"


def test_hours_differ_as_far_as_they_have_shown_it() -> None:
    """By day guests live for 10 minutes, by night for ever; an hour of which little is known is like the partition."""
    day = [ran(12 * HOUR_S + 600.0 * n, 600.0, preempted=True, days=d) for d in range(1, 8) for n in range(6)]
    night = [ran(2 * HOUR_S, HOUR_S, days=d) for d in range(1, 8) for _ in range(6)]
    at_day, at_night, else_s = (lives(*day, *night, hour=hour) for hour in (12.5, 2.5, 20.0))
    assert at_day < 800 < 3600 < else_s < at_night / 2
    assert lives(*day[:1], hour=12.5) > 0.1 * LIFE_S, "one preemption says little"


@pytest.mark.parametrize("preempted", [True, False])
def test_a_guest_counts_for_each_hour_in_which_it_ran(preempted: bool) -> None:
    """Its preemption for the hour of that alone; what is still running counts until now."""
    across = ran(11.5 * HOUR_S, HOUR_S, preempted=preempted)
    whole = GuestLives([across], NOW)
    parts = GuestLives([ran(11.5 * HOUR_S, 1800.0), ran(12 * HOUR_S, 1800.0, preempted=preempted)], NOW)
    for hour in (11, 12, 13):
        assert whole.rate("gpu", hour * HOUR_S) == pytest.approx(parts.rate("gpu", hour * HOUR_S))
    assert GuestLives([across._replace(end_time=None, preempted=False)], NOW).rate("gpu", 0.0) < 1.0 / LIFE_S


@pytest.mark.parametrize("run", [GuestRun("gpu", 0.0, NOW, False), GuestRun("gpu", NOW + 60.0, NOW, True)])
def test_absurd_times_count_for_little(run: GuestRun) -> None:
    """A start years ago, or one after the end: clocks are set, and Slurm forgets."""
    assert LIFE_S / 10 < lives(run) <= 5 * KNOWN_S

"""What is still to be submitted: how often, by the hour of the week, and how much work it brings.

Submissions of one user within a minute are one arrival, so that an array, or a loop of sbatch, counts once. Arrivals
are Poisson with a rate for each hour of the week. Gamma priors tie it to the rate of that hour on all days, and that
one to the mean rate, so that few weeks teach a little and many all. What is old counts less. The last hours tell more
than the week does: where more came than expected, more is expected for a while.

Work is the GPU-seconds that an arrival's jobs hold in all. Jobs that have not ended are in it with what they held so
far, as exponential lifetimes are estimated from lives that are not over: without them only short jobs would teach.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ones_db import Submission
from slurm_ones.schedule.policy import Arrivals, Floats

BURST_S = 60.0
"""Submissions of one user less than this apart are one arrival."""
HOUR_S = 3600.0
WEEK_H = 168
HALF_LIFE_H = 4.0 * WEEK_H
"""Hours after which what was seen counts half."""
PRIOR = 8.0
"""Arrivals for which the rate of the level above counts: in each hour of the day, and of the week."""
LATELY_H = 2.0
"""Hours that tell whether more comes than usual, and after which an excess has fallen to 1/e."""
STEADY = 4.0
"""Arrivals for which it counts that nothing is unusual."""
AHEAD_H = 24
"""Hours that are foretold."""
ENOUGH = 3
"""Arrivals, and ends, below which nothing is foretold."""


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted."""

    time: float
    """Seconds, by any clock whose days begin at multiples of 86,400."""
    user: str
    gpu_s: float
    """GPU-seconds that it held so far."""
    stay_s: float
    """Seconds from its submission to its end, or until now."""
    ended: bool


def expected_by_partition(submissions: Iterable[Submission], now: float) -> dict[str, Arrivals]:
    """What is to be expected in each partition of which enough is known, given the newest submissions."""
    found: dict[str, list[Submitted]] = defaultdict(list)
    for one in submissions:
        stay_s = max((now if one.end_time is None else one.end_time) - one.submit_time, 0.0)
        job = Submitted(one.submit_time, one.user, max(one.gpu_s, 0.0), stay_s, one.end_time is not None)
        found[one.partition.partition(",")[0]].append(job)
    # Nobody knows how long nothing came before the first that is known.
    told = {name: expected(jobs, min(job.time for job in jobs), now) for name, jobs in found.items()}
    return {name: arrivals for name, arrivals in told.items() if arrivals is not None}


def expected(jobs: Iterable[Submitted], since: float, now: float) -> Arrivals | None:
    """What is to be expected from `now` on, given all jobs submitted from `since` to now; None of too few."""
    known = sorted((job for job in jobs if since <= job.time <= now), key=lambda job: job.time)
    ended = sum(job.ended for job in known)
    times = arrival_times(known)
    if len(times) < ENOUGH or ended < ENOUGH or now <= since:
        return None
    rate, doubt = hourly_rates(times, since, now)
    factor = lately(times, rate, now)
    ahead = np.arange(AHEAD_H)
    usual = rate[(_hour(now) + ahead) % WEEK_H]
    foretold = usual * (1.0 + (factor - 1.0) * np.exp(-(ahead + 0.5) / LATELY_H))
    each = len(known) / len(times)
    work = np.array([job.gpu_s for job in known])
    mean = float(work.sum()) / ended
    spread = float(work.std()) / max(float(work.mean()), 1e-9)
    return Arrivals(
        rate=tuple((foretold / HOUR_S).tolist()),
        gpu_s=mean * each,
        stay_s=sum(job.stay_s for job in known) / ended,
        doubt=math.hypot(doubt, max(spread, 1.0) / math.sqrt(ended)),
        seen=len(times),
    )


def arrival_times(jobs: Sequence[Submitted]) -> list[float]:
    """When each arrival began, of jobs in the order of their submission."""
    last: dict[str, float] = {}
    found = []
    for job in jobs:
        if job.time - last.get(job.user, -math.inf) >= BURST_S:
            found.append(job.time)
        last[job.user] = job.time
    return found


def hourly_rates(times: Sequence[float], since: float, now: float) -> tuple[Floats, float]:
    """Arrivals an hour in each hour of the week (168,), from midnight of the clock's first day on, and the relative
    standard deviation of their mean."""
    count, exposure = np.zeros(WEEK_H), np.zeros(WEEK_H)
    by_hour: dict[int, int] = defaultdict(int)
    for time in times:
        by_hour[math.floor(time / HOUR_S)] += 1
    first, last = math.floor(since / HOUR_S), math.floor(now / HOUR_S)
    for hour in range(max(first, last - 8 * int(HALF_LIFE_H)), last + 1):
        part = min(now, (hour + 1) * HOUR_S) - max(since, hour * HOUR_S)
        weight = 0.5 ** ((last - hour) / HALF_LIFE_H)
        count[hour % WEEK_H] += weight * by_hour[hour]
        exposure[hour % WEEK_H] += weight * part / HOUR_S
    mean = float((count.sum() + 0.5) / max(exposure.sum(), 1e-9))
    ties = PRIOR / mean
    days = count.reshape(7, 24).sum(axis=0), exposure.reshape(7, 24).sum(axis=0)
    daily = (days[0] + ties * mean) / (days[1] + ties)
    rates: Floats = (count + ties * np.tile(daily, 7)) / (exposure + ties)
    return rates, 1.0 / math.sqrt(float(count.sum()) + 0.5)


def lately(times: Sequence[float], rates: Floats, now: float) -> float:
    """Factor by which more comes than the rates (168,) of the hours say: the mean of its Gamma distribution."""
    begin = now - LATELY_H * HOUR_S
    came = sum(time > begin for time in times)
    steps = np.arange(begin, now, HOUR_S / 4)
    usual = sum(float(rates[_hour(step)]) for step in steps) / 4
    return (STEADY + came) / (STEADY + usual)


def _hour(time: float) -> int:
    """Of the clock's week."""
    return math.floor(time / HOUR_S) % WEEK_H

"""Past use of a cluster: its workload (arrival rates, run times, sizes), and how long guests run until preempted."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ones_db import GuestRun, PastJob

HOUR_S = 3600.0


@dataclass(frozen=True)
class Spread:
    """Median and 90th percentile (`most`) of a quantity over jobs."""

    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of these values; None without values."""
        if not values:
            return None
        median, most = np.percentile(np.array(values, dtype=np.float64), [50.0, 90.0])
        return cls(float(median), float(most))


@dataclass(frozen=True)
class Namesakes:
    """Jobs of one user whose names differ only in a number at the end."""

    user: str
    name: str
    jobs: int
    run_s: Spread
    gpus: Spread


@dataclass(frozen=True)
class PastWorkload:
    """Summary of the ended jobs that were submitted in a span of time. Fields ending in `_s` are in seconds."""

    jobs: int
    gpu_jobs: int
    """Number of jobs with GPUs. All further fields except `states` cover only these jobs; if there are none, all
    jobs."""
    first: float
    last: float
    """Unix time of the last submission; `first` is that of the first submission."""
    per_hour: float
    """Mean number of jobs submitted per hour."""
    busiest_hour: int
    """Hour of the day, in local time, with the most submissions."""
    busiest_per_hour: float
    """Mean number of jobs submitted in the busiest hour of a day."""
    run_s: Spread | None
    """Total run time of each job that started, over all its runs."""
    wait_s: Spread | None
    """Time from each job's submission to its first start."""
    gpus: Spread | None
    gpu_hours: float
    restarted: int
    """Number of jobs with more than one run."""
    states: dict[str, int]
    namesakes: tuple[Namesakes, ...]
    """Groups of namesakes with the most GPU time (without GPUs: run time), largest first."""


def script(user: str, name: str) -> tuple[str, str]:
    """Return the user, and the job's name without a number at its end. Equal results mostly mean one script."""
    return user, re.sub(r"[-_.]?\d+$", "", name) or name


def workload(past: Sequence[PastJob], names: int = 5) -> PastWorkload | None:
    """Return the summary of these jobs (in order of submission); None without jobs. `names` limits the namesakes."""
    if not past:
        return None
    with_gpus = [job for job in past if job.gpus]
    counted = with_gpus or list(past)
    started = [job for job in counted if job.start_time is not None]
    first, last = counted[0].submit_time, counted[-1].submit_time
    hours = max((last - first) / HOUR_S, 1.0)
    of_day = Counter(time.localtime(job.submit_time).tm_hour for job in counted)
    busiest, count = of_day.most_common(1)[0]
    return PastWorkload(
        jobs=len(past),
        gpu_jobs=len(with_gpus),
        first=first,
        last=last,
        per_hour=len(counted) / hours,
        busiest_hour=busiest,
        busiest_per_hour=count / max(hours / 24.0, 1.0),
        run_s=Spread.of([job.run_s for job in started]),
        wait_s=Spread.of([max(job.start_time - job.submit_time, 0.0) for job in started if job.start_time is not None]),
        gpus=Spread.of([float(job.gpus) for job in with_gpus]),
        gpu_hours=sum(job.gpu_s for job in counted) / HOUR_S,
        restarted=sum(job.runs > 1 for job in counted),
        states=dict(Counter(job.state for job in past).most_common()),
        namesakes=_namesakes(started, names),
    )


def _namesakes(past: Sequence[PastJob], most: int) -> tuple[Namesakes, ...]:
    groups: dict[tuple[str, str], list[PastJob]] = defaultdict(list)
    for job in past:
        groups[script(job.user, job.name)].append(job)
    several = [(key, jobs) for key, jobs in groups.items() if len(jobs) > 1]
    several.sort(key=lambda item: -sum(job.gpu_s or job.run_s for job in item[1]))
    return tuple(
        Namesakes(user, name, len(jobs), run_s, gpus)
        for (user, name), jobs in several[:most]
        if (run_s := Spread.of([job.run_s for job in jobs])) and (gpus := Spread.of([float(job.gpus) for job in jobs]))
    )


LIFE_S = 4 * 3600.0
"""Expected seconds until a guest is preempted, before any guest was observed."""
PRIOR_EVENTS = 0.25
"""Weight of the prior `LIFE_S`, as a number of preemptions."""
HOUR_EVENTS = 2.0
"""Weight of a partition's overall rate in its rate at each hour of the day, as a number of preemptions."""
KNOWN_S = 14 * 86400.0
"""Age, in seconds, up to which a guest's run counts."""
HOURS = 24


class GuestLives:
    """Rate at which running guests are preempted (1/s), by partition and hour of the day.

    Preemptions are a Poisson process with a gamma prior on its rate. So the mean rate is (prior preemptions +
    preemptions) / (prior seconds + seconds run). The prior of a partition is one preemption in `LIFE_S` seconds, and
    the prior of each of its hours is the rate over all hours. The data are the guests' runs of the last `KNOWN_S`
    seconds.
    """

    def __init__(self, runs: Iterable[GuestRun] = (), now: float = 0.0) -> None:
        self._taken: Counter[tuple[str, int]] = Counter()
        """Number of preemptions, by partition and hour of the day."""
        self._ran_s: dict[tuple[str, int], float] = defaultdict(float)
        for run in runs:
            end = run.end_time if run.end_time is not None else now
            last = _hour(end)
            for last, seconds in _hours(max(run.start_time, now - KNOWN_S), end):
                self._ran_s[run.partition, last] += seconds
            self._taken[run.partition, last] += run.preempted

    def rate(self, partition: str, now: float) -> float:
        """Return the expected preemptions per second of a guest in this partition at this time of day."""
        taken = sum(count for (name, _), count in self._taken.items() if name == partition)
        ran_s = sum(seconds for (name, _), seconds in self._ran_s.items() if name == partition)
        mean = (PRIOR_EVENTS + taken) / (PRIOR_EVENTS * LIFE_S + ran_s)
        here = partition, _hour(now)
        return (HOUR_EVENTS + self._taken[here]) / (HOUR_EVENTS / mean + self._ran_s.get(here, 0.0))


def _hour(time: float) -> int:
    return int(time // HOUR_S) % HOURS


def _hours(start: float, end: float) -> Iterator[tuple[int, float]]:
    while start < end:
        until = min((math.floor(start / HOUR_S) + 1) * HOUR_S, end)
        yield _hour(start), until - start
        start = until

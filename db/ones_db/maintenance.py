"""Keeping a database small while a companion writes it: in steps of well under a second, each with a rest behind it.

It may be stopped at any moment, and goes on where it was when it is called again: what is done is marked, run by run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ones_db.retention import RollUpWork
from ones_db.store import Store

MINUTE_S, HOUR_S = 60.0, 3600.0
JOBS_AT_ONCE = 200
"""Jobs that lose what is no longer kept in one transaction."""
REST_S = 0.05
"""Least rest after a transaction."""


@dataclass(frozen=True)
class Ages:
    """Seconds after a job's end until something becomes of what it left."""

    minutes_s: float
    """Its samples become one a minute."""
    hours_s: float
    """Its samples become one an hour."""
    forget_s: float | None = None
    """Decisions that led to nothing, and the steps of its resizes, are deleted; None keeps them."""


@dataclass(frozen=True)
class Done:
    """What was done, or would be."""

    runs: int = 0
    """Runs looked at."""
    read: int = 0
    """Samples looked at."""
    removed: int = 0
    """Samples that others stand for now."""
    jobs: int = 0
    """Jobs that lost decisions or steps."""
    rows: int = 0
    """Rows that these were."""


def maintain(
    store: Store,
    ages: Ages,
    *,
    dry: bool = False,
    now: float | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    sleep: Callable[[float], object] = time.sleep,
) -> Done:
    """Roll up old samples, and forget what `ages` says; `dry` only counts.

    Nothing of a job that has not ended is touched, and nothing that learning reads of one that has. The companion gets
    the database for as long as each step took. `progress` is called with what is being done, how much of it is done,
    and how much there is.
    """
    now = time.time() if now is None else now
    runs: set[int] = set()
    read = removed = 0
    # What is old enough for hours need not become minutes first.
    for what, age, stretch in (("hours", ages.hours_s, HOUR_S), ("minutes", ages.minutes_s, MINUTE_S)):
        works = deque(RollUpWork(run) for run in store.rollups_due(now - age, stretch) if not (dry and run in runs))
        runs |= {work.run for work in works}
        of = len(works)
        while works:
            progress(what, of - len(works), of)
            began = time.monotonic()
            looked = store.roll_up(works, now - age, stretch, dry=dry)
            read, removed = read + looked.read, removed + looked.removed
            if not dry:
                sleep(max(time.monotonic() - began, REST_S))
        progress(what, of, of)
    jobs = rows = 0
    if ages.forget_s is not None:
        keys = store.forgettable_jobs(now - ages.forget_s)
        jobs = len(keys)
        for first in range(0, jobs, JOBS_AT_ONCE):
            progress("decisions", first, jobs)
            began = time.monotonic()
            rows += store.forget(now - ages.forget_s, keys[first : first + JOBS_AT_ONCE], dry=dry)
            if not dry:
                sleep(max(time.monotonic() - began, REST_S))
        progress("decisions", jobs, jobs)
    return Done(len(runs), read, removed, jobs, rows)

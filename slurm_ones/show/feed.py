"""Data that all viewers of the page share: the database is read, and each part of a page rendered, once per tick."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ones_db import HealthRecord, JobSummary, Store, StoreError, TimelineRow
from slurm_ones.show import live, palette
from slurm_ones.show.columns import ShownJob
from slurm_ones.show.live import Live, read_live, silent

HISTORY_S = 24 * 3600.0
"""Time that the chart of GPUs covers, in seconds before now."""
LOOK_S = 1.0
"""Seconds between two checks of the database for a new tick."""
FIRST_S = 5.0
"""Longest time that a page waits for the first read of the database, in seconds."""
KEPT = 512
"""Largest number of rendered parts of pages that are cached until the next tick. A full cache is emptied."""
USERS = 512
"""Largest number of users whose ended jobs are cached. A full cache is emptied."""
OWN_S = 3600.0
"""Seconds after which a user's ended jobs are read again: old jobs may be corrected or deleted without a tick."""
ERRORS = (StoreError, OSError)


@dataclass(frozen=True)
class Moment:
    """Database at a tick. Each moment has a larger `number` than the one before."""

    number: int = 0
    at: float = 0.0
    """Time at which the database was read, Unix seconds."""
    live: Live = field(default_factory=lambda: Live(""))
    timeline: tuple[TimelineRow, ...] = ()
    """Runs of jobs in the last `HISTORY_S` seconds."""
    others: tuple[tuple[float, int], ...] = ()
    """(Time, GPUs) of each change in the GPUs of jobs that did not opt in, in the last `HISTORY_S` seconds."""
    colours: Mapping[int, int] = field(default_factory=dict)
    """Colour of each job in the timeline, by job id. A job keeps its colour at later moments."""
    problem: str = ""
    """Error if the database could not be read; empty if it could."""
    user: str = ""
    """User to whose jobs this moment is limited; empty for all users."""

    @property
    def ended(self) -> list[ShownJob]:
        """Jobs that have ended, by the time of their end."""
        over = [one for one in self.live.jobs if one.job.end_time is not None]
        return sorted(over, key=lambda one: (one.job.end_time or 0.0, one.job.job_id))

    def colour(self, job_id: int) -> str:
        """Return the CSS class of the job's colour, which is the same in all pictures."""
        return f"c{self.colours.get(job_id, job_id % palette.COLOURS)}"

    def of(self, user: str, ended: Iterable[JobSummary] = ()) -> Moment:
        """Return the moment limited to one user's jobs, with the older jobs `ended` added."""
        own = {one.job.job_id: one for one in (*map(ShownJob, ended), *self.live.jobs) if one.job.user == user}
        jobs = tuple(sorted(own.values(), key=lambda one: (one.job.submit_time, one.job.job_id)))
        view = replace(self.live, jobs=jobs, held=tuple(one for one in self.live.held if one.job_id in own))
        return replace(self, live=view, timeline=tuple(row for row in self.timeline if row.user == user), user=user)

    def job(self, store: Store, job_id: int) -> ShownJob | None:
        """Return the job with this id, read if it ended long ago; None if there is none, or it is another user's."""
        known = next((one for one in self.live.jobs if one.job.job_id == job_id), None)
        one = known or next(map(ShownJob, store.job_summaries([job_id])), None)
        return one if one is not None and self.user in ("", one.job.user) else None


@dataclass(frozen=True)
class _Own:
    read: float
    """Time at which the ended jobs were read, Unix seconds."""
    until: float
    """Time up to which `jobs` is complete, Unix seconds."""
    jobs: tuple[JobSummary, ...]


class TickFeed:
    """Reader of the database. It reads once per tick, however many viewers there are."""

    def __init__(self, opened: Callable[[], Store], *, look_s: float = LOOK_S) -> None:
        """Read the database that `opened` opens."""
        self._opened = opened
        self._look_s = look_s
        self.moment = Moment()
        self.looks = 0
        """Number of full reads of the database."""
        self.looks_of_users = 0
        """Number of times that a user's ended jobs were read."""
        self._kept: Store | None = None
        self._stamp: object = None
        self._health: HealthRecord | None = None
        self._seen: tuple[object, ...] = (None,)
        """(Cluster, tick, leader, True if the companion is silent). If one changes, the database is read again."""
        self._next = asyncio.Event()
        """Event that is set when the next moment has been read."""
        self._made: dict[tuple[int, str, str], asyncio.Task[bytes]] = {}
        self._own: dict[str, _Own] = {}
        """Ended jobs of each user."""

    async def run(self) -> None:
        """Check the database every `look_s` seconds, until cancelled."""
        while True:
            try:
                moment = await asyncio.to_thread(self._look)
                if moment is not None:
                    self._publish(moment)
            # Whatever it is: a watcher that had ended would leave old figures that pass for new ones.
            except Exception as error:
                problem = str(error) or type(error).__name__
                if problem != self.moment.problem:
                    self._publish(replace(self.moment, number=self.moment.number + 1, problem=problem))
            await asyncio.sleep(self._look_s)

    @contextmanager
    def _store(self) -> Iterator[Store]:
        """Context with the database in one read transaction. The connection is kept until an error."""
        try:
            if self._kept is None:
                self._kept = self._opened()
                self._kept.watch()
            with self._kept.one_moment():
                yield self._kept
            # Which cluster is meant is looked up as it is opened, and no companion may have made it known yet.
            if self._kept.key < 0:
                self._close()
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _look(self) -> Moment | None:
        """Return a new moment after a new tick or leader, or if a tick has become late; None if nothing has changed."""
        now, before = time.time(), self.moment
        if self._kept is not None and not before.problem:
            stamp = self._kept.stamp()
            same = stamp is not None and stamp == self._stamp
            if same and silent(self._health, now) == self._seen[-1]:
                return None
            self._stamp = stamp
        with self._store() as store:
            store.check_schema()
            health, leader = store.health(), store.leader()
            tick = health.tick_time if health else None
            seen = (store.cluster, tick, leader.holder if leader else None, silent(health, now))
            self._health = health
            if seen == self._seen and not before.problem:
                return None
            self.looks += 1
            rows = tuple(store.timeline(now - HISTORY_S))
            ran = palette.whole((row.job_id, row.start, math.inf if row.end is None else row.end) for row in rows)
            colours = palette.chosen(ran, before.colours)
            others = tuple(store.other_gpus(now - HISTORY_S))
            moment = Moment(before.number + 1, now, read_live(store), rows, others, colours)
        self._seen = seen
        return moment

    def _publish(self, moment: Moment) -> None:
        self.moment, self._made = moment, {}
        come, self._next = self._next, asyncio.Event()
        come.set()

    async def after(self, number: int, timeout_s: float) -> int:
        """Wait up to `timeout_s` seconds for a moment newer than `number`. Return the number of the newest moment."""
        if self.moment.number == number:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._next.wait(), timeout_s)
        return self.moment.number

    async def once(self, user: str, part: str, make: Callable[[Moment], bytes]) -> bytes:
        """Return a part of a page, which `make` renders at most once per tick and user ("" for all jobs).

        The first page waits for the first read of the database.
        """
        if not self.moment.number:
            await self.after(0, FIRST_S)
        moment = self.moment
        key = (moment.number, user, part)
        if key not in self._made:
            if len(self._made) >= KEPT:
                self._made.clear()
            made = self._made[key] = asyncio.ensure_future(self._make(moment, user, make))
            made.add_done_callback(partial(self._forget_failed, key))
        return await asyncio.shield(self._made[key])

    async def _make(self, moment: Moment, user: str, make: Callable[[Moment], bytes]) -> bytes:
        seen = moment.of(user, await self._ended_of(user, moment)) if user else moment
        return await asyncio.to_thread(make, seen)

    async def _ended_of(self, user: str, moment: Moment) -> tuple[JobSummary, ...]:
        """Return the user's last ended jobs, read from the database at the user's first request."""
        ended = [one.job for one in moment.ended]
        if len(ended) < live.ENDED:
            return ()
        own = self._own.get(user)
        first, last = ((ended[0].end_time or 0.0), (ended[-1].end_time or 0.0)) if ended else (math.inf, 0.0)
        if own is None or own.until < first or moment.at - own.read > OWN_S:
            jobs = await asyncio.to_thread(self._read_ended, user)
            own = _Own(moment.at, last, jobs)
        else:
            found = {job.job_id: job for job in (*own.jobs, *(job for job in ended if job.user == user))}
            kept = sorted(found.values(), key=lambda job: (job.end_time or 0.0, job.job_id))[-live.ENDED :]
            own = replace(own, until=max(last, own.until), jobs=tuple(kept))
        if user not in self._own and len(self._own) >= USERS:
            self._own.clear()
        self._own[user] = own
        return own.jobs

    def _read_ended(self, user: str) -> tuple[JobSummary, ...]:
        self.looks_of_users += 1
        with self._opened() as store:
            return tuple(store.ended_of(user, live.ENDED))

    def _forget_failed(self, key: tuple[int, str, str], made: asyncio.Task[bytes]) -> None:
        """Drop a part that could not be rendered, so that the next request tries again."""
        if (made.cancelled() or made.exception() is not None) and self._made.get(key) is made:
            del self._made[key]

"""What all viewers share: one look at the database a tick, and each part of a page made once for all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ones_db import JobSummary, SchemaError, Store, StoreError, TimelineRow
from slurm_ones.report.live import Live, read_live, silent

HISTORY_S = 24 * 3600.0
"""How much of the past the picture of the GPUs shows."""
LOOK_S = 1.0
"""Seconds between two looks at whether there was a tick."""
KEPT = 512
"""Parts of pages that are kept until the next tick."""
ERRORS = (StoreError, SchemaError, OSError)


@dataclass(frozen=True)
class Moment:
    """What the database had at a tick. A new one has another number."""

    number: int = 0
    at: float = 0.0
    """When it was read, Unix seconds."""
    live: Live = field(default_factory=lambda: Live(""))
    timeline: tuple[TimelineRow, ...] = ()
    problem: str = ""
    """Why the database could not be read; empty where it could."""
    user: str = ""
    """Whose jobs these are alone; empty: everybody's."""

    def of(self, user: str) -> Moment:
        """What one user may see: their own jobs, and of the others nothing."""
        jobs = tuple(job for job in self.live.jobs if job.user == user)
        ids = {job.job_id for job in jobs}
        live = replace(
            self.live,
            jobs=jobs,
            why={job_id: text for job_id, text in self.live.why.items() if job_id in ids},
            causes={job_id: code for job_id, code in self.live.causes.items() if job_id in ids},
            held=tuple(one for one in self.live.held if one.job_id in ids),
        )
        return replace(self, live=live, timeline=tuple(row for row in self.timeline if row.user == user), user=user)

    def job(self, job_id: int) -> JobSummary | None:
        """The job, where it is among those that are seen."""
        return next((job for job in self.live.jobs if job.job_id == job_id), None)


class Feed:
    """Reads the database at each tick of the companion, whatever the number of viewers."""

    def __init__(self, opened: Callable[[], Store], *, look_s: float = LOOK_S) -> None:
        """`opened` opens the database, for reading."""
        self._opened = opened
        self._look_s = look_s
        self.moment = Moment()
        self.looks = 0
        """How often all was read."""
        self._changed = asyncio.Condition()
        self._made: dict[tuple[int, str, str], asyncio.Task[bytes]] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        seen: object = None
        while True:
            try:
                tick = await asyncio.to_thread(self._tick)
                if tick != seen or self.moment.problem:
                    await self._publish(await asyncio.to_thread(self._read))
                    seen = tick
            # Whatever it is: a watcher that had ended would leave old figures that pass for new ones.
            except Exception as error:
                problem = str(error) or type(error).__name__
                if problem != self.moment.problem:
                    await self._publish(replace(self.moment, number=self.moment.number + 1, problem=problem))
            await asyncio.sleep(self._look_s)

    def _tick(self) -> object:
        """What is another one once there is something new: a tick, another leader or none, or a tick that is late."""
        with self._opened() as store:
            health, leader = store.health(), store.leader()
            return (
                store.cluster,
                health.tick_time if health else None,
                leader.holder if leader else None,
                silent(health, time.time()),
            )

    def _read(self) -> Moment:
        self.looks += 1
        now = time.time()
        with self._opened() as store:
            return Moment(self.moment.number + 1, now, read_live(store), tuple(store.timeline(now - HISTORY_S)))

    async def _publish(self, moment: Moment) -> None:
        async with self._changed:
            self.moment = moment
            self._made = {}
            self._changed.notify_all()

    async def after(self, number: int, timeout_s: float) -> int:
        """The number of the newest moment, once it is another one than `number`, or after so many seconds."""
        async with self._changed:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self.moment.number != number), timeout_s)
            return self.moment.number

    async def once(self, user: str, part: str, make: Callable[[Moment], bytes]) -> bytes:
        """A part of a page as one user sees it ("": all users' jobs), made once a tick however many ask."""
        moment = self.moment
        key = (moment.number, user, part)
        if key not in self._made:
            if len(self._made) >= KEPT:
                self._made.clear()
            seen = moment.of(user) if user else moment
            made = self._made[key] = asyncio.ensure_future(asyncio.to_thread(make, seen))
            made.add_done_callback(partial(self._forget_failed, key))
        return await asyncio.shield(self._made[key])

    def _forget_failed(self, key: tuple[int, str, str], made: asyncio.Task[bytes]) -> None:
        """So that whoever asks next has it made again, and need not wait for the next tick."""
        if (made.cancelled() or made.exception() is not None) and self._made.get(key) is made:
            del self._made[key]

"""Events to notify people of: changes that a tick found since the tick before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ones_db import RESIZE_DONE, RESIZE_OVERTAKEN, RESIZE_PREEMPTED
from ones_db.reasons import NO_REASON, SITE_LIMITS, WRONG, Reason
from slurm_ones.companion import Tick
from slurm_ones.config import EventKind
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.text import changed, plain

AGAIN_S = 6 * 3600.0
"""Seconds after which a job's owner is notified of the same reason again."""
GROWTH = ("growth_returns", "growth_stops", "growth_rests", "idle_returns", "idle_stays")
KINDS: dict[str, EventKind] = {
    **dict.fromkeys((*SITE_LIMITS, *GROWTH), "held_back"),
    **dict.fromkeys(WRONG, "cannot_resize"),
    "near_time_limit": "limited",
}
"""Kind of event by a reason's code."""
AS_ASKED = frozenset({"resize_off", "fused", "other_user", "site_acts", "owner_acts", "accounting_only", "opted_out"})
"""Codes of refusals that nobody is notified of."""


class Notice(NamedTuple):
    """Event to notify people of."""

    kind: EventKind
    text: str
    time: float
    job_id: int | None = None
    name: str = ""
    user: str = ""
    own: str = ""
    """Notification address that the job's comment names."""

    def __str__(self) -> str:
        job = "" if self.job_id is None else f"job {self.job_id} ({plain(self.name, 60)}) of {plain(self.user, 40)}: "
        return job + plain(self.text, 500)


class Happenings:
    """Detects the events of each tick. A state that was there at the first tick is no event."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, str], float] = {}
        """Time at which each reason was last reported, by job and code."""
        self._preempted: dict[int, float] = {}
        self._slow: frozenset[str] = frozenset()
        self._first = True

    def of(self, tick: Tick) -> list[Notice]:
        """Events of a tick, in the order of its jobs."""
        jobs, now = tick.observation.elastic, tick.observation.snapshot.time
        found = [*self._ended(tick, now), *self._preemptions(tick, now)]
        for job_id, kind, why in _reasons(tick):
            if now - self._reported.get((job_id, why.code), -math.inf) >= AGAIN_S:
                self._reported[job_id, why.code] = now
                if not self._first:
                    found.append(_about(jobs[job_id], kind, str(why), now))
        self._reported = {key: at for key, at in self._reported.items() if key[0] in jobs}
        slow = frozenset(tick.slow_nodes)
        found += [
            Notice("slow_node", f"node {name} trains at {tick.slow_nodes[name].factor:.0%} of the usual speed", now)
            for name in sorted(slow - self._slow)
            if not self._first
        ]
        self._slow, self._first = slow, False
        return found

    def _ended(self, tick: Tick, now: float) -> Iterator[Notice]:
        for resize in tick.ended:
            one = tick.observation.elastic.get(resize.job_id)
            if one is None or resize.outcome.code in (RESIZE_OVERTAKEN, RESIZE_PREEMPTED):
                continue
            if resize.state == RESIZE_DONE:
                yield _about(one, "resized", f"resized, {changed(resize)}", now)
            else:
                why = str(resize.outcome) or resize.state.replace("_", " ")
                yield _about(one, "cannot_resize", f"was not resized ({changed(resize)}): {why}", now)

    def _preemptions(self, tick: Tick, now: float) -> Iterator[Notice]:
        for job_id, history in tick.histories.items():
            last, one = self._preempted.get(job_id), tick.observation.elastic.get(job_id)
            new = sum(at > last for at in history.preempted) if last is not None else 0
            self._preempted[job_id] = max(history.preempted, default=0.0)
            if new and one is not None:
                yield _about(one, "taken", f"Slurm took {new} block{'s' * (new != 1)} of it for others", now)
        self._preempted = {id_: at for id_, at in self._preempted.items() if id_ in tick.histories}


def _reasons(tick: Tick) -> Iterator[tuple[int, EventKind, Reason]]:
    """Yield for each unchanged job its first reason that is an event."""
    given = {id_: why for one in tick.decided for id_, why in one.schedule.reasons.items()}
    for job_id, one in tick.observation.elastic.items():
        if one.refusal is not None:
            if one.refusal.code not in AS_ASKED:
                yield job_id, "cannot_resize", one.refusal
            continue
        for why in (tick.outcomes.get(job_id, NO_REASON), given.get(job_id, NO_REASON)):
            if why.code in KINDS:
                yield job_id, KINDS[why.code], why
                break


def _about(one: Elastic, kind: EventKind, text: str, now: float) -> Notice:
    job = one.job
    own = one.optin.notify if one.optin is not None else ""
    return Notice(kind, text, now, job.job_id, job.home.name, job.user, own)

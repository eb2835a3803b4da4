"""What a live view shows at one moment: the companion, the jobs, why each has what it has, and who holds which GPUs.

Read at once, so that a view costs the same however much of it is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ones_db import DecisionJobRecord, HealthRecord, HeldRecord, JobSummary, LeaderRecord, NodeRecord, Store
from ones_db.reasons import CAUSES, WRONG, cause_of

ENDED = 100
"""Jobs that have ended, those that did last: a view costs the same however many a site has had."""

LATE = 3.0
"""Ticks that may be missing before the last one is too old; one that asks Slurm in vain waits longer each time."""


class NotSeenYet(Exception):
    """Nothing was published yet for the user of this process; the message says when that comes."""


@dataclass(frozen=True)
class Live:
    """A cluster's elastic jobs at one moment."""

    cluster: str
    jobs: tuple[JobSummary, ...] = ()
    """Those that have not ended and the last that have, in the order of their submission."""
    why: Mapping[int, str] = field(default_factory=dict)
    """Of jobs that have not ended why they have what they have, a sentence each."""
    causes: Mapping[int, str] = field(default_factory=dict)
    """Of those that get no other size why not, as a code of `CAUSES`."""
    held: tuple[HeldRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    """By their names; none where the reader may not see them."""
    leader: LeaderRecord | None = None
    health: HealthRecord | None = None

    @property
    def tick(self) -> tuple[float | None, float | None]:
        """What changes whenever there is something new: the times of the last tick and of the leader's last beat."""
        return (self.health.tick_time if self.health else None, self.leader.beat if self.leader else None)


def read_live(store: Store, also: Collection[int] = ()) -> Live:
    """What the database has now; of jobs that ended the last `ENDED`, and `also` those with these ids. Raises
    `StoreError`."""
    with store.one_moment():
        jobs = store.job_summaries(ended=ENDED)
        older = sorted({*also} - {job.job_id for job in jobs})
        jobs += store.job_summaries(older) if older else []
        jobs.sort(key=lambda job: (job.submit_time, job.job_id))
        newest = store.newest_decisions()
        return Live(
            store.cluster,
            tuple(jobs),
            {job.job_id: text for job in jobs if (text := _why(job, newest.get(job.job_id)))},
            causes(jobs, newest),
            tuple(store.held()),
            tuple(store.nodes()),
            store.leader(),
            store.health(),
        )


def causes(jobs: Iterable[JobSummary], newest: Mapping[int, DecisionJobRecord]) -> dict[int, str]:
    """Of each job that has not ended why it does not get another size, as a code of `CAUSES`: its refusal, or the
    outcome of the newest decision about it. Jobs of which neither tells are left out."""
    found = {}
    for job in jobs:
        if job.end_time is None:
            decided = newest.get(job.job_id)
            outcome, given = (decided.outcome.code, decided.reason.code) if decided is not None else ("", "")
            if code := cause_of(job.refusal_code, outcome, given):
                found[job.job_id] = code
    return found


def wrong(jobs: Iterable[JobSummary], newest: Mapping[int, DecisionJobRecord]) -> dict[int, str]:
    """What is wrong with how jobs that have not ended were started, by the newest decision about each."""
    alive = {job.job_id for job in jobs if job.end_time is None}
    reasons = {job_id: decided.reason for job_id, decided in newest.items() if job_id in alive}
    return {job_id: reason.text for job_id, reason in reasons.items() if reason.code in WRONG}


def counted(codes: Iterable[str]) -> str:
    """How many jobs there are of each cause, most first: `18 jobs: capped by account; 1 job: held by the owner`."""
    counts = Counter(codes)
    shown = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{count} job{'s' * (count != 1)}: {CAUSES[code]}" for code, count in shown)


def silent(health: HealthRecord | None, now: float) -> bool:
    """Whether ticks are missing of a companion that has ticked before."""
    if health is None or health.tick_time is None:
        return False
    return now - health.tick_time > LATE * health.interval_s


def left_s(job: JobSummary) -> float | None:
    """Seconds that a running job still needs at its present throughput, by the epochs that it declared; None where that
    is not known."""
    if not (job.running and job.samples_per_s and job.epochs and job.dataset) or job.epoch is None:
        return None
    return max(job.epochs * job.dataset - job.epoch * job.dataset - (job.cursor or 0), 0) / job.samples_per_s


def _why(job: JobSummary, decided: DecisionJobRecord | None) -> str:
    if job.end_time is not None:
        return ""
    if job.refusal or decided is None:
        return job.refusal
    return decided.outcome.text or decided.reason.text

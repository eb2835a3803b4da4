"""What a live view shows at one moment: the companion, the jobs, why each has what it has, and who holds which GPUs.

Read at once, so that a view costs the same however much of it is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ones_db import (
    DecisionJobRecord,
    HealthRecord,
    HeldRecord,
    JobSummary,
    LeaderRecord,
    NodeRecord,
    PromiseRecord,
    Store,
)
from ones_db.reasons import CAUSES, WRONG, cause_of
from slurm_ones.show.columns import ShownJob, ShownNode

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
    wrong: Mapping[int, str] = field(default_factory=dict)
    """Of jobs that have not ended, problems with how they were started."""
    promises: Mapping[int, PromiseRecord] = field(default_factory=dict)
    """What was last said of deadlines."""
    held: tuple[HeldRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    """By their names; none where the reader may not see them."""
    leader: LeaderRecord | None = None
    health: HealthRecord | None = None

    def shown(self, job: JobSummary) -> ShownJob:
        """One of the jobs with what was decided for it."""
        said = [of.get(job.job_id) for of in (self.why, self.causes, self.wrong)]
        return ShownJob(job, said[0] or "", said[1], said[2] or "", self.promises.get(job.job_id))

    @property
    def node_rows(self) -> list[ShownNode]:
        """The nodes by their names; those that only a job names last."""
        return node_rows(self.nodes, self.held)

    @property
    def tick(self) -> tuple[float | None, float | None]:
        """What changes whenever there is something new: the times of the last tick and of the leader's last beat."""
        return (self.health.tick_time if self.health else None, self.leader.beat if self.leader else None)


def node_rows(nodes: Iterable[NodeRecord], held: Iterable[HeldRecord]) -> list[ShownNode]:
    """The nodes by their names, with what jobs hold there; those that only a job names last."""
    holding: dict[str, dict[int, int]] = {}
    for one in held:
        of_node = holding.setdefault(one.node, {})
        of_node[one.job_id] = of_node.get(one.job_id, 0) + one.gpus
    rows = [ShownNode(node.name, node.state, node.gpus, holding.pop(node.name, {})) for node in nodes]
    return rows + [ShownNode(name, "", 0, holding[name]) for name in sorted(holding)]


def read_live(store: Store, also: Collection[int] = (), *, only: Collection[int] = (), whole: bool = False) -> Live:
    """What the database has now: of jobs that ended the last `ENDED`, or the `whole` of them, and `also` those with
    these ids; or `only` these. Raises `StoreError`."""
    with store.one_moment():
        jobs = store.job_summaries(sorted(only)) if only else store.job_summaries(ended=None if whole else ENDED)
        older = sorted({*also} - {job.job_id for job in jobs})
        jobs += store.job_summaries(older) if older else []
        jobs.sort(key=lambda job: (job.submit_time, job.job_id))
        newest = store.newest_decisions()
        return Live(
            store.cluster,
            tuple(jobs),
            {job.job_id: text for job in jobs if (text := _why(job, newest.get(job.job_id)))},
            causes(jobs, newest),
            wrong(jobs, newest),
            store.promises([job.job_id for job in jobs]),
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
    return {job_id: str(reason) for job_id, reason in reasons.items() if reason.code in WRONG}


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


def _why(job: JobSummary, decided: DecisionJobRecord | None) -> str:
    if job.end_time is not None:
        return ""
    if job.refusal or decided is None:
        return job.refusal
    return str(decided.outcome) or str(decided.reason)
